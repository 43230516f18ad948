#include "core/slab_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <utility>

#include "core/checksum.hpp"

namespace fdcache {
namespace {

constexpr std::size_t kScanSlots = 8192;
constexpr std::size_t kPage = 4096;
constexpr int kTruncated = ENODATA;  // the file ends before the record does

bool header_is_sound(const SlotHeader &header) {
    return header.magic == SlotHeader::kMagic && header.version == SlotHeader::kVersion &&
           header.header_checksum == header.computed_checksum();
}

bool all_zero(const std::uint8_t *from, const std::uint8_t *to) {
    return std::all_of(from, to, [](std::uint8_t byte) { return byte == 0; });
}

// Moves all of `vectors`, however the kernel cuts it up. Returns an errno or 0.
int move_vectors(int fd, std::vector<iovec> vectors, off_t offset, bool writing) {
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

struct Free {
    void operator()(std::uint8_t *memory) const { std::free(memory); }
};

}  // namespace

struct SlabFile::Run {
    std::vector<const SlabBlock *> blocks;
    std::vector<std::size_t> positions;
};

SlabFile::SlabFile(int record_fd, int header_fd, SlabShape shape, unsigned threads)
    : record_fd_(record_fd),
      header_fd_(header_fd),
      shape_(std::move(shape)),
      headers_(shape_.slots),
      trusted_(shape_.slots, false),
      pool_(threads) {
    for (const PayloadPart &part : shape_.parts) payload_bytes_ += part.nbytes;
}

SlabScan SlabFile::scan(std::uint32_t first, std::uint32_t last) {
    SlabScan found;
    last = std::min(last, shape_.slots);
    struct stat status{};
    if (fstat(header_fd_, &status) != 0) throw std::system_error(errno, std::generic_category());
    std::vector<SlotHeader> read;
    for (std::uint32_t at = first; at < last; at += kScanSlots) {
        read.assign(std::min<std::size_t>(kScanSlots, last - at), SlotHeader{});
        const off_t offset = shape_.header_offset + static_cast<off_t>(at * sizeof(SlotHeader));
        const int error =
            move_vectors(header_fd_, {{read.data(), read.size() * sizeof(SlotHeader)}}, offset, false);
        if (error && error != kTruncated) throw std::system_error(error, std::generic_category());
        const std::lock_guard lock(mutex_);
        for (std::size_t i = 0; i < read.size(); ++i) {
            SlotHeader &header = read[i];
            const auto end = shape_.record_offset + static_cast<off_t>((at + i + 1) * shape_.record_bytes);
            const bool blank = header == SlotHeader{};
            const bool sound = header_is_sound(header) && header.fingerprint == shape_.fingerprint;
            const bool ready = sound && header.state == HeaderState::kReady;
            const bool whole = header.payload_bytes == payload_bytes_ && end <= status.st_size;
            found.ready += ready && whole;
            found.corrupt += (!blank && !sound) || (ready && !whole);
            headers_[at + i] = sound && (!ready || whole) ? header : SlotHeader{};
            trusted_[at + i] = false;
        }
    }
    return found;
}

SlotHeader SlabFile::header(std::uint32_t slot) const {
    const std::lock_guard lock(mutex_);
    return headers_.at(slot);
}

// --- runs --------------------------------------------------------------------------------------------------

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
        // Neighbours in memory too: one vector.
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
    std::mutex failing;
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
                // One bad sector must not cost its neighbours: each record by itself.
                const int error = move_run(std::span(run.blocks).subspan(i, 1), writing);
                if (!error) continue;
                own = error == kTruncated ? SlabFault::kCorrupt : SlabFault::kError;
                const std::lock_guard lock(failing);
                if (!out.error && own == SlabFault::kError) out.error = error;
            }
        });
    }
    pool_.run(std::move(jobs), writing ? IoPriority::kWrite : IoPriority::kRead);
}

// --- reading -----------------------------------------------------------------------------------------------

SlabFault SlabFile::check_slot_header(const SlabBlock &block) const {
    const std::lock_guard lock(mutex_);
    const SlotHeader &header = headers_.at(block.slot);
    const bool held = header.state == HeaderState::kReady && header.hash == block.hash &&
                      header.generation == block.generation;
    return held ? SlabFault::kNone : SlabFault::kMiss;
}

