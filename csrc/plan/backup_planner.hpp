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
#include "tier/host_index.hpp"
#include "tier/tier.hpp"

namespace fdcache {

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
    PlannedBackups flush(SlotQueue &queue, HostIndex &target, std::size_t most, BlockCopies &copies);
    // Plans up to `most` copies of those among the next `coldest` blocks to be evicted that the host lacks.
    PlannedBackups clean(std::uint32_t coldest, HostIndex &target, std::size_t most, BlockCopies &copies);
    // Plans copies of evicted blocks that the host lacks, before their slots are overwritten. `evicted`: the
    // lists of one allocation, in the order of eviction.
    PlannedBackups evict(std::span<const BlockList *const> evicted, HostIndex &target, BlockCopies &copies);

  private:
    // A call that plans copies.
    struct Call {
        HostIndex &target;
        BlockCopies &copies;
        PlannedBackups &out;
        std::unordered_set<Digest, DigestHash> dropped;
    };

    BlockList with_uncovered_ancestors(BlockList blocks, const HostIndex &target,
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
