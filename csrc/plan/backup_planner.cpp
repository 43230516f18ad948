#include "plan/backup_planner.hpp"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fdcache {
namespace {

constexpr std::uint32_t kFirstLevels = 64;  // of ancestors listed at once, after the blocks alone

constexpr std::uint32_t kAllLevels = UINT32_MAX / 4;

BlockList select(const BlockList &blocks, std::span<const std::size_t> chosen) {
    BlockList list;
    list.slots.reserve(chosen.size());
    list.generations.reserve(chosen.size());
    list.hashes.reserve(chosen.size());
    list.parents.reserve(chosen.size());
    list.hits.reserve(chosen.size());
    for (const std::size_t i : chosen) {
        list.slots.push_back(blocks.slots[i]);
        list.generations.push_back(blocks.generations[i]);
        list.hashes.push_back(blocks.hashes[i]);
        list.parents.push_back(blocks.parents[i]);
        list.hits.push_back(blocks.hits[i]);
    }
    return list;
}

template <typename Keep>
BlockList select_if(BlockList &&blocks, Keep keep) {
    std::vector<std::size_t> chosen;
    chosen.reserve(blocks.slots.size());
    for (std::size_t i = 0; i < blocks.slots.size(); ++i)
        if (keep(i)) chosen.push_back(i);
    return chosen.size() == blocks.slots.size() ? std::move(blocks) : select(blocks, chosen);
}

void truncate(BlockList &blocks, std::size_t count) {
    blocks.slots.resize(count);
    blocks.generations.resize(count);
    blocks.hashes.resize(count);
    blocks.parents.resize(count);
    blocks.hits.resize(count);
}

BlockList absent(BlockList &&blocks, const HostIndex &target) {
    const std::vector<Presence> presence = target.contains(blocks.hashes);
    return select_if(std::move(blocks), [&](std::size_t i) { return presence[i] == Presence::kAbsent; });
}

void keep_absent(std::vector<Digest> &hashes, const HostIndex &target) {
    if (hashes.empty()) return;
    const std::vector<Presence> presence = target.contains(hashes);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < hashes.size(); ++i)
        if (presence[i] == Presence::kAbsent) hashes[kept++] = hashes[i];
    hashes.resize(kept);
}

// The block does not continue the path of the block before it.
bool is_head(const BlockList &blocks, std::size_t i) {
    return i == 0 || blocks.parents[i] != blocks.hashes[i - 1];
}

// The parents, without the root, of blocks that do not continue the block before them.
std::vector<Digest> parents_above(const BlockList &blocks) {
    std::vector<Digest> parents;
    for (std::size_t i = 0; i < blocks.slots.size(); ++i) {
        if (is_head(blocks, i) && !blocks.parents[i].is_zero()) parents.push_back(blocks.parents[i]);
    }
    return parents;
}

using DigestSet = std::unordered_set<Digest, DigestHash>;

DigestSet set_of(const BlockList &blocks) {
    return {blocks.hashes.begin(), blocks.hashes.end()};
}

// Blocks of a tier and their ancestors, parents first, as far as the target lacks them. The walk up a path
// ends at the first block that the target has, so the cost grows with the blocks returned, not with their
// depth. It goes no more than `most_levels` up.
BlockList with_absent_ancestors(const Tier &tier, std::span<const Slot> slots, const HostIndex &target,
                                std::uint32_t most_levels) {
    std::uint32_t levels = 0;
    std::size_t listed = 0;
    for (bool first = true;; first = false) {
        BlockList blocks = tier.ancestry(slots, levels);
        const bool grown = first || blocks.slots.size() > listed;
        listed = blocks.slots.size();
        blocks = absent(std::move(blocks), target);
        if (!grown || levels >= most_levels) return blocks;
        std::vector<Digest> above = parents_above(blocks);
        keep_absent(above, target);
        if (above.empty()) return blocks;
        const DigestSet own = set_of(blocks);
        if (std::ranges::all_of(above, [&](const Digest &parent) { return own.contains(parent); }))
            return blocks;
        levels = std::min(std::max(kFirstLevels, 4 * levels), most_levels);
    }
}

