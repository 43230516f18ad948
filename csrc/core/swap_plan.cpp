#include "core/swap_plan.hpp"

#include <algorithm>

namespace fdcache {

bool are_sound_slots(std::span<const std::int32_t> slots, std::int32_t limit, bool distinct) {
    const auto inside = [limit](std::int32_t slot) { return slot >= 0 && slot < limit; };
    if (!std::ranges::all_of(slots, inside)) return false;
    if (!distinct) return true;
    std::vector<std::int32_t> sorted(slots.begin(), slots.end());
    std::ranges::sort(sorted);
    return std::ranges::adjacent_find(sorted) == sorted.end();
}

std::vector<Rows> find_runs(std::span<const std::int32_t> host_slots, std::size_t records_per_extent) {
    std::vector<Rows> runs;
    for (std::size_t i = 0; i < host_slots.size(); ++i) {
        const bool follows = i > 0 && host_slots[i] == host_slots[i - 1] + 1 &&
                             static_cast<std::size_t>(host_slots[i]) % records_per_extent != 0;
        if (follows) {
            ++runs.back().count;
        } else {
            runs.push_back({i, 1});
        }
    }
    return runs;
}

std::vector<Rows> find_device_runs(Rows run, std::span<const std::int64_t> device_slots) {
    std::vector<Rows> parts{{run.first, 1}};
    for (std::size_t i = run.first + 1; i < run.first + run.count; ++i) {
        if (device_slots[i] == device_slots[i - 1] + 1) {
            ++parts.back().count;
        } else {
            parts.push_back({i, 1});
        }
    }
    return parts;
}

std::vector<Rows> clip_runs(std::span<const Rows> runs, std::size_t first, std::size_t last) {
    std::vector<Rows> parts;
    for (const Rows &run : runs) {
        const std::size_t from = std::max(run.first, first);
        const std::size_t to = std::min(run.first + run.count, last);
        if (from < to) parts.push_back({from, to - from});
    }
    return parts;
}

std::size_t column_bytes(std::span<const Plane> planes, PlaneRange range, std::size_t record_bytes) {
    const std::size_t end = range.last < planes.size() ? planes[range.last].offset : record_bytes;
    return end - planes[range.first].offset;
}

std::vector<PlaneRange> split_range(std::span<const Plane> planes, PlaneRange range, std::size_t record_bytes,
                                    std::size_t limit) {
    std::vector<PlaneRange> parts{{range.first, range.first + 1}};
    for (std::size_t i = range.first + 1; i < range.last; ++i) {
        if (column_bytes(planes, {parts.back().first, i + 1}, record_bytes) <= limit) {
            parts.back().last = i + 1;
        } else {
            parts.push_back({i, i + 1});
        }
    }
    return parts;
}

SwapMethod choose_method(const SwapPolicy &policy, Direction direction, std::span<const Plane> planes,
                         PlaneRange range, std::size_t record_bytes, std::size_t rows, std::size_t runs) {
    const auto &limits = direction == Direction::kToHost ? policy.to_host : policy.to_device;
    const auto wanted = planes.subspan(range.first, range.last - range.first);
    const std::size_t column = column_bytes(planes, range, record_bytes);
    const bool fits = column <= policy.staging_bytes;
    if (policy.kernel_ctas == 0 || policy.choice == SwapChoice::kDirect) return SwapMethod::kDirect;
    if (policy.choice == SwapChoice::kKernel) return SwapMethod::kKernel;
    if (policy.choice == SwapChoice::kStaged) return fits ? SwapMethod::kStaged : SwapMethod::kDirect;
    const bool large =
        std::ranges::all_of(wanted, [&](const Plane &plane) { return plane.nbytes >= limits.direct_plane; });
    if (large && policy.batched && rows * planes.size() <= policy.direct_pieces) return SwapMethod::kDirect;
    // Without batches every piece is a copy of its own, with the copy engine idle before it.
    const std::size_t needed = policy.batched ? limits.staged_column : limits.run_copy / 2;
    const std::size_t piece = policy.batched ? column : column * (rows / runs);
    return fits && piece >= needed ? SwapMethod::kStaged : SwapMethod::kKernel;
}

}  // namespace fdcache
