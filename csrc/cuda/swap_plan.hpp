// Chooses how to copy a batch of blocks: the method for each column, and its pieces. Touches no device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy/record.hpp"
#include "swap/items.hpp"

namespace fdcache::cuda {

// kDirect: copy engine between records and layers. kStaged: copy engine between records and a staging ring,
// a kernel between ring and layers. kKernel: a kernel that reads and writes host memory in place.
enum class SwapMethod : std::uint8_t { kDirect, kStaged, kKernel };
enum class SwapChoice : std::uint8_t { kAuto, kDirect, kStaged, kKernel };

// The limits, in bytes, above which a method is fastest on this machine, for one direction.
struct SwapThresholds {
    std::size_t direct_plane;   // smallest planes copied directly between record and layer
    std::size_t staged_column;  // smallest columns of a record that go through the staging ring
    std::size_t run_copy;       // smallest runs copied by a strided copy of their own
};

struct SwapPolicy {
    SwapChoice choice = SwapChoice::kAuto;
    SwapThresholds to_host;
    SwapThresholds to_device;
    std::size_t staging_bytes;  // of one slot of the ring
    unsigned kernel_ctas;       // of kKernel; 0: use no kernels
    unsigned transpose_ctas;    // of kStaged
    std::size_t direct_pieces;  // most planes of a batch for kDirect; each costs the submitting thread
    std::size_t small_pieces;   // most planes of a batch that is copied directly whatever runs beside it
    bool batched;               // the driver takes many small copies in one call
};

// Copy engines are faster with one strided copy of narrow rows than with as many pieces of a batch.
inline constexpr std::size_t kNarrowRow = std::size_t{64} << 10;
inline constexpr std::size_t kNarrowRows = 32;

// Blocks [first, first + count) of a batch in the order of their host slots.
struct Rows {
    std::size_t first;
    std::size_t count;
    friend bool operator==(const Rows &, const Rows &) = default;
};

// Inputs to the choice of a method besides sizes.
struct Batch {
    std::size_t rows;
    std::size_t runs;
    bool contended;  // copies in the other direction are in flight
    bool unhurried;  // pieces cost the engine's thread nothing, and at most one other batch of this direction
                     // is in flight
};

// Maximal runs of rows whose records are adjacent and within one extent.
std::vector<Rows> find_runs(std::span<const std::int32_t> host_slots, std::size_t records_per_extent);

// Appends the maximal parts of a run whose device slots are adjacent too.
void append_device_runs(std::vector<Rows> &parts, Rows run, std::span<const swap::Block> blocks);

// The parts of `runs` (in order, without gaps) that lie in `rows`.
std::vector<Rows> clip_runs(std::span<const Rows> runs, Rows rows);

// Bytes of a record from the first plane of the range to the next plane after it, or the end of the record.
std::size_t column_bytes(std::span<const Plane> planes, PlaneRange range, std::size_t record_bytes);

// Splits the range into parts whose columns have at most `limit` bytes, or one plane.
std::vector<PlaneRange> split_range(std::span<const Plane> planes, PlaneRange range, std::size_t record_bytes,
                                    std::size_t limit);

// The method for a plane range of a batch.
SwapMethod choose_method(const SwapPolicy &policy, Direction direction, std::span<const Plane> planes,
                         PlaneRange range, std::size_t record_bytes, const Batch &batch);

}  // namespace fdcache::cuda