// Blocks as paths, each from its root, in the order of the first block of each path.
BlockList paths_from_root(BlockList &&blocks) {
    constexpr std::size_t kNone = SIZE_MAX;
    const std::size_t count = blocks.slots.size();
    std::unordered_map<Digest, std::size_t, DigestHash> position;
    position.reserve(count);
    for (std::size_t i = 0; i < count; ++i) position[blocks.hashes[i]] = i;
    std::vector<std::size_t> order, path;
    std::vector<bool> has_turn(count, false);
    order.reserve(count);
    for (std::size_t start = 0; start < count; ++start) {
        path.clear();
        for (std::size_t at = start; at != kNone && !has_turn[at];) {
            has_turn[at] = true;
            path.push_back(at);
            const auto parent = position.find(blocks.parents[at]);
            at = parent == position.end() ? kNone : parent->second;
        }
        order.insert(order.end(), path.rbegin(), path.rend());
    }
    return select(blocks, order);
}

}  // namespace

PlannedBackups BackupPlanner::flush(SlotQueue &queue, HostIndex &target, std::size_t most,
                                    BlockCopies &copies) {
    PlannedBackups out;
    Call call{target, copies, out, {}};
    most = std::min(most, target.room());
    BlockList blocks = absent(device_.entries_in(queue.take(most)), target);
    blocks = select_if(std::move(blocks), [&](std::size_t i) { return blocks.hits[i] >= least_hits_; });
    blocks = that_fit(std::move(blocks), call);
    if (!blocks.slots.empty()) queue.put_back(back_up(std::move(blocks), most, call).slots);
    return out;
}

PlannedBackups BackupPlanner::clean(std::uint32_t coldest, HostIndex &target, std::size_t most,
                                    BlockCopies &copies) {
    PlannedBackups out;
    Call call{target, copies, out, {}};
    most = std::min(most, target.room());
    BlockList blocks = absent(device_.coldest(coldest), target);
    truncate(blocks, std::min(blocks.slots.size(), most));
    blocks = that_fit(paths_from_root(std::move(blocks)), call);
    if (!blocks.slots.empty()) back_up(std::move(blocks), most, call);
    return out;
}

PlannedBackups BackupPlanner::evict(std::span<const BlockList *const> evicted, HostIndex &target,
                                    BlockCopies &copies) {
    PlannedBackups out;
    BlockList dirty;
    for (const BlockList *list : evicted) {
        const std::vector<Presence> presence = target.contains(list->hashes);
        std::vector<std::size_t> chosen;
        for (std::size_t i = 0; i < presence.size(); ++i)
            if (presence[i] == Presence::kAbsent && list->hits[i] >= least_hits_) chosen.push_back(i);
        if (!chosen.empty()) dirty.append(select(*list, chosen));
    }
    if (dirty.slots.empty()) return out;
    Call call{target, copies, out, {}};
    copy(with_few_ancestors(paths_from_root(std::move(dirty)), call), call);
    return out;
}

BlockList BackupPlanner::with_uncovered_ancestors(BlockList blocks, const HostIndex &target,
                                                  std::uint32_t most_levels) const {
    std::vector<Digest> uncovered = parents_above(blocks);
    keep_absent(uncovered, target);
    if (uncovered.empty()) return blocks;
    const DigestSet own = set_of(blocks);
    std::erase_if(uncovered, [&own](const Digest &parent) { return own.contains(parent); });
    if (uncovered.empty()) return paths_from_root(std::move(blocks));
    const BlockList parents = device_.find(uncovered);
    BlockList above = with_absent_ancestors(device_, parents.slots, target, most_levels);
    above = select_if(std::move(above), [&](std::size_t i) { return !own.contains(above.hashes[i]); });
    if (above.slots.empty()) return blocks;
    // Path by path: if ancestors of several paths came first, they could evict each other for ever in a small
    // host.
    blocks.append(above);
    return paths_from_root(std::move(blocks));
}

// Leaves the blocks of paths that are no longer than the host tier; the others can never be there.
BlockList BackupPlanner::that_fit(BlockList blocks, Call &call) {
    const std::size_t longest = call.target.longest_path();
    std::size_t depth = 0;
    return select_if(std::move(blocks), [&](std::size_t i) {
        depth = is_head(blocks, i) ? device_.node(blocks.slots[i]).depth : depth + 1;
        if (depth >= longest) drop(blocks, i, call);
        return depth < longest;
    });
}

