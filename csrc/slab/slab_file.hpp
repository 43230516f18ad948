// The records and slot headers of a slab file (docs/format-storage.md). The caller opens and locks the file
// and handles its superblock.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "copy/slot_header.hpp"
#include "slab/io_pool.hpp"

namespace fdcache {

// Direct reads and writes need memory aligned to it.
inline constexpr std::size_t kPage = 4096;

enum class SlabFault : std::uint8_t {
    kNone,
    kMiss,       // the slot does not contain this block
    kCorrupt,    // the slot's header is right, its bytes are wrong
    kSource,     // the host record is not, or is no longer, the block to write
    kError,      // the file system refused; see errno
    kTimeout,    // not started before the deadline
    kCancelled,  // not started before it was cancelled
    kNoRoom,     // the disk has no room for the record or its header
};

enum class SyncPolicy : std::uint8_t { kLater, kEveryBatch };

struct PayloadPart {
    std::size_t offset;
    std::size_t nbytes;
};

struct SlabShape {
    off_t header_offset = 0;
    off_t record_offset = 0;
    std::size_t record_bytes = 0;
    std::uint32_t slots = 0;
    std::array<std::uint8_t, 16> fingerprint{};
    std::vector<PayloadPart> parts;  // ordered by offset; offsets are multiples of 8
};

// A block to copy between a slab slot and a host record with its header.
struct SlabBlock {
    std::uint32_t slot;
    std::uint32_t generation;
    std::uint32_t host_generation;
    Digest hash;
    Digest parent;
    std::uint8_t *record;
    SlotHeader *host_header;
};

// When to start no more requests. Requests in flight always finish, because they use the records' memory.
struct SlabLimits {
    std::chrono::steady_clock::time_point deadline;
    std::shared_ptr<std::atomic<bool>> cancelled;
};

struct SlabOutcome {
    std::vector<SlabFault> faults;
    std::vector<std::uint64_t> checksums;
    std::vector<std::int32_t> errors;  // errno of each refused record, else 0
    std::uint64_t bytes = 0;           // of the copied records
    int file_error = 0;                // errno of headers or a sync, which concerns the whole file

    explicit SlabOutcome(std::size_t blocks = 0)
        : faults(blocks, SlabFault::kNone), checksums(blocks, 0), errors(blocks, 0) {}
};

struct SlabScan {
    std::uint32_t ready = 0;
    std::uint32_t corrupt = 0;  // headers neither empty nor valid, or whose record is not in the file
    int error = 0;              // errno of headers that could not be read or emptied, which ended the scan
};

class SlabFile {
  public:
    // `record_fd` may be open for direct I/O, `header_fd` must not be. The caller closes both.
    SlabFile(int record_fd, int header_fd, SlabShape shape, unsigned threads);

    // Reads the headers of slots [first, last). Slots without a valid header count as empty from then on;
    // with `repair` in the file too, as far as the disk has room.
    SlabScan scan(std::uint32_t first, std::uint32_t last, bool repair = false);
    SlotHeader header(std::uint32_t slot) const;

    // Reads slots into records. Checks every record, unless `verify` is false and this object wrote or
    // checked the slot before. Empties slots that are corrupt, and those whose record the file has lost its
    // end with.
    SlabOutcome read(std::span<const SlabBlock> blocks, const SlabLimits &limits, bool verify);
    // Writes records, whose headers must be READY, into slots.
    SlabOutcome write(std::span<const SlabBlock> blocks, const SlabLimits &limits, SyncPolicy sync,
                      std::uint64_t now_ms);
    // Checks the records of READY slots against their headers; kMiss for slots that are not READY.
    SlabOutcome verify(std::span<const std::uint32_t> slots);
    // Empties slots. Returns an errno or 0.
    int erase(std::span<const std::uint32_t> slots);
    // Makes all writes so far survive power loss. Returns an errno or 0.
    int sync();
    bool unsynced() const { return unsynced_.load(); }

  private:
    struct Run;  // consecutive slots copied in one request

    static constexpr std::size_t kRunBytes = std::size_t{1} << 20;
    static constexpr std::size_t kRunBlocks = 64;
    // The file ends before the record. No errno: the kernel reports bad sectors as ENODATA.
    static constexpr int kTruncated = -1;

    // True if the errno says that the file cannot grow.
    static constexpr bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }
    // Moves all bytes of `vectors`, in as many requests as the kernel needs. Returns an errno or 0.
    static int move_vectors(int fd, std::vector<iovec> vectors, off_t offset, bool writing);

    std::vector<Run> runs_of(std::span<const SlabBlock> blocks, std::span<const SlabFault> faults) const;
    int move_run(std::span<const SlabBlock *const> run, bool writing) const;
    void move_all(std::span<const SlabBlock> blocks, const SlabLimits &limits, bool writing,
                  SlabOutcome &out);
    SlabFault check_slot_header(const SlabBlock &block) const;
    SlabFault check_source(const SlabBlock &block, SlotHeader &found) const;
    bool is_intact(const std::uint8_t *record, std::uint64_t checksum) const;
    void deliver(const SlabBlock &block, bool verify, SlabFault &fault, std::uint64_t &checksum);
    void store_host_header(const SlabBlock &block, HeaderState state, std::uint64_t checksum) const;
    int store_headers(std::span<const std::uint32_t> slots);
    int empty_targets(std::span<const SlabBlock> blocks, SlabOutcome &out);
    SlotHeader empty_header(std::uint32_t slot) const;

    const int record_fd_;
    const int header_fd_;
    const SlabShape shape_;
    std::uint64_t payload_bytes_ = 0;
    mutable std::mutex mutex_;  // guards headers_ and trusted_
    std::vector<SlotHeader> headers_;
    std::vector<bool> trusted_;  // slots that this object wrote or checked
    std::atomic<bool> unsynced_{false};
    IoPool pool_;
};

}  // namespace fdcache
