// Backups: copies of device blocks to the host tier, ancestors first, as far as both tiers have room.
//
// The host tier is closed under prefixes, so a block is copied after its ancestors that the host lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

#include "hash/digest.hpp"
#include "plan/block_copies.hpp"
#include "plan/slot_queue.hpp"
#include "tier/outgoing.hpp"
#include "tier/tier.hpp"

namespace fdcache {

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
    // The longest path that there can ever be room for, as far as that is known.
    std::size_t longest_path() const { return tier_ ? room() : SIZE_MAX; }
    std::vector<Presence> contains(std::span<const Digest> hashes) const;
    CopyReservation reserve(std::span<const Digest> parents, std::span<const Digest> hashes,
                            bool below_pending = false);

  private:
    Tier *tier_ = nullptr;
    OutgoingCopies *service_ = nullptr;
};

// Blocks that are evicted take no more ancestors along: their step waits for the copies.
inline constexpr std::uint32_t kMostAncestors = 2048;

struct PlannedBackups {
    std::uint32_t planned = 0;
    std::uint32_t dropped = 0;  // the host had no room for them, for the first time
    std::uint32_t asked = 0;    // host slots asked for at once
    BlockList displaced;        // blocks that left the host to make room
};

class BackupPlanner {
  public:
    // Blocks are wanted on the host from `least_hits` on.
    BackupPlanner(Tier &device, std::uint32_t least_hits) : device_(device), least_hits_(least_hits) {}

    std::uint32_t device_slots() const { return device_.stats().slots; }

    // Plans copies of up to `most` queued blocks that the host lacks. The others stay queued.
    PlannedBackups flush(SlotQueue &queue, BackupTarget target, std::size_t most, BlockCopies &copies);
    // Plans up to `most` copies of those among the next `coldest` blocks to be evicted that the host lacks.
    PlannedBackups clean(std::uint32_t coldest, BackupTarget target, std::size_t most, BlockCopies &copies);
    // Plans copies of evicted blocks that the host lacks, before their slots are overwritten. `evicted`: the
    // lists of one allocation, in the order of eviction.
    PlannedBackups evict(std::span<const BlockList *const> evicted, BackupTarget target, BlockCopies &copies);

  private:
    // A call that plans copies.
    struct Call {
        BackupTarget &target;
        BlockCopies &copies;
        PlannedBackups &out;
        std::unordered_set<Digest, DigestHash> dropped;
    };

    BlockList with_uncovered_ancestors(BlockList blocks, const BackupTarget &target,
                                       std::uint32_t most_levels) const;
    BlockList that_fit(BlockList blocks, Call &call);
    BlockList with_few_ancestors(const BlockList &evicted, Call &call);
    BlockList back_up(BlockList blocks, std::size_t most, Call &call);
    void copy(BlockList blocks, Call &call);
    void drop(const BlockList &blocks, std::size_t i, Call &call);

    Tier &device_;
    std::uint32_t least_hits_;
    std::vector<std::uint32_t> dropped_;  // by slot: the generation whose block was counted as dropped
};

}  // namespace fdcache
