// The steps of a batch of block copies. The planner touches no device, so that a GPU, or anything else that
// can copy bytes, can run the steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "copy/record.hpp"
#include "cuda/driver.hpp"
#include "cuda/swap_plan.hpp"
#include "swap/items.hpp"

namespace fdcache::cuda {

// Two queues that run concurrently, each in order: kernels on kMain, copy engine copies on kCopy.
enum class Queue : std::uint8_t { kMain, kCopy };

// Addresses of staged steps are offsets into the ring slot that was taken last.
struct TakeSlot {
    Queue user;  // waits until the slot is free
};
struct FreeSlot {
    Queue user;  // frees the slot once its work so far is done
};

// `to` waits for the work given to `from` so far.
struct HandOver {
    Queue from;
    Queue to;
};

// Copies StepList::pieces [first, first + count), few enough bytes for one call of the driver.
struct CopyPieces {
    std::size_t first;
    std::size_t count;
    bool staged;
};

// One copy of equally spaced rows.
struct CopyRows {
    Address host;
    std::size_t host_pitch;
    Address device;
    std::size_t device_pitch;
    std::size_t width;
    std::size_t rows;
    bool staged;
};

// A kernel over the planes of some blocks. kMove copies between layers and records or, staged, ring rows that
// are `pitch` bytes apart; copies to the host add to the checksum. kSum only adds to the checksum.
struct RunKernel {
    enum class Kind : std::uint8_t { kMove, kSum } kind;
    PlaneRange planes;
    Rows rows;
    bool staged;
    std::size_t pitch;
};

using Step = std::variant<TakeSlot, FreeSlot, HandOver, CopyPieces, CopyRows, RunKernel>;

struct Piece {
    Address host;
    Address device;
    std::size_t nbytes;
};

struct StepList {
    std::vector<Step> steps;
    std::vector<Piece> pieces;
};

class StepBuilder;

// Plans one batch, plane range by plane range. `blocks` are sorted by host slot; `runs` are their runs.
class SwapPlanner {
  public:
    SwapPlanner(const SwapPolicy &policy, Direction direction, std::span<const Plane> planes,
                std::size_t record_bytes, std::span<const swap::Block> blocks, std::span<const Rows> runs);

    // Ring slots have `slot_bytes`. `contended`, `unhurried`: as in Batch.
    StepList plan(PlaneRange range, std::size_t slot_bytes, bool contended, bool unhurried) const;

  private:
    void plan_kernel(StepBuilder &steps, PlaneRange range) const;
    void plan_staged(StepBuilder &steps, PlaneRange range, std::size_t slot_bytes) const;
    void plan_direct(StepBuilder &steps, PlaneRange range) const;
    void copy_run(StepBuilder &steps, const CopyRows &run) const;
    const SwapThresholds &limits() const;

    const SwapPolicy policy_;
    const Direction direction_;
    const std::span<const Plane> planes_;
    const std::size_t record_bytes_;
    const std::span<const swap::Block> blocks_;
    const std::span<const Rows> runs_;
};

}  // namespace fdcache::cuda
