// Host and device memory, streams and tables for batches of block copies, and checks of their results.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/submitter.hpp"
#include "cuda/swap.hpp"
#include "native/checks.hpp"
#include "native/stand_in_kernels.hpp"
#include "native/stand_in_streams.hpp"

namespace fdcache::stand_in {

using EventPtr = std::shared_ptr<cuda::Event>;

// Number of device blocks. Host slots [0, kBlocks) have records with distinct bytes; as many slots after them
// are empty.
inline constexpr int kBlocks = 24;
inline constexpr std::size_t kPlanes = 4;
// All blocks together are more than a calling thread enqueues by itself.
inline constexpr std::size_t kPlaneBytes = std::size_t{192} << 10;
inline constexpr std::size_t kRecordBytes = kPlanes * kPlaneBytes;

inline const std::vector<PlaneRange> kGroups{{0, 1}, {1, 2}, {2, kPlanes}};
inline const std::vector<PlaneRange> kWhole{{0, kPlanes}};

using tests::expect;

// Waits for the event; ends the process after a timeout.
void await(const EventPtr &event, const std::string &name);

struct SlotPair {
    int host;
    int device;
};

// Pairs of a device block and the host slot of the same number.
std::vector<SlotPair> same_slots(int count = kBlocks);

// One batch, the memory of its table, and the events of its ranges.
struct Batch {
    std::string name;
    std::vector<SlotPair> pairs;
    std::vector<std::uint32_t> generations;
    std::vector<Digest> hashes;
    std::vector<swap::Block> host_table, device_table;
    std::shared_ptr<cuda::Swap> swap;
    std::vector<EventPtr> events;

    // Waits for all events and finishes the batch.
    void finish();
    // Finishes the batch and expects that every block was copied.
    void expect_copied();
    // Finishes the batch and expects that no block was copied and that the error contains `words`.
    void expect_failed(const std::string &words);
};

// The streams of one purpose and their staging ring.
class LaneWorld {
  public:
    explicit LaneWorld(std::shared_ptr<cuda::Context> context);
    cuda::StreamHandle main() { return &main_; }
    const std::shared_ptr<cuda::Lane> &lane() const { return lane_; }

  private:
    std::vector<std::uint8_t> ring_;
    Stream main_, copy_;
    std::shared_ptr<cuda::Lane> lane_;
};

// Enqueues ranges of the batch and stores their events in it.
void submit(cuda::Submitter &submitter, const LaneWorld &lane, Batch &batch,
            const std::vector<PlaneRange> &ranges);

class World {
  public:
    explicit World(cuda::SwapChoice way = cuda::SwapChoice::kDirect);

    const std::shared_ptr<cuda::Context> context;

    EventPtr event() const { return std::make_shared<cuda::Event>(context, false); }
    EventPtr promised() const;
    Batch load(std::string name, std::vector<SlotPair> pairs) const;
    Batch backup(std::string name, std::vector<SlotPair> pairs) const;

    // True if these planes of the device block have the bytes of the host record.
    bool has_bytes(int device, int host, PlaneRange planes = kWhole[0]) const;
    bool are_same_records(int host, int other) const;
    void expect_loaded(const Batch &batch) const;

  private:
    Batch make(Direction direction, std::string name, std::vector<SlotPair> pairs) const;

    std::vector<std::uint8_t> device_, host_;
    std::vector<SlotHeader> headers_;
    cuda::ChunkTable chunks_;
    std::shared_ptr<const cuda::SwapDevice> gpu_;
    std::shared_ptr<const cuda::SwapPlanes> planes_;
    std::shared_ptr<const RecordTable> records_;
};

}  // namespace fdcache::stand_in
