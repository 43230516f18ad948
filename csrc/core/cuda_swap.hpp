// Batches of block copies on a GPU: put on its streams, and made up on the host once they have ended.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/cuda_context.hpp"
#include "core/cuda_lane.hpp"
#include "core/record.hpp"
#include "core/record_check.hpp"
#include "core/swap_plan.hpp"
#include "swap/items.hpp"

namespace fdcache::cuda {

struct Kernels {
    FunctionHandle copy_in;
    FunctionHandle copy_out;
    FunctionHandle sum;
};

// A plane's chunks for the kernels, in the planes' order.
struct ChunkTable {
    std::vector<swap::Chunk> chunks;
    std::vector<unsigned> first;  // of each plane, and the end
};

ChunkTable make_chunks(const std::vector<Plane> &planes, std::size_t record_bytes);

// One batch. It owns none of the memory it names.
class Swap {
  public:
    Swap(std::shared_ptr<Context> context, Kernels kernels, const SwapPolicy &policy, Direction direction,
         std::vector<Plane> planes, Address chunks, std::vector<unsigned> first_chunk, RecordTable records,
         const std::vector<Address> &extents, std::vector<BlockPair> pairs,
         const std::array<std::uint8_t, 16> &fingerprint, bool verify);

    // Bytes of the block table, and where it is: in pinned host memory, and on the device.
    std::size_t table_bytes() const { return pairs_.size() * sizeof(swap::Block); }
    void set_table(std::uint8_t *host, Address device);

    // Ranges come in order. A refusal by the driver ends the batch: `done` is recorded and `finish` tells.
    void enqueue(Lane &lane, PlaneRange range);
    // Ends the batch before it began: nothing is copied, and `finish` tells the reason.
    void refuse(StreamHandle main, const std::string &reason);
    bool started() const { return started_; }
    const std::vector<Plane> &planes() const { return planes_; }
    const std::shared_ptr<Event> &done() const { return done_; }

    // Once `done` is reached: looks at the headers again, stamps records that arrived ready.
    void finish();
    const std::vector<BlockFault> &faults() const { return faults_; }
    const std::vector<std::uint64_t> &checksums() const { return sums_; }
    std::uint64_t copied_bytes() const;
    double seconds() const { return seconds_; }
    const std::string &error() const { return error_; }

  private:
    // One side of a strided copy.
    struct Side {
        Address address;
        std::size_t pitch;
    };

    void begin(Lane &lane);
    void run(Lane &lane, PlaneRange range);
    void run_kernel(Lane &lane, PlaneRange range);
    void run_staged(Lane &lane, PlaneRange range);
    void run_direct(Lane &lane, PlaneRange range);
    void end(Lane &lane);
    void fail(Lane &lane, const Error &error);
    void copy_rows(StreamHandle stream, Address staging, PlaneRange range, Rows rows);
    void copy_plane(const Plane &plane, StreamHandle stream);
    void copy_run(Side host, Side device, std::size_t width, std::size_t rows, StreamHandle stream);
    void copy_strided(Side host, Side device, std::size_t width, std::size_t rows, StreamHandle stream);
    void add_piece(Address host, Address device, std::size_t nbytes, StreamHandle stream);
    void flush_pieces(StreamHandle stream);
    void launch(FunctionHandle function, unsigned ctas, PlaneRange range, Rows rows, swap::Target target,
                StreamHandle stream);
    void finish_out(std::size_t row);
    void finish_in(std::size_t row);
    const SwapThresholds &limits() const;

    const std::shared_ptr<Context> context_;
    const Kernels kernels_;
    const SwapPolicy policy_;
    const Direction direction_;
    const std::vector<Plane> planes_;
    const Address chunks_;
    const std::vector<unsigned> first_chunk_;
    const RecordTable records_;
    const std::vector<BlockPair> pairs_;
    const RecordKind kind_;
    const bool verify_;

    std::vector<BlockFault> faults_;
    std::vector<std::uint64_t> sums_;
    std::vector<SlotHeader> headers_;  // as they stood at the start, by pair
    std::vector<std::size_t> order_;   // the pair of each row
    std::vector<swap::Block> rows_;    // sorted by host slot
    std::vector<std::int64_t> device_slots_;
    std::vector<Rows> runs_;
    swap::Block *host_table_ = nullptr;
    Address device_table_ = 0;

    struct Pieces {
        std::vector<Address> sources, targets;
        std::vector<std::size_t> sizes;
        std::size_t nbytes = 0;
    } pieces_;

    std::shared_ptr<Event> begun_;
    std::shared_ptr<Event> done_;
    bool started_ = false;
    bool ended_ = false;
    bool finished_ = false;
    std::string error_;
    double seconds_ = 0;
};

}  // namespace fdcache::cuda
