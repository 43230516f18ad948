// The steps by which a batch of block copies is carried out. The planner touches no device, so that what
// carries the steps out may be a GPU or anything else that can copy bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "core/block_copy.hpp"
#include "core/record.hpp"
#include "core/swap_plan.hpp"
#include "swap/items.hpp"

namespace fdcache {

using Address = swap::Word;

// Each does its steps in order, both at once. Kernels run on kMain, copies by the copy engine on kCopy.
enum class Queue : std::uint8_t { kMain, kCopy };

// Staged steps name places in the slot of the ring that was taken last, counted from the slot's beginning.
struct TakeSlot {
    Queue user;  // waits until the slot is free
};
struct FreeSlot {
    Queue user;  // frees it with what it was given so far
};

// `to` waits for what `from` was given so far.
struct HandOver {
    Queue from;
    Queue to;
};

// Copies of StepList::pieces [first, first + count), few enough bytes for one call of the driver.
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

// A kernel over the planes of some blocks. kMove goes between layers and records, or, staged, rows of the
// ring `pitch` bytes apart; to the host it also sums. kSum only sums.
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

// Plans one batch, plane range by plane range. `blocks` are sorted by host slot and `runs` are theirs.
class SwapPlanner {
  public:
    SwapPlanner(const SwapPolicy &policy, Direction direction, std::span<const Plane> planes,
                std::size_t record_bytes, std::span<const swap::Block> blocks, std::span<const Rows> runs);

    // `contended`: copies in the other direction are under way. Slots of the ring have `slot_bytes`.
    StepList plan(PlaneRange range, std::size_t slot_bytes, bool contended) const;

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

}  // namespace fdcache
