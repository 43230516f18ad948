// The runs that a client of a shared tier has pinned and unpinned, as records in a ring of shared memory: the
// client writes, the service reads, neither waits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "hash/digest.hpp"

namespace fdcache {

// A run to pin: the blocks of `path` from `start` on; those before are left out of the record, and zero here.
// An empty path unpins the run.
struct RunRecord {
    std::uint64_t run = 0;
    std::size_t start = 0;
    std::vector<Digest> path;
};

// Two cache lines of control words (bytes written; bytes read, and a mark that no more are), then the
// records: 16 bytes and the digests, which may continue at the beginning of the ring.
class RunRing {
  public:
    static constexpr std::size_t kControlBytes = 128;
    static constexpr std::size_t kMostBlocks = 1 << 17;  // of a path

    // `memory`: zero when new, aligned to 16. Throws std::invalid_argument.
    RunRing(void *memory, std::size_t nbytes);

    // The client. Returns false if there is no room, or the service has closed the ring.
    bool write(std::uint64_t run, std::size_t start, std::span<const Digest> blocks);
    // The service. Throws std::invalid_argument for a record that no client writes.
    std::optional<RunRecord> read();
    void close();

  private:
    struct Header {
        std::uint64_t run;
        std::uint32_t start;
        std::uint32_t count;
    };
    static_assert(sizeof(Header) == 16);

    enum Word : std::size_t { kWritten = 0, kRead = 8, kClosed = 9 };

    std::atomic_ref<std::uint64_t> word(Word which) const {
        return std::atomic_ref(reinterpret_cast<std::uint64_t *>(memory_)[which]);
    }
    void copy_in(std::uint64_t at, const void *source, std::size_t nbytes);
    void copy_out(std::uint64_t at, void *target, std::size_t nbytes) const;

    std::uint8_t *memory_;
    std::uint8_t *data_;
    std::size_t capacity_;
};

}  // namespace fdcache
