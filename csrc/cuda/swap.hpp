// Batches of block copies on a GPU: enqueued on its streams, and finished on the host once they have ended.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "copy/record.hpp"
#include "cuda/context.hpp"
#include "cuda/lane.hpp"
#include "cuda/step_runner.hpp"
#include "cuda/swap_steps.hpp"
#include "swap/items.hpp"

namespace fdcache::cuda {

// Number of batches in flight on one device, by direction.
class Traffic : public std::enable_shared_from_this<Traffic> {
  public:
    void add(Direction direction, int count) { counts_[index(direction)] += count; }
    bool is_contended(Direction direction) const { return counts_[1 - index(direction)] > 0; }
    // True for a batch with at most one other of its direction: the link is not full for long.
    bool is_light(Direction direction) const { return counts_[index(direction)] <= 2; }

  private:
    static std::size_t index(Direction direction) { return direction == Direction::kToHost ? 1 : 0; }

    std::array<std::atomic<int>, 2> counts_{};
};

// Shared by all batches of one device.
struct SwapDevice {
    const std::shared_ptr<Context> context;
    const Kernels kernels;
    const SwapPolicy policy;
    const std::shared_ptr<Traffic> traffic = std::make_shared<Traffic>();
};

// Planes of a device cache, with the table of their chunks on the device.
struct SwapPlanes {
    const std::shared_ptr<const std::vector<Plane>> planes;
    const Address chunks;
    const std::vector<unsigned> first_chunk;
};

// Records of an arena, with the addresses of its extents on the device.
struct SwapRecords {
    const std::shared_ptr<const RecordTable> table;
    const std::shared_ptr<const std::vector<Address>> extents;
};

// One batch. Owns no memory of planes, records or tables.
class Swap {
  public:
    // `verify`: compare loads with their records' checksums.
    Swap(std::shared_ptr<const SwapDevice> device, Direction direction,
         std::shared_ptr<const SwapPlanes> planes, SwapRecords records, CopyBlocks blocks,
         const std::array<std::uint8_t, 16> &fingerprint, bool verify);
    ~Swap();
    Swap(const Swap &) = delete;
    Swap &operator=(const Swap &) = delete;

    std::size_t size() const { return blocks_.size(); }
    // Size of the block table, and its place in pinned host memory and on the device.
    std::size_t table_bytes() const { return blocks_.size() * sizeof(swap::Block); }
    void set_table(std::uint8_t *host, Address device);

    // Announces that `by` will enqueue or refuse the whole batch.
    void promise(std::weak_ptr<Promiser> by);
    // Enqueues a range; ranges come in order. `unhurried`: by a thread that may take its time. The first one
    // checks the headers and plans. If the driver refuses, the batch ends: `done` is recorded and `finish`
    // reports the error.
    void enqueue(Lane &lane, PlaneRange range, bool unhurried);
    // Ends the batch before it starts: copies nothing, and `finish` reports the reason.
    void refuse(StreamHandle main, const std::string &reason);
    bool started() const { return promised_; }
    // True once all of the batch is enqueued, its records were what the plan names, and no checksum is
    // compared.
    bool is_certain() const { return certain_.load(std::memory_order_acquire); }
    const std::vector<Plane> &planes() const { return *planes_->planes; }
    const std::shared_ptr<Event> &done() const { return done_; }

    // Call once `done` is reached: checks the headers again and marks complete records ready.
    void finish();
    const std::vector<BlockFault> &faults() const { return faults_; }
    const std::vector<std::uint64_t> &checksums() const { return sums_; }
    // Bytes of all blocks, and of the blocks that were copied.
    std::uint64_t total_bytes() const { return kind_.payload_bytes * blocks_.size(); }
    std::uint64_t copied_bytes() const;
    double seconds() const { return seconds_; }
    const std::string &error() const { return error_; }

  private:
    void prepare();
    void begin(StepRunner &runner, Lane &lane);
    void end(StepRunner &runner, Lane &lane);
    void fail(Lane &lane, const std::string &reason);
    void leave_traffic();
    std::size_t rows_bytes() const { return rows_.size() * sizeof(swap::Block); }
    void prefetch_header(std::span<const std::size_t> order, std::size_t row) const;
    void finish_out(std::size_t row);
    void finish_in(std::size_t row);

    Context &context() const { return *device_->context; }
    SlotHeader *header_of(std::size_t block) const {
        return records_.table->header(blocks_.host_slots[block]);
    }

    const std::shared_ptr<const SwapDevice> device_;
    const Direction direction_;
    const std::shared_ptr<const SwapPlanes> planes_;
    const SwapRecords records_;
    const CopyBlocks blocks_;
    const RecordKind kind_;
    const bool verify_;

    std::vector<BlockFault> faults_;
    std::vector<std::uint64_t> sums_;
    std::vector<std::size_t> order_;   // the block of each row
    std::vector<SlotHeader> headers_;  // of each row, at the start of the batch
    std::vector<swap::Block> rows_;    // sorted by host slot
    std::vector<Rows> runs_;
    std::optional<SwapPlanner> planner_;
    swap::Block *host_table_ = nullptr;
    Address device_table_ = 0;

    std::shared_ptr<Event> begun_;
    std::shared_ptr<Event> done_;
    std::atomic<bool> promised_{false};
    std::atomic<bool> certain_{false};
    bool ended_ = false;
    bool finished_ = false;
    bool in_traffic_ = true;
    std::string error_;
    double seconds_ = 0;
};

}  // namespace fdcache::cuda
