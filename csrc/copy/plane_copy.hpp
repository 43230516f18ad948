// Copies of blocks between the planes of two caches, and sums over the planes of blocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "copy/record.hpp"

namespace fdcache {

// Copies planes of block `from[i]` of one cache to block `to[i]` of another with the same planes.
void copy_planes(std::span<const Plane> source, std::span<const std::int32_t> from,
                 std::span<const Plane> target, std::span<const std::int32_t> to, PlaneRange range);

// Adjoining bytes, and where they go.
struct PlaneRun {
    std::uint64_t source;
    std::uint64_t target;
    std::uint64_t nbytes;
};

// The runs of such a copy: pieces are one run where they adjoin in both caches. Reads no memory.
std::vector<PlaneRun> plane_runs(std::span<const Plane> source, std::span<const std::int32_t> from,
                                 std::span<const Plane> target, std::span<const std::int32_t> to,
                                 PlaneRange range);

// For each block, the sum of a range of its planes: sums of ranges add up to that of the record's checksum.
std::vector<std::uint64_t> sum_planes(std::span<const Plane> planes, std::span<const std::int32_t> slots,
                                      PlaneRange range);

}  // namespace fdcache
