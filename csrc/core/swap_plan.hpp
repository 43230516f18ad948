// How a batch of block copies is carried out: which method for which columns, and in which pieces. Nothing
// here touches a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/block_copy.hpp"
#include "core/record.hpp"
#include "swap/items.hpp"

namespace fdcache {

// kDirect: copy engine between records and layers. kStaged: copy engine between records and a staging ring,
// a kernel between ring and layers. kKernel: a kernel that reads and writes host memory in place.
enum class SwapMethod : std::uint8_t { kDirect, kStaged, kKernel };
enum class SwapChoice : std::uint8_t { kAuto, kDirect, kStaged, kKernel };

// What is fastest on a machine, in bytes, for one direction.
struct SwapThresholds {
    std::size_t direct_plane;   // planes from this size on are copied straight between record and layer
    std::size_t staged_column;  // columns of a record from this size on go through the staging ring
    std::size_t run_copy;       // runs from this size on are one strided copy of their own
};

struct SwapPolicy {
    SwapChoice choice = SwapChoice::kAuto;
    SwapThresholds to_host;
    SwapThresholds to_device;
    std::size_t staging_bytes;  // of one slot of the ring
    unsigned kernel_ctas;       // of kKernel; 0 admits no kernel
    unsigned transpose_ctas;    // of kStaged
    std::size_t direct_pieces;  // most planes of a batch copied by kDirect: each costs the submitting thread
    bool batched;               // whether the driver takes many small copies in one call
};

// The copy engines take narrow rows of one strided copy faster than as many pieces of a batch.
inline constexpr std::size_t kNarrowRow = std::size_t{64} << 10;
inline constexpr std::size_t kNarrowRows = 32;

// Blocks [first, first + count) of a batch in the order of their host slots.
struct Rows {
    std::size_t first;
    std::size_t count;
    friend bool operator==(const Rows &, const Rows &) = default;
};

// What the choice of a method depends on besides sizes.
struct Batch {
    std::size_t rows;
    std::size_t runs;
    bool contended;  // copies in the other direction are under way
};

// Whether all slots are in [0, limit) and, if asked, none occurs twice.
bool are_sound_slots(std::span<const std::int32_t> slots, std::int32_t limit, bool distinct);

// Whether no slot is in both.
bool are_disjoint_slots(std::span<const std::int32_t> first, std::span<const std::int32_t> second);

// Maximal runs of rows whose records follow each other without crossing an extent.
std::vector<Rows> find_runs(std::span<const std::int32_t> host_slots, std::size_t records_per_extent);

// Appends the maximal parts of a run whose device slots follow each other too.
void append_device_runs(std::vector<Rows> &parts, Rows run, std::span<const swap::Block> blocks);

// The part of each run, in order and without gaps, that lies in `rows`.
std::vector<Rows> clip_runs(std::span<const Rows> runs, Rows rows);

// Bytes of a record from the first plane of the range to where the next plane, or record, begins.
std::size_t column_bytes(std::span<const Plane> planes, PlaneRange range, std::size_t record_bytes);

// The range in parts of which each has a column of at most `limit` bytes, or one plane.
std::vector<PlaneRange> split_range(std::span<const Plane> planes, PlaneRange range, std::size_t record_bytes,
                                    std::size_t limit);

// The method for a plane range of a batch.
SwapMethod choose_method(const SwapPolicy &policy, Direction direction, std::span<const Plane> planes,
                         PlaneRange range, std::size_t record_bytes, const Batch &batch);

}  // namespace fdcache
