// Runs the planner's steps on a GPU.
#pragma once

#include <span>
#include <vector>

#include "cuda/context.hpp"
#include "cuda/lane.hpp"
#include "cuda/swap_steps.hpp"
#include "swap/items.hpp"

namespace fdcache::cuda {

struct Kernels {
    FunctionHandle copy_in;
    FunctionHandle copy_out;
    FunctionHandle sum;
    FunctionHandle copy_words;
    FunctionHandle read_peer;
};

// The chunks of all planes, in order, as the kernels read them.
struct ChunkTable {
    std::vector<swap::Chunk> chunks;
    std::vector<unsigned> first;  // first chunk of each plane, and the end
};

ChunkTable make_chunks(const std::vector<Plane> &planes, std::size_t record_bytes);

// Thread blocks of a kernel, and threads in each.
struct Grid {
    unsigned blocks;
    unsigned threads;
};

// Threads of a warp.
inline constexpr unsigned kLanes = 32;
// Kernels that access host memory in place use few wide blocks: two cover the latency of the link.
inline constexpr unsigned kWide = 512;
// Kernels between ring and layers use as many threads in small blocks on all multiprocessors: other kernels
// lose less to a few threads everywhere than to whole multiprocessors.
inline constexpr unsigned kNarrow = 64;

inline Grid spread(unsigned thread_blocks) {
    return {thread_blocks * (kWide / kNarrow), kNarrow};
}

// The data that the steps of one batch work on. Addresses are the device's.
struct Tables {
    const std::vector<Plane> &planes;
    const std::vector<unsigned> &first_chunk;
    Address chunks;
    Address blocks;
};

// Calls throw Error if the driver refuses.
class StepRunner {
  public:
    StepRunner(const Context &context, const Kernels &kernels, const SwapPolicy &policy, Direction direction,
               const Tables &tables, Lane &lane)
        : context_(context),
          kernels_(kernels),
          policy_(policy),
          direction_(direction),
          tables_(tables),
          lane_(lane) {}

    void run(const StepList &list);
    void sum(PlaneRange planes, Rows rows);
    // Copies a small table to or from pinned host memory with a kernel.
    void copy_table(Address from, Address to, std::size_t nbytes);

  private:
    void run(const TakeSlot &step);
    void run(const FreeSlot &step);
    void run(const HandOver &step);
    void run(const CopyPieces &step);
    void run(const CopyRows &step);
    void run(const RunKernel &step);
    void launch(FunctionHandle function, Grid most, PlaneRange planes, Rows rows, swap::Target target);
    StreamHandle stream(Queue queue) const { return queue == Queue::kMain ? lane_.main() : lane_.copy(); }

    const Context &context_;
    const Kernels &kernels_;
    const SwapPolicy &policy_;
    const Direction direction_;
    const Tables tables_;
    Lane &lane_;
    Address slot_ = 0;
    std::span<const Piece> pieces_;
    std::vector<Address> sources_, targets_;  // of one call of the driver
    std::vector<std::size_t> sizes_;
};

}  // namespace fdcache::cuda
