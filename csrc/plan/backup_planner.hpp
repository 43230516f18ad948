// Backups: copies of device blocks to the host tier, ancestors first, as far as both tiers have room.
//
// The host tier is closed under prefixes, so a block is copied after its ancestors that the host lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "hash/digest.hpp"
#include "plan/block_copies.hpp"
#include "tier/outgoing.hpp"
#include "tier/tier.hpp"

namespace fdcache {

// A first-in, first-out queue of block hashes, added in parts. A full queue drops its oldest parts.
class BlockQueue {
  public:
    explicit BlockQueue(std::size_t most) : most_(most) {}

    // Returns the number of blocks dropped.
    std::size_t add(std::vector<Digest> &&hashes);
    // Puts back, at the front, blocks that cannot be copied yet.
    void put_back(std::vector<Digest> &&hashes);
    // Removes and returns the first `count` blocks, or as many as there are.
    std::vector<Digest> take(std::size_t count);
    void clear();
    std::size_t size() const { return size_; }

  private:
    struct Part {
        std::vector<Digest> hashes;
        std::size_t taken = 0;  // the first ones, which are not queued any more

        std::size_t size() const { return hashes.size() - taken; }
    };

    std::size_t most_;
    std::size_t size_ = 0;
    std::deque<Part> parts_;
};

// The host tier of a backup: one of this process, or that of a service. Without a tier it is a service that
// cannot be reached: nothing is there, and there is no room.
class BackupTarget {
  public:
    BackupTarget() = default;
    explicit BackupTarget(Tier &tier) : tier_(&tier) {}
    explicit BackupTarget(OutgoingCopies &service) : service_(&service) {}

    explicit operator bool() const { return tier_ || service_; }

    // The most blocks that may be copied now.
    std::size_t room() const;
    std::vector<Presence> contains(std::span<const Digest> hashes) const;
    CopyReservation reserve(std::span<const Digest> parents, std::span<const Digest> hashes,
                            bool below_pending = false);

  private:
    Tier *tier_ = nullptr;
    OutgoingCopies *service_ = nullptr;
};

// The blocks that new backups may keep from eviction. One backup is allowed anyway if none is in flight: it
// may be the end of a path as long as the tier.
struct BackupLimit {
    std::size_t most;  // backups that may begin
    std::uint32_t withheld;
    bool none_in_flight;
};

struct PlannedBackups {
    std::uint32_t planned = 0;
    std::uint32_t dropped = 0;   // the host had no room for them
    std::uint32_t withheld = 0;  // blocks that the planned copies keep from eviction
    std::uint32_t asked = 0;     // host slots asked for at once
    BlockList displaced;         // blocks that left the host to make room
};

class BackupPlanner {
  public:
    explicit BackupPlanner(Tier &device) : device_(device) {}

    std::uint32_t device_slots() const { return device_.stats().slots; }

    // Plans copies of queued blocks that the device has and the host lacks. Those that have to wait stay
    // queued.
    PlannedBackups flush(BlockQueue &queue, BackupTarget target, const BackupLimit &limit,
                         BlockCopies &copies);
    // Plans copies of those among the next `coldest` blocks to be evicted that the host lacks.
    PlannedBackups clean(std::uint32_t coldest, BackupTarget target, const BackupLimit &limit,
                         BlockCopies &copies);
    // Plans copies of evicted blocks with `least_hits` that the host lacks, before their slots are
    // overwritten. `evicted`: the lists of one allocation, in the order of eviction.
    PlannedBackups evict(std::span<const BlockList *const> evicted, std::uint32_t least_hits,
                         BackupTarget target, BlockCopies &copies);

  private:
    BlockList with_uncovered_ancestors(BlockList blocks, const BackupTarget &target) const;
    std::vector<Digest> back_up(BlockList blocks, BackupTarget target, const BackupLimit &limit,
                                BlockCopies &copies, PlannedBackups &out);
    std::size_t hold_spared(std::span<const Slot> slots, const BackupLimit &limit, PlannedBackups &out);
    std::vector<Digest> copy(BlockList blocks, bool held, BackupTarget target, BlockCopies &copies,
                             PlannedBackups &out);

    Tier &device_;
};

}  // namespace fdcache
