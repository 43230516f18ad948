// Records in runs: one request for adjacent slots, several requests at once.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <utility>

#include "slab/slab_file.hpp"

namespace fdcache {
struct SlabFile::Run {
    std::vector<const SlabBlock *> blocks;
    std::vector<std::size_t> positions;
};

std::vector<SlabFile::Run> SlabFile::runs_of(std::span<const SlabBlock> blocks,
                                             std::span<const SlabFault> faults) const {
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < blocks.size(); ++i)
        if (faults[i] == SlabFault::kNone) order.push_back(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return blocks[a].slot < blocks[b].slot; });
    const std::size_t most = std::clamp<std::size_t>(kRunBytes / shape_.record_bytes, 1, kRunBlocks);
    std::vector<Run> runs;
    for (const std::size_t position : order) {
        const SlabBlock *block = &blocks[position];
        if (runs.empty() || runs.back().blocks.size() == most ||
            runs.back().blocks.back()->slot + 1 != block->slot)
            runs.emplace_back();
        runs.back().blocks.push_back(block);
        runs.back().positions.push_back(position);
    }
    return runs;
}

int SlabFile::move_run(std::span<const SlabBlock *const> run, bool writing) const {
    std::vector<iovec> vectors;
    bool aligned = true;
    for (const SlabBlock *block : run) {
        // Records that are adjacent in memory share a vector.
        if (!vectors.empty() &&
            static_cast<std::uint8_t *>(vectors.back().iov_base) + vectors.back().iov_len == block->record)
            vectors.back().iov_len += shape_.record_bytes;
        else
            vectors.push_back({block->record, shape_.record_bytes});
        aligned = aligned && reinterpret_cast<std::uintptr_t>(block->record) % kPage == 0;
    }
    const off_t offset = shape_.record_offset +
                         static_cast<off_t>(run.front()->slot) * static_cast<off_t>(shape_.record_bytes);
    return move_vectors(aligned ? record_fd_ : header_fd_, std::move(vectors), offset, writing);
}

void SlabFile::move_all(std::span<const SlabBlock> blocks, const SlabLimits &limits, bool writing,
                        SlabOutcome &out) {
    const std::vector<Run> runs = runs_of(blocks, out.faults);
    std::vector<std::function<void()>> jobs;
    for (const Run &run : runs) {
        jobs.emplace_back([&, this] {
            SlabFault fault = SlabFault::kNone;
            if (limits.cancelled && limits.cancelled->load())
                fault = SlabFault::kCancelled;
            else if (std::chrono::steady_clock::now() >= limits.deadline)
                fault = SlabFault::kTimeout;
            else if (move_run(run.blocks, writing) == 0)
                return;
            for (std::size_t i = 0; i < run.blocks.size(); ++i) {
                SlabFault &own = out.faults[run.positions[i]];
                own = fault;
                if (fault != SlabFault::kNone) continue;
                // The request failed: retry each record alone, so that one bad sector costs one record.
                const int error = move_run(std::span(run.blocks).subspan(i, 1), writing);
                if (!error) continue;
                own = error == kTruncated ? SlabFault::kCorrupt
                      : is_full(error)    ? SlabFault::kNoRoom
                                          : SlabFault::kError;
                out.errors[run.positions[i]] = error;
            }
        });
    }
    pool_.run(std::move(jobs), writing ? IoPriority::kWrite : IoPriority::kRead);
}

int SlabFile::move_vectors(int fd, std::vector<iovec> vectors, off_t offset, bool writing) {
    std::size_t first = 0;
    while (first < vectors.size()) {
        const int count = static_cast<int>(vectors.size() - first);
        ssize_t moved = writing ? pwritev(fd, &vectors[first], count, offset)
                                : preadv(fd, &vectors[first], count, offset);
        if (moved < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        if (moved == 0) return writing ? EIO : kTruncated;
        offset += moved;
        for (auto left = static_cast<std::size_t>(moved); left > 0;) {
            iovec &vector = vectors[first];
            const std::size_t step = std::min(left, vector.iov_len);
            vector.iov_base = static_cast<std::uint8_t *>(vector.iov_base) + step;
            vector.iov_len -= step;
            left -= step;
            if (vector.iov_len == 0) ++first;
        }
    }
    return 0;
}

}  // namespace fdcache
