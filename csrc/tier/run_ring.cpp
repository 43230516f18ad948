#include "tier/run_ring.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace fdcache {

static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free, "the words are shared between processes");

RunRing::RunRing(void *memory, std::size_t nbytes)
    : memory_(static_cast<std::uint8_t *>(memory)),
      data_(memory_ + kControlBytes),
      capacity_(nbytes - kControlBytes) {
    if (!memory || nbytes < kControlBytes + sizeof(Header) || nbytes % sizeof(Header) ||
        reinterpret_cast<std::uintptr_t>(memory) % sizeof(Header))
        throw std::invalid_argument("a ring is aligned to 16 bytes and has a multiple of them, at least 144");
}

bool RunRing::write(std::uint64_t run, std::size_t start, std::span<const Digest> blocks) {
    const std::uint64_t written = word(kWritten).load(std::memory_order_relaxed);
    const std::uint64_t read = word(kRead).load(std::memory_order_acquire);
    const std::size_t nbytes = sizeof(Header) + blocks.size_bytes();
    if (start + blocks.size() > kMostBlocks || nbytes > capacity_ - (written - read) ||
        word(kClosed).load(std::memory_order_relaxed))
        return false;
    const Header header{run, static_cast<std::uint32_t>(start), static_cast<std::uint32_t>(blocks.size())};
    copy_in(written, &header, sizeof header);
    copy_in(written + sizeof header, blocks.data(), blocks.size_bytes());
    // In one order with the versions of the presence table: see SharedRuns::pin.
    word(kWritten).store(written + nbytes, std::memory_order_seq_cst);
    return true;
}

std::optional<RunRecord> RunRing::read() {
    const std::uint64_t read = word(kRead).load(std::memory_order_relaxed);
    const std::uint64_t available = word(kWritten).load(std::memory_order_seq_cst) - read;
    if (!available) return std::nullopt;
    if (available > capacity_ || available < sizeof(Header))
        throw std::invalid_argument("the ring of runs is written past its end");
    Header header;
    copy_out(read, &header, sizeof header);
    const std::size_t nbytes = sizeof header + sizeof(Digest) * header.count;
    if (nbytes > available || std::size_t{header.start} + header.count > kMostBlocks)
        throw std::invalid_argument("the ring of runs has a record of " + std::to_string(header.count) +
                                    " blocks from " + std::to_string(header.start) + " on");
    RunRecord record{header.run, header.start, {}};
    if (header.count) {
        record.path.resize(std::size_t{header.start} + header.count);
        copy_out(read + sizeof header, record.path.data() + header.start, sizeof(Digest) * header.count);
    }
    word(kRead).store(read + nbytes, std::memory_order_release);
    return record;
}

void RunRing::close() {
    word(kClosed).store(1, std::memory_order_relaxed);
}

void RunRing::copy_in(std::uint64_t at, const void *source, std::size_t nbytes) {
    const std::size_t offset = at % capacity_, first = std::min(nbytes, capacity_ - offset);
    std::memcpy(data_ + offset, source, first);
    std::memcpy(data_, static_cast<const std::uint8_t *>(source) + first, nbytes - first);
}

void RunRing::copy_out(std::uint64_t at, void *target, std::size_t nbytes) const {
    const std::size_t offset = at % capacity_, first = std::min(nbytes, capacity_ - offset);
    std::memcpy(target, data_ + offset, first);
    std::memcpy(static_cast<std::uint8_t *>(target) + first, data_, nbytes - first);
}

}  // namespace fdcache