// Adds ancestors that the host lacks, and drops the paths for which these would be too many. Some of a path
// that is too long are left out, so that its blocks find no parent.
BlockList BackupPlanner::with_few_ancestors(const BlockList &evicted, Call &call) {
    const BlockList blocks = with_uncovered_ancestors(evicted, call.target, kMostAncestors);
    if (blocks.slots.size() - evicted.slots.size() <= kMostAncestors) return blocks;
    const DigestSet own = set_of(evicted);
    std::vector<std::size_t> chosen;
    std::size_t left = kMostAncestors;
    for (std::size_t first = 0, stop = 0; first < blocks.slots.size(); first = stop) {
        std::size_t above = 0;
        do above += !own.contains(blocks.hashes[stop++]);
        while (stop < blocks.slots.size() && !is_head(blocks, stop));
        const bool fits = above <= left;
        if (fits) left -= above;
        for (std::size_t i = first; i < stop; ++i) {
            if (fits)
                chosen.push_back(i);
            else if (own.contains(blocks.hashes[i]))
                drop(blocks, i, call);
        }
    }
    return select(blocks, chosen);
}

// Plans backups of up to `most` blocks and their ancestors, and returns those for a later plan. What is below
// a dropped block is dropped with it.
BlockList BackupPlanner::back_up(BlockList blocks, std::size_t most, Call &call) {
    blocks = with_uncovered_ancestors(std::move(blocks), call.target, kAllLevels);
    const std::size_t count = std::min(most, blocks.slots.size());
    std::vector<std::size_t> later(blocks.slots.size() - count);
    std::iota(later.begin(), later.end(), count);
    const BlockList rest = select(blocks, later);
    truncate(blocks, count);
    copy(std::move(blocks), call);
    later.clear();
    for (std::size_t i = 0; i < rest.slots.size(); ++i) {
        if (call.dropped.contains(rest.parents[i]))
            drop(rest, i, call);
        else
            later.push_back(i);
    }
    return select(rest, later);
}

// Reserves host slots for blocks, parents first, as far as there is room, and plans their copies, which hold
// their blocks. A block whose parent is being copied is copied below it.
void BackupPlanner::copy(BlockList blocks, Call &call) {
    while (!blocks.slots.empty()) {
        const std::size_t count = blocks.slots.size();
        call.copies.reserve_for(call.copies.size() + count);
        CopyReservation taken = call.target.reserve(blocks.parents, blocks.hashes, true);
        const auto reserved = static_cast<std::uint32_t>(taken.slots.size());
        call.out.asked = std::max(call.out.asked, reserved + taken.missing);
        if (taken.missing) {
            const std::size_t kept = count - std::min<std::size_t>(taken.missing, count);
            for (std::size_t i = kept; i < count; ++i) drop(blocks, i, call);
            truncate(blocks, kept);
            continue;
        }
        std::vector<Slot> sources;
        sources.reserve(reserved);
        for (std::size_t i = 0; i < count; ++i) {
            if (taken.status[i] == ReserveStatus::kNoParent) drop(blocks, i, call);
            if (taken.status[i] != ReserveStatus::kReserved) continue;
            const std::size_t next = sources.size();
            call.copies.add(blocks, i, taken.slots[next], taken.generations[next]);
            sources.push_back(blocks.slots[i]);
        }
        device_.hold(sources);
        call.out.planned += reserved;
        call.out.displaced = std::move(taken.evicted);
        return;
    }
}

// Counts a block that finds no room once, as long as it is on the device.
void BackupPlanner::drop(const BlockList &blocks, std::size_t i, Call &call) {
    call.dropped.insert(blocks.hashes[i]);
    const Slot slot = blocks.slots[i];
    if (slot >= dropped_.size()) dropped_.resize(std::size_t{slot} + 1);
    if (std::exchange(dropped_[slot], blocks.generations[i]) != blocks.generations[i]) ++call.out.dropped;
}

}  // namespace fdcache
