#include "cuda/swap_plan.hpp"

#include <algorithm>

namespace fdcache::cuda {

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

void append_device_runs(std::vector<Rows> &parts, Rows run, std::span<const swap::Block> blocks) {
    parts.push_back({run.first, 1});
    for (std::size_t i = run.first + 1; i < run.first + run.count; ++i) {
        if (blocks[i].slot == blocks[i - 1].slot + 1) {
            ++parts.back().count;
        } else {
            parts.push_back({i, 1});
        }
    }
}

std::vector<Rows> clip_runs(std::span<const Rows> runs, Rows rows) {
    const std::size_t end = rows.first + rows.count;
    const auto after = std::ranges::upper_bound(runs, rows.first, {}, &Rows::first);
    std::vector<Rows> parts;
    for (auto run = after == runs.begin() ? after : after - 1; run != runs.end() && run->first < end; ++run) {
        const std::size_t from = std::max(run->first, rows.first);
        const std::size_t to = std::min(run->first + run->count, end);
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
                         PlaneRange range, std::size_t record_bytes, const Batch &batch) {
    const auto &limits = direction == Direction::kToHost ? policy.to_host : policy.to_device;
    const auto wanted = planes.subspan(range.first, range.last - range.first);
    const std::size_t column = column_bytes(planes, range, record_bytes);
    const bool fits = column <= policy.staging_bytes;
    if (policy.kernel_ctas == 0 || policy.choice == SwapChoice::kDirect) return SwapMethod::kDirect;
    if (policy.choice == SwapChoice::kKernel) return SwapMethod::kKernel;
    if (policy.choice == SwapChoice::kStaged) return fits ? SwapMethod::kStaged : SwapMethod::kDirect;
    // A small batch with few others leaves the link idle in between. Copied directly its bytes cross the
    // memory of the device once instead of three times, which other work there feels.
    const bool small =
        batch.unhurried && policy.batched && batch.rows * planes.size() <= policy.small_pieces &&
        std::ranges::all_of(wanted, [](const Plane &plane) { return plane.nbytes >= kNarrowRow; });
    if (small) return SwapMethod::kDirect;
    const bool large =
        std::ranges::all_of(wanted, [&](const Plane &plane) { return plane.nbytes >= limits.direct_plane; });
    // Many copies of one direction lose against few large ones of the other direction; columns do not.
    const bool direct = large && policy.batched && batch.rows * planes.size() <= policy.direct_pieces;
    if (direct && !(batch.contended && fits)) return SwapMethod::kDirect;
    // Without batches every piece is a separate copy, and the copy engine idles before it.
    const std::size_t needed = policy.batched ? limits.staged_column : limits.run_copy / 2;
    const std::size_t piece = policy.batched ? column : column * (batch.rows / batch.runs);
    // A kernel would be slightly faster, but takes multiprocessors and slows copies in the other direction.
    const bool strided = batch.rows / batch.runs >= kNarrowRows && column >= kNarrowRow / 8;
    return fits && (strided || piece >= needed) ? SwapMethod::kStaged : SwapMethod::kKernel;
}

}  // namespace fdcache::cuda