// Bytes between and after the planes are zero in every record; a change there is a change.
bool SlabFile::intact(const std::uint8_t *record, std::uint64_t checksum) const {
    std::uint64_t sum = 0;
    std::size_t end = 0;
    for (const PayloadPart &part : shape_.parts) {
        if (!all_zero(record + end, record + part.offset)) return false;
        sum += checksum_part(record + part.offset, part.nbytes, part.offset / 8);
        end = part.offset + part.nbytes;
    }
    return all_zero(record + end, record + shape_.record_bytes) &&
           finish_checksum(sum, payload_bytes_) == checksum;
}

void SlabFile::stamp_host(const SlabBlock &block, HeaderState state, std::uint64_t checksum) const {
    SlotHeader header;
    header.state = state;
    header.generation = block.host_generation;
    header.payload_bytes = payload_bytes_;
    header.payload_checksum = checksum;
    header.hash = block.hash;
    header.parent = block.parent;
    header.fingerprint = shape_.fingerprint;
    header.seal();
    std::atomic_thread_fence(std::memory_order_seq_cst);
    store_header(block.host_header, header);
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

void SlabFile::deliver(const SlabBlock &block, bool verify, SlabFault &fault, std::uint64_t &checksum) {
    SlotHeader header;
    bool trusted = false;
    {
        const std::lock_guard lock(mutex_);
        header = headers_[block.slot];
        trusted = trusted_[block.slot];
    }
    if (header.hash != block.hash || header.generation != block.generation) {
        fault = SlabFault::kMiss;
        return;
    }
    if (verify || !trusted) {
        if (!intact(block.record, header.payload_checksum)) {
            fault = SlabFault::kCorrupt;
            return;
        }
        const std::lock_guard lock(mutex_);
        trusted_[block.slot] = true;
    }
    checksum = header.payload_checksum;
    stamp_host(block, HeaderState::kReady, checksum);
}

SlabOutcome SlabFile::read(std::span<const SlabBlock> blocks, const SlabLimits &limits, bool verify) {
    SlabOutcome out;
    out.faults.resize(blocks.size(), SlabFault::kNone);
    out.checksums.resize(blocks.size(), 0);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        out.faults[i] = check_slot_header(blocks[i]);
        if (out.faults[i] == SlabFault::kNone) stamp_host(blocks[i], HeaderState::kWriting, 0);
    }
    move_all(blocks, limits, false, out);
    std::vector<std::function<void()>> checks;
    std::vector<std::uint32_t> corrupt;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (out.faults[i] != SlabFault::kNone) continue;
        checks.emplace_back([&, i] { deliver(blocks[i], verify, out.faults[i], out.checksums[i]); });
    }
    pool_.run(std::move(checks), IoPriority::kRead);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (out.faults[i] == SlabFault::kNone) out.bytes += shape_.record_bytes;
        if (out.faults[i] == SlabFault::kCorrupt) corrupt.push_back(blocks[i].slot);
    }
    // On a file that cannot be written the slot stays as it is; every later read refuses it again.
    if (!corrupt.empty()) erase(corrupt);
    return out;
}

SlabOutcome SlabFile::verify(std::span<const std::uint32_t> slots) {
    SlabOutcome out;
    out.faults.resize(slots.size(), SlabFault::kNone);
    std::vector<SlabBlock> blocks;
    std::vector<std::unique_ptr<std::uint8_t, Free>> memory;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const SlotHeader header = this->header(slots[i]);
        if (header.state != HeaderState::kReady) out.faults[i] = SlabFault::kMiss;
        memory.emplace_back(static_cast<std::uint8_t *>(std::aligned_alloc(kPage, shape_.record_bytes)));
        if (!memory.back()) throw std::bad_alloc();
        blocks.push_back(
            {slots[i], header.generation, 0, header.hash, header.parent, memory.back().get(), nullptr});
    }
    move_all(blocks, {std::chrono::steady_clock::time_point::max(), nullptr}, false, out);
    std::vector<std::function<void()>> checks;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        if (out.faults[i] != SlabFault::kNone) continue;
        checks.emplace_back([&, i] {
            if (!intact(blocks[i].record, header(slots[i]).payload_checksum))
                out.faults[i] = SlabFault::kCorrupt;
        });
    }
    pool_.run(std::move(checks), IoPriority::kRead);
    return out;
}

// --- writing -----------------------------------------------------------------------------------------------

