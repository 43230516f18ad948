#include "copy/plane_copy.hpp"

#include <cstring>

#include "hash/checksum.hpp"

namespace fdcache {
namespace {

// As a number: planes may be those of another process, which says what it likes.
std::uint64_t address_of(const Plane &plane, std::int32_t slot) {
    const auto base = reinterpret_cast<std::uintptr_t>(plane.base);
    return base + static_cast<std::uint64_t>(plane.stride) * static_cast<std::uint64_t>(slot);
}

}  // namespace

void copy_planes(std::span<const Plane> source, std::span<const std::int32_t> from,
                 std::span<const Plane> target, std::span<const std::int32_t> to, PlaneRange range) {
    for (std::size_t plane = range.first; plane < range.last; ++plane) {
        for (std::size_t i = 0; i < from.size(); ++i) {
            std::memcpy(target[plane].block(to[i]), source[plane].block(from[i]), target[plane].nbytes);
        }
    }
}

std::vector<PlaneRun> plane_runs(std::span<const Plane> source, std::span<const std::int32_t> from,
                                 std::span<const Plane> target, std::span<const std::int32_t> to,
                                 PlaneRange range) {
    std::vector<PlaneRun> runs;
    for (std::size_t plane = range.first; plane < range.last; ++plane) {
        const std::uint64_t nbytes = target[plane].nbytes;
        for (std::size_t i = 0; i < from.size(); ++i) {
            const std::uint64_t begin = address_of(source[plane], from[i]);
            const std::uint64_t goes_to = address_of(target[plane], to[i]);
            const bool adjoins = !runs.empty() && runs.back().source + runs.back().nbytes == begin &&
                                 runs.back().target + runs.back().nbytes == goes_to;
            if (adjoins)
                runs.back().nbytes += nbytes;
            else
                runs.push_back({begin, goes_to, nbytes});
        }
    }
    return runs;
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
