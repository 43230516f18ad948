#include "plan/backup_planner.hpp"

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fdcache {
namespace {

constexpr std::uint32_t kFirstLevels = 64;  // of ancestors listed at once, after the blocks alone

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

BlockList absent(BlockList &&blocks, const BackupTarget &target) {
    const std::vector<Presence> presence = target.contains(blocks.hashes);
    return select_if(std::move(blocks), [&](std::size_t i) { return presence[i] == Presence::kAbsent; });
}

void keep_absent(std::vector<Digest> &hashes, const BackupTarget &target) {
    if (hashes.empty()) return;
    const std::vector<Presence> presence = target.contains(hashes);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < hashes.size(); ++i)
        if (presence[i] == Presence::kAbsent) hashes[kept++] = hashes[i];
    hashes.resize(kept);
}

// The parents, without the root, of blocks that do not continue the block before them.
std::vector<Digest> parents_above(const BlockList &blocks) {
    std::vector<Digest> parents;
    for (std::size_t i = 0; i < blocks.slots.size(); ++i) {
        const bool continues = i > 0 && blocks.parents[i] == blocks.hashes[i - 1];
        if (!continues && !blocks.parents[i].is_zero()) parents.push_back(blocks.parents[i]);
    }
    return parents;
}

using DigestSet = std::unordered_set<Digest, DigestHash>;

DigestSet set_of(const BlockList &blocks) {
    return {blocks.hashes.begin(), blocks.hashes.end()};
}

// Blocks of a tier and their ancestors, parents first, as far as the target lacks them. The walk up a path
// ends at the first block that the target has, so the cost grows with the blocks returned, not with their
// depth.
BlockList with_absent_ancestors(const Tier &tier, std::span<const Slot> slots, const BackupTarget &target) {
    std::uint32_t levels = 0;
    std::size_t listed = 0;
    for (bool first = true;; first = false) {
        BlockList blocks = tier.ancestry(slots, levels);
        const bool grown = first || blocks.slots.size() > listed;
        listed = blocks.slots.size();
        blocks = absent(std::move(blocks), target);
        if (!grown) return blocks;
        std::vector<Digest> above = parents_above(blocks);
        keep_absent(above, target);
        if (above.empty()) return blocks;
        const DigestSet own = set_of(blocks);
        if (std::ranges::all_of(above, [&](const Digest &parent) { return own.contains(parent); }))
            return blocks;
        levels = std::max(kFirstLevels, 4 * levels);
    }
}

// Ends the holds of slots at the end of its scope, unless a copy is planned of them.
class ScopedHolds {
  public:
    // `slots`: held by the caller, once each time they are named.
    ScopedHolds(Tier &tier, std::vector<Slot> slots) : tier_(tier), slots_(std::move(slots)) {}
    ScopedHolds(const ScopedHolds &) = delete;
    ScopedHolds &operator=(const ScopedHolds &) = delete;
    ~ScopedHolds() {
        if (!slots_.empty()) tier_.unhold(slots_);
    }

    // Leaves these slots, in the order of all slots, held.
    void leave(std::span<const Slot> kept) {
        auto next = kept.begin();
        std::erase_if(slots_,
                      [&](Slot slot) { return next != kept.end() && slot == *next && (++next, true); });
    }

  private:
    Tier &tier_;
    std::vector<Slot> slots_;
};

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

std::size_t BlockQueue::add(std::vector<Digest> &&hashes) {
    if (hashes.empty()) return 0;
    parts_.push_back({std::move(hashes)});
    size_ += parts_.back().size();
    std::size_t dropped = 0;
    for (; size_ > most_; parts_.pop_front()) {
        dropped += parts_.front().size();
        size_ -= parts_.front().size();
    }
    return dropped;
}

void BlockQueue::put_back(std::vector<Digest> &&hashes) {
    if (hashes.empty()) return;
    parts_.push_front({std::move(hashes)});
    size_ += parts_.front().size();
}

std::vector<Digest> BlockQueue::take(std::size_t count) {
    std::vector<Digest> taken;
    taken.reserve(std::min(count, size_));
    while (!parts_.empty() && taken.size() < count) {
        Part &part = parts_.front();
        const auto first = part.hashes.begin() + static_cast<std::ptrdiff_t>(part.taken);
        const std::size_t some = std::min(count - taken.size(), part.size());
        taken.insert(taken.end(), first, first + static_cast<std::ptrdiff_t>(some));
        part.taken += some;
        if (part.size() == 0) parts_.pop_front();
    }
    size_ -= taken.size();
    return taken;
}

void BlockQueue::clear() {
    parts_.clear();
    size_ = 0;
}

std::size_t BackupTarget::room() const {
    if (tier_) return tier_->stats().slots;
    return service_ ? service_->stock() : 0;
}

std::vector<Presence> BackupTarget::contains(std::span<const Digest> hashes) const {
    if (tier_) return tier_->contains(hashes);
    return service_ ? service_->contains(hashes) : std::vector(hashes.size(), Presence::kAbsent);
}

CopyReservation BackupTarget::reserve(std::span<const Digest> parents, std::span<const Digest> hashes,
                                      bool below_pending) {
    if (tier_) return tier_->reserve_copies(0, parents, hashes, below_pending);
    if (service_) return service_->reserve(parents, hashes, below_pending);
    CopyReservation none;
    none.missing = static_cast<std::uint32_t>(hashes.size());
    return none;
}

PlannedBackups BackupPlanner::flush(BlockQueue &queue, BackupTarget target, const BackupLimit &limit,
                                    BlockCopies &copies) {
    PlannedBackups out;
    std::vector<Digest> wanted = queue.take(std::min(limit.most, target.room()));
    keep_absent(wanted, target);
    if (wanted.empty()) return out;
    BlockList blocks = device_.find(wanted);
    if (!blocks.slots.empty()) queue.put_back(back_up(std::move(blocks), target, limit, copies, out));
    return out;
}

PlannedBackups BackupPlanner::clean(std::uint32_t coldest, BackupTarget target, const BackupLimit &limit,
                                    BlockCopies &copies) {
    PlannedBackups out;
    BlockList blocks = absent(device_.coldest(coldest), target);
    truncate(blocks, std::min(blocks.slots.size(), limit.most));
    if (!blocks.slots.empty()) back_up(paths_from_root(std::move(blocks)), target, limit, copies, out);
    return out;
}

PlannedBackups BackupPlanner::evict(std::span<const BlockList *const> evicted, std::uint32_t least_hits,
                                    BackupTarget target, BlockCopies &copies) {
    PlannedBackups out;
    BlockList dirty;
    for (const BlockList *list : evicted) {
        const std::vector<Presence> presence = target.contains(list->hashes);
        std::vector<std::size_t> chosen;
        for (std::size_t i = 0; i < presence.size(); ++i)
            if (presence[i] == Presence::kAbsent && list->hits[i] >= least_hits) chosen.push_back(i);
        if (!chosen.empty()) dirty.append(select(*list, chosen));
    }
    if (dirty.slots.empty()) return out;
    BlockList blocks = with_uncovered_ancestors(paths_from_root(std::move(dirty)), target);
    const std::vector<Digest> orphans = copy(std::move(blocks), false, target, copies, out);
    out.dropped += static_cast<std::uint32_t>(orphans.size());
    return out;
}

BlockList BackupPlanner::with_uncovered_ancestors(BlockList blocks, const BackupTarget &target) const {
    std::vector<Digest> uncovered = parents_above(blocks);
    keep_absent(uncovered, target);
    if (uncovered.empty()) return blocks;
    const DigestSet own = set_of(blocks);
    std::erase_if(uncovered, [&own](const Digest &parent) { return own.contains(parent); });
    if (uncovered.empty()) return blocks;
    const BlockList parents = device_.find(uncovered);
    BlockList above = with_absent_ancestors(device_, parents.slots, target);
    above = select_if(std::move(above), [&](std::size_t i) { return !own.contains(above.hashes[i]); });
    if (above.slots.empty()) return blocks;
    // Path by path: if ancestors of several paths came first, they could evict each other for ever in a small
    // host.
    blocks.append(above);
    return paths_from_root(std::move(blocks));
}

// Plans backups of blocks as far as the device can spare them, and returns the hashes of the rest.
std::vector<Digest> BackupPlanner::back_up(BlockList blocks, BackupTarget target, const BackupLimit &limit,
                                           BlockCopies &copies, PlannedBackups &out) {
    blocks = with_uncovered_ancestors(std::move(blocks), target);
    const std::span<const Slot> slots = blocks.slots;
    const std::size_t count = hold_spared(slots.first(std::min(limit.most, slots.size())), limit, out);
    const std::vector<Digest> rest(blocks.hashes.begin() + static_cast<std::ptrdiff_t>(count),
                                   blocks.hashes.end());
    truncate(blocks, count);
    std::vector<Digest> later = copy(std::move(blocks), true, target, copies, out);
    // If the host has no room, descendants of dropped blocks would retry in every step.
    if (out.dropped)
        out.dropped += static_cast<std::uint32_t>(rest.size());
    else
        later.insert(later.end(), rest.begin(), rest.end());
    return later;
}

// Holds as many of the first slots as may be held without keeping too many blocks from eviction.
std::size_t BackupPlanner::hold_spared(std::span<const Slot> slots, const BackupLimit &limit,
                                       PlannedBackups &out) {
    const std::uint32_t before = device_.available();
    for (std::size_t count = slots.size(); count; count /= 2) {
        device_.hold(slots.first(count));
        const std::uint32_t withheld = before - device_.available();
        if (withheld <= limit.withheld || (count == 1 && limit.none_in_flight)) {
            out.withheld = withheld;
            return count;
        }
        device_.unhold(slots.first(count));
    }
    return 0;
}

// Reserves host slots for blocks, parents first, as far as there is room, and plans their copies. The copies
// hold their blocks; with `held` all blocks are held already. Returns the hashes of blocks that have to wait
// for the copy of an ancestor.
std::vector<Digest> BackupPlanner::copy(BlockList blocks, bool held, BackupTarget target, BlockCopies &copies,
                                        PlannedBackups &out) {
    ScopedHolds holds(device_, held ? blocks.slots : std::vector<Slot>());
    std::vector<Digest> later;
    while (!blocks.slots.empty()) {
        const std::size_t count = blocks.slots.size();
        copies.reserve_for(copies.size() + count);
        CopyReservation taken = target.reserve(blocks.parents, blocks.hashes);
        const auto reserved = static_cast<std::uint32_t>(taken.slots.size());
        out.asked = std::max(out.asked, reserved + taken.missing);
        if (taken.missing) {
            const std::size_t missing = std::min<std::size_t>(taken.missing, count);
            out.dropped += static_cast<std::uint32_t>(missing);
            truncate(blocks, count - missing);
            continue;
        }
        std::vector<Slot> sources;
        sources.reserve(reserved);
        for (std::size_t i = 0; i < count; ++i) {
            if (taken.status[i] == ReserveStatus::kNoParent) later.push_back(blocks.hashes[i]);
            if (taken.status[i] != ReserveStatus::kReserved) continue;
            const std::size_t next = sources.size();
            copies.add(blocks, i, taken.slots[next], taken.generations[next]);
            sources.push_back(blocks.slots[i]);
        }
        if (held)
            holds.leave(sources);
        else
            device_.hold(sources);
        out.planned += reserved;
        out.displaced = std::move(taken.evicted);
        break;
    }
    return later;
}

}  // namespace fdcache