SlabFault SlabFile::check_source(const SlabBlock &block, SlotHeader &found) const {
    found = load_header(block.host_header);
    const bool held = header_is_sound(found) && found.state == HeaderState::kReady &&
                      found.hash == block.hash && found.generation == block.host_generation &&
                      found.fingerprint == shape_.fingerprint && found.payload_bytes == payload_bytes_;
    return held ? SlabFault::kNone : SlabFault::kSource;
}

SlotHeader SlabFile::empty_header(std::uint32_t slot) const {
    SlotHeader header;
    header.generation = headers_[slot].generation;
    header.fingerprint = shape_.fingerprint;
    header.seal();
    return header;
}

// Writes the headers of these slots as they stand in memory, neighbours together. Returns an errno or 0.
int SlabFile::store_headers(std::span<const std::uint32_t> slots) {
    std::vector<std::uint32_t> sorted(slots.begin(), slots.end());
    std::sort(sorted.begin(), sorted.end());
    unsynced_ = true;
    for (std::size_t first = 0; first < sorted.size();) {
        std::size_t last = first + 1;
        while (last < sorted.size() && sorted[last] == sorted[last - 1] + 1) ++last;
        std::vector<SlotHeader> headers;
        {
            const std::lock_guard lock(mutex_);
            for (std::size_t i = first; i < last; ++i) headers.push_back(headers_[sorted[i]]);
        }
        const off_t offset = shape_.header_offset + static_cast<off_t>(sorted[first] * sizeof(SlotHeader));
        if (const int error = move_vectors(
                header_fd_, {{headers.data(), headers.size() * sizeof(SlotHeader)}}, offset, true))
            return error;
        first = last;
    }
    return 0;
}

int SlabFile::erase(std::span<const std::uint32_t> slots) {
    {
        const std::lock_guard lock(mutex_);
        for (const std::uint32_t slot : slots) {
            headers_.at(slot) = empty_header(slot);
            trusted_[slot] = false;
        }
    }
    return store_headers(slots);
}

int SlabFile::sync() {
    unsynced_ = false;
    if (fdatasync(header_fd_) == 0) return 0;
    unsynced_ = true;
    return errno;
}

SlabOutcome SlabFile::write(std::span<const SlabBlock> blocks, const SlabLimits &limits, SyncPolicy policy,
                            std::uint64_t now_ms) {
    SlabOutcome out;
    out.faults.resize(blocks.size(), SlabFault::kNone);
    out.checksums.resize(blocks.size(), 0);
    std::vector<SlotHeader> sources(blocks.size());
    std::vector<std::uint32_t> targets;
    bool reused = false;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        out.faults[i] = check_source(blocks[i], sources[i]);
        if (out.faults[i] != SlabFault::kNone) continue;
        out.checksums[i] = sources[i].payload_checksum;
        reused = reused || header(blocks[i].slot).state == HeaderState::kReady;
        targets.push_back(blocks[i].slot);
    }
    const auto fail_all = [&](int error) {
        for (SlabFault &fault : out.faults)
            if (fault == SlabFault::kNone) fault = SlabFault::kError;
        if (!out.error) out.error = error;
        return out;
    };
    const bool every_batch = policy == SyncPolicy::kEveryBatch;
    // The slot is empty before the first byte of the new record, and full after its last one. Slots never
    // used are emptied as well, which gives their headers room on the disk before the records fill it.
    if (const int error = erase(targets)) return fail_all(error);
    if (every_batch && reused)
        if (const int error = sync()) return fail_all(error);
    unsynced_ = true;
    move_all(blocks, limits, true, out);
    if (every_batch)
        if (const int error = sync()) return fail_all(error);
    std::vector<std::uint32_t> written;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (out.faults[i] != SlabFault::kNone) continue;
        // The record may have been given to other content meanwhile.
        if (load_header(blocks[i].host_header) != sources[i]) {
            out.faults[i] = SlabFault::kSource;
            continue;
        }
        SlotHeader header = sources[i];
        header.generation = blocks[i].generation;
        header.parent = blocks[i].parent;
        header.written_ms = now_ms;
        header.seal();
        const std::lock_guard lock(mutex_);
        headers_[blocks[i].slot] = header;
        trusted_[blocks[i].slot] = true;
        written.push_back(blocks[i].slot);
        out.bytes += shape_.record_bytes;
    }
    int error = store_headers(written);
    if (!error && every_batch) error = sync();
    if (!error) return out;
    const std::lock_guard lock(mutex_);
    for (const std::uint32_t slot : written) headers_[slot] = empty_header(slot);
    return fail_all(error);
}

}  // namespace fdcache
