// The records and slot headers of a slab file (docs/format-storage.md). Opening, locking and the superblock
// are the caller's; here are reads, writes and the scan.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/io_pool.hpp"
#include "core/slot_header.hpp"

namespace fdcache {

enum class SlabFault : std::uint8_t {
    kNone,
    kMiss,       // the slot does not hold this block
    kCorrupt,    // it says it does, but its bytes are others
    kSource,     // the host record is not, or no longer, the block to be written
    kError,      // the file system refused; errno says why
    kTimeout,    // not begun before the deadline
    kCancelled,  // not begun before it was taken back
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
    std::vector<PayloadPart> parts;  // in the order of their offsets, which are multiples of 8
};

// A block on its way between a slab slot and a host record with its header.
struct SlabBlock {
    std::uint32_t slot;
    std::uint32_t generation;
    std::uint32_t host_generation;
    Digest hash;
    Digest parent;
    std::uint8_t *record;
    SlotHeader *host_header;
};

// When to stop beginning: each record under way is still finished, for its memory is in use till then.
struct SlabLimits {
    std::chrono::steady_clock::time_point deadline;
    std::shared_ptr<std::atomic<bool>> cancelled;
};

struct SlabOutcome {
    std::vector<SlabFault> faults;
    std::vector<std::uint64_t> checksums;
    std::vector<std::int32_t> errors;  // the errno of each record that was refused, else 0
    std::uint64_t bytes = 0;           // of the records that were moved
    int file_error = 0;                // of the headers or a sync: an errno that concerns the whole file

    explicit SlabOutcome(std::size_t blocks = 0)
        : faults(blocks, SlabFault::kNone), checksums(blocks, 0), errors(blocks, 0) {}
};

struct SlabScan {
    std::uint32_t ready = 0;
    std::uint32_t corrupt = 0;  // headers that are neither empty nor valid, or whose record the file lacks
    int error = 0;              // the errno of headers that could not be read; the scan ended there
};

class SlabFile {
  public:
    // `record_fd` may be open for direct I/O, `header_fd` must not be; both stay the caller's.
    SlabFile(int record_fd, int header_fd, SlabShape shape, unsigned threads);

    // Reads the headers of slots [first, last). What has no valid header counts as empty from then on.
    SlabScan scan(std::uint32_t first, std::uint32_t last);
    SlotHeader header(std::uint32_t slot) const;

    // From the slots into the records; every record is checked unless `verify` is false and this object
    // wrote or checked the slot before. A slot found corrupt is emptied.
    SlabOutcome read(std::span<const SlabBlock> blocks, const SlabLimits &limits, bool verify);
    // From the records, whose headers must be READY, into the slots.
    SlabOutcome write(std::span<const SlabBlock> blocks, const SlabLimits &limits, SyncPolicy sync,
                      std::uint64_t now_ms);
    // Whether the records of READY slots are what their headers say; kMiss for slots that are not READY.
    SlabOutcome verify(std::span<const std::uint32_t> slots);
    // Empties slots. Returns an errno or 0.
    int erase(std::span<const std::uint32_t> slots);
    // Makes what was written survive power loss. Returns an errno or 0.
    int sync();
    bool unsynced() const { return unsynced_.load(); }

  private:
    struct Run;  // consecutive slots that move in one request

    static constexpr std::size_t kRunBytes = std::size_t{1} << 20;
    static constexpr std::size_t kRunBlocks = 64;

    std::vector<Run> runs_of(std::span<const SlabBlock> blocks, std::span<const SlabFault> faults) const;
    int move_run(std::span<const SlabBlock *const> run, bool writing) const;
    void move_all(std::span<const SlabBlock> blocks, const SlabLimits &limits, bool writing,
                  SlabOutcome &out);
    SlabFault check_slot_header(const SlabBlock &block) const;
    SlabFault check_source(const SlabBlock &block, SlotHeader &found) const;
    bool intact(const std::uint8_t *record, std::uint64_t checksum) const;
    void deliver(const SlabBlock &block, bool verify, SlabFault &fault, std::uint64_t &checksum);
    void stamp_host(const SlabBlock &block, HeaderState state, std::uint64_t checksum) const;
    int store_headers(std::span<const std::uint32_t> slots);
    int empty_targets(std::span<const SlabBlock> blocks, SlabOutcome &out);
    SlotHeader empty_header(std::uint32_t slot) const;

    const int record_fd_;
    const int header_fd_;
    const SlabShape shape_;
    std::uint64_t payload_bytes_ = 0;
    mutable std::mutex mutex_;  // of headers_ and trusted_
    std::vector<SlotHeader> headers_;
    std::vector<bool> trusted_;
    std::atomic<bool> unsynced_{false};
    IoPool pool_;
};

}  // namespace fdcache
