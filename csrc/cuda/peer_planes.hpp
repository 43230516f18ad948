// Kernels over whole blocks without records: reads of a peer's planes in place, and sums.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/context.hpp"
#include "cuda/swap.hpp"
#include "swap/items.hpp"

namespace fdcache::cuda {

// A block table in pinned host memory and on the device; in use until the work that was given it has ended.
struct BlockTable {
    swap::Block *host;
    Address device;
};

// A kernel in flight. `done` is reached even if the driver refused, with the reason in `error`.
struct PlaneWork {
    std::shared_ptr<Event> begun;
    std::shared_ptr<Event> done;
    std::string error;

    double seconds() const { return error.empty() ? done->seconds_since(*begun) : 0; }
};

// Blocks of other planes, and where they go: `places[i]` of the source to `slots[i]`.
struct PlaneMoves {
    std::span<const std::int32_t> places;
    std::span<const std::int32_t> slots;
};

// Reads a range of planes after these events, with a grid of this size at most.
PlaneWork read_planes(const SwapDevice &device, StreamHandle stream, const SwapPlanes &source,
                      const SwapPlanes &target, PlaneMoves moves, PlaneRange planes, BlockTable table,
                      Grid most, const std::vector<std::shared_ptr<Event>> &after);

// Sums a range of planes of blocks. Once it is done, `table.host` has the sums.
PlaneWork sum_planes(const SwapDevice &device, StreamHandle stream, const SwapPlanes &planes,
                     std::span<const std::int32_t> slots, PlaneRange summed, BlockTable table);

}  // namespace fdcache::cuda
