#include "copy/plane_copy.hpp"

#include <cstring>

#include "hash/checksum.hpp"

namespace fdcache {

void copy_planes(std::span<const Plane> source, std::span<const std::int32_t> from,
                 std::span<const Plane> target, std::span<const std::int32_t> to, PlaneRange range) {
    for (std::size_t plane = range.first; plane < range.last; ++plane) {
        for (std::size_t i = 0; i < from.size(); ++i) {
            std::memcpy(target[plane].block(to[i]), source[plane].block(from[i]), target[plane].nbytes);
        }
    }
}

std::vector<std::uint64_t> sum_planes(std::span<const Plane> planes, std::span<const std::int32_t> slots,
                                      PlaneRange range) {
    std::vector<std::uint64_t> sums(slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
        for (const Plane &plane : planes.subspan(range.first, range.last - range.first)) {
            sums[i] += checksum_part(plane.block(slots[i]), plane.nbytes, plane.offset / 8);
        }
    }
    return sums;
}

}  // namespace fdcache
