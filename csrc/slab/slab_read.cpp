// Reads slots of a slab file into host records and checks the records.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <new>
#include <utility>

#include "hash/checksum.hpp"
#include "slab/slab_file.hpp"

namespace fdcache {
namespace {

bool all_zero(const std::uint8_t *from, const std::uint8_t *to) {
    return std::all_of(from, to, [](std::uint8_t byte) { return byte == 0; });
}

struct Free {
    void operator()(std::uint8_t *memory) const { std::free(memory); }
};

}  // namespace

SlabFault SlabFile::check_slot_header(const SlabBlock &block) const {
    const std::lock_guard lock(mutex_);
    const SlotHeader &header = headers_.at(block.slot);
    const bool held = header.state == HeaderState::kReady && header.hash == block.hash &&
                      header.generation == block.generation;
    return held ? SlabFault::kNone : SlabFault::kMiss;
}

// Checks the payload's checksum, and that the bytes between and after the planes are zero, as in every
// record.
bool SlabFile::is_intact(const std::uint8_t *record, std::uint64_t checksum) const {
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

void SlabFile::store_host_header(const SlabBlock &block, HeaderState state, std::uint64_t checksum) const {
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
        if (!is_intact(block.record, header.payload_checksum)) {
            fault = SlabFault::kCorrupt;
            return;
        }
        const std::lock_guard lock(mutex_);
        trusted_[block.slot] = true;
    }
    checksum = header.payload_checksum;
    store_host_header(block, HeaderState::kReady, checksum);
}

SlabOutcome SlabFile::read(std::span<const SlabBlock> blocks, const SlabLimits &limits, bool verify) {
    SlabOutcome out(blocks.size());
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        out.faults[i] = check_slot_header(blocks[i]);
        if (out.faults[i] == SlabFault::kNone) store_host_header(blocks[i], HeaderState::kWriting, 0);
    }
    move_all(blocks, limits, false, out);
    std::vector<std::function<void()>> checks;
    std::vector<std::uint32_t> corrupt;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (out.errors[i] == kTruncated) {  // nothing is wrong with the slot, which a write fills again
            out.faults[i] = SlabFault::kMiss;
            out.errors[i] = 0;
            corrupt.push_back(blocks[i].slot);
        }
        if (out.faults[i] != SlabFault::kNone) continue;
        checks.emplace_back([&, i] { deliver(blocks[i], verify, out.faults[i], out.checksums[i]); });
    }
    pool_.run(std::move(checks), IoPriority::kRead);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (out.faults[i] == SlabFault::kNone) out.bytes += shape_.record_bytes;
        if (out.faults[i] == SlabFault::kCorrupt) corrupt.push_back(blocks[i].slot);
    }
    // If the file cannot be written the slot stays, and every later read finds it corrupt again.
    if (!corrupt.empty()) erase(corrupt);
    return out;
}

SlabOutcome SlabFile::verify(std::span<const std::uint32_t> slots) {
    SlabOutcome out(slots.size());
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
            if (!is_intact(blocks[i].record, header(slots[i]).payload_checksum))
                out.faults[i] = SlabFault::kCorrupt;
        });
    }
    pool_.run(std::move(checks), IoPriority::kRead);
    return out;
}

}  // namespace fdcache
