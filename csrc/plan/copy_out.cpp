#include "plan/copy_out.hpp"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fdcache {
namespace {

constexpr std::size_t kMostInFlight = 1024;

// Evicted blocks take no more ancestors along: their step waits for the copies.
constexpr std::uint32_t kMostAncestors = 2048;

constexpr std::uint32_t kAllLevels = UINT32_MAX / 4;
constexpr std::uint32_t kFirstLevels = 64;  // of ancestors listed at once, after the parents alone

// A patient plan leaves fewer queued blocks than kFew to a later one, at most kMostWaits times in a row.
constexpr std::size_t kFew = 32;
constexpr std::uint32_t kMostWaits = 16;

// Seconds that blocks wait for slots of a service.
constexpr double kPatience = 1.0;

using DigestSet = std::unordered_set<Digest, DigestHash>;

std::size_t less(std::size_t most, std::size_t taken) {
    return most > taken ? most - taken : 0;
}

BlockList select(const BlockList &blocks, std::span<const std::size_t> chosen) {
    BlockList list;
    list.make_room(chosen.size());
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

BlockList absent(BlockList blocks, const HostIndex &target) {
    const std::vector<Presence> presence = target.contains(blocks.hashes);
    return select_if(std::move(blocks), [&](std::size_t i) { return presence[i] == Presence::kAbsent; });
}

// The block does not continue the path of the block before it.
bool is_head(const BlockList &blocks, std::size_t i) {
    return i == 0 || blocks.parents[i] != blocks.hashes[i - 1];
}

// The heads whose parents the target lacks.
std::vector<std::size_t> uncovered_heads(const BlockList &blocks, const HostIndex &target) {
    std::vector<std::size_t> heads;
    std::vector<Digest> parents;
    for (std::size_t i = 0; i < blocks.slots.size(); ++i) {
        if (!is_head(blocks, i) || blocks.parents[i].is_no_block()) continue;
        heads.push_back(i);
        parents.push_back(blocks.parents[i]);
    }
    if (heads.empty()) return heads;
    const std::vector<Presence> presence = target.contains(parents);
    std::size_t kept = 0;
    for (std::size_t k = 0; k < heads.size(); ++k)
        if (presence[k] == Presence::kAbsent) heads[kept++] = heads[k];
    heads.resize(kept);
    return heads;
}

DigestSet set_of(const BlockList &blocks) {
    return {blocks.hashes.begin(), blocks.hashes.end()};
}

// The ancestors from which each block down to the heads is listed, too. `above`: parents first within a path.
BlockList joined_to(const BlockList &blocks, std::span<const std::size_t> heads, BlockList above) {
    DigestSet parents;
    for (const std::size_t i : heads) parents.insert(blocks.parents[i]);
    std::vector<std::size_t> chosen;
    for (std::size_t i = above.slots.size(); i-- > 0;) {
        if (!parents.contains(above.hashes[i])) continue;
        parents.insert(above.parents[i]);
        chosen.push_back(i);
    }
    std::ranges::reverse(chosen);
    return chosen.size() == above.slots.size() ? above : select(above, chosen);
}

// Blocks as paths, each from its root, in the order of the first block of each path. An engine may name a
// block twice.
BlockList paths_from_root(const BlockList &blocks) {
    constexpr std::size_t kNone = SIZE_MAX;
    const std::size_t count = blocks.slots.size();
    std::unordered_map<Digest, std::size_t, DigestHash> position;
    position.reserve(count);
    std::vector<std::size_t> order, path;
    std::vector<bool> has_turn(count, false);
    for (std::size_t i = 0; i < count; ++i) has_turn[i] = !position.try_emplace(blocks.hashes[i], i).second;
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

void CopyOut::clear() {
    device_.take_offered();
    device_.forget_told();
    queue_.clear();
    awaited_.clear();
}

void CopyOut::ended(std::span<const Slot> sources) {
    device_.unhold(sources);
}

CopyOut::Ended CopyOut::ended(const DevicePath &path, std::size_t start, std::size_t stop,
                              HostIndex &target) {
    constexpr std::size_t kPiece = 256;
    take_offered(target);
    const bool may_plan = target.capacity() > 0;
    Ended out;
    for (std::size_t at = start; at < stop; at += kPiece) {
        const std::size_t count = std::min(kPiece, stop - at);
        const std::vector<Presence> presence = target.contains(std::span(path.hashes).subspan(at, count));
        for (std::size_t i = 0; i < count; ++i, ++out.count) {
            const Slot slot = path.slots[at + i];
            const bool is_queued = queue_.contains(slot) || awaited_.contains(slot);
            if (presence[i] == Presence::kPending) return out;
            if (presence[i] == Presence::kAbsent && may_plan && is_queued) return out;
            out.there += presence[i] == Presence::kReady;
        }
    }
    return out;
}

std::size_t CopyOut::queued(HostIndex &target) {
    take_offered(target);
    return queue_.size() + awaited_.size();
}

// Queues those of the blocks that came which the policy wants on the host now.
void CopyOut::take_offered(HostIndex &target) {
    const std::vector<Slot> slots = device_.take_offered();
    if (slots.empty()) return;
    BlockList told = device_.entries_in(slots);
    target.join(told.hashes, told.parents);
    if (writes_back_) return;
    const BlockList blocks = absent(std::move(told), target);
    for (std::size_t i = 0; i < blocks.slots.size(); ++i)
        if (blocks.hits[i] >= least_hits_) queue_.add({&blocks.slots[i], 1});
}

PlannedCopies CopyOut::give_away(std::span<const Slot> slots, HostIndex &target, BlockCopies &copies) {
    take_offered(target);
    return evict(device_.entries_in(slots), target, copies);
}

PlannedCopies CopyOut::evict(const BlockList &evicted, HostIndex &target, BlockCopies &copies) {
    PlannedCopies out;
    evicted_ += evicted.slots.size();
    const std::vector<Presence> presence = target.contains(evicted.hashes);
    std::vector<std::size_t> dirty;
    for (std::size_t i = 0; i < presence.size(); ++i)
        if (presence[i] == Presence::kAbsent && evicted.hits[i] >= least_hits_) dirty.push_back(i);
    if (dirty.empty()) return out;
    Call call{target, copies, out};
    copy(with_few_ancestors(paths_from_root(select(evicted, dirty)), call), call);
    return out;
}

PlannedCopies CopyOut::plan(HostIndex &target, std::size_t in_flight, bool is_patient, double now,
                            BlockCopies &copies) {
    PlannedCopies out;
    take_offered(target);
    if (!target.capacity()) return out;
    Call call{target, copies, out, now};
    const std::size_t most = less(std::min(kMostInFlight, device_.most_held()), in_flight);
    if (awaited_.size()) back_up(awaited_, 0, most, call);
    if (writes_back_)
        clean(in_flight + out.planned, less(most, out.planned), call);
    else if (queue_.size() && !waits_for_more(is_patient))
        back_up(queue_, least_hits_, less(most, out.planned), call);
    return out;
}

bool CopyOut::waits_for_more(bool is_patient) {
    const bool waits = is_patient && queue_.size() < kFew && waits_ < kMostWaits;
    waits_ = waits ? waits_ + 1 : 0;
    return waits;
}

void CopyOut::back_up(SlotQueue &queue, std::uint32_t least_hits, std::size_t most, Call &call) {
    BlockList blocks = wanted_from(queue, least_hits, most, call);
    if (blocks.slots.empty()) return;
    queue.put_back(copy_first(std::move(blocks), most, call).slots);
    queue.put_back(std::exchange(call.late, {}).slots);
}

void CopyOut::clean(std::size_t in_flight, std::size_t most, Call &call) {
    const std::size_t credit = less(device_.num_slots() + evicted_, cleaned_);
    const std::size_t wanted = std::min(less(clean_reserve_, in_flight), credit);
    if (!wanted || !most) return;
    const std::uint32_t before = call.out.planned;
    BlockList blocks = absent(device_.coldest(static_cast<std::uint32_t>(wanted)), call.target);
    blocks = that_fit(paths_from_root(blocks), call);
    if (!blocks.slots.empty()) copy_first(std::move(blocks), std::min(most, wanted), call);
    cleaned_ += call.out.planned - before;
}

// Removes up to `most` blocks from a queue that the host lacks; slots that have none are removed with them.
BlockList CopyOut::wanted_from(SlotQueue &queue, std::uint32_t least_hits, std::size_t most, Call &call) {
    BlockList wanted;
    while (queue.size() && wanted.slots.size() < most) {
        const std::vector<Slot> slots = queue.take(most - wanted.slots.size());
        BlockList blocks = absent(device_.entries_in(slots), call.target);
        blocks = select_if(std::move(blocks), [&](std::size_t i) { return blocks.hits[i] >= least_hits; });
        wanted.append(that_fit(std::move(blocks), call));
    }
    return wanted;
}

// Plans copies of up to `most` blocks and their ancestors, and returns those for a later plan. What is below
// a dropped block is dropped with it.
BlockList CopyOut::copy_first(BlockList blocks, std::size_t most, Call &call) {
    blocks = with_ancestors(std::move(blocks), call.target, kAllLevels);
    if (blocks.slots.size() <= most) {
        copy(blocks, call);
        return {};
    }
    std::vector<std::size_t> order(blocks.slots.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    copy(select(blocks, std::span(order).first(most)), call);
    BlockList rest = select(blocks, std::span(order).subspan(most));
    return select_if(std::move(rest), [&](std::size_t i) {
        const bool is_lost = call.dropped.contains(rest.parents[i]);
        if (is_lost) drop(rest, i, call);
        return !is_lost;
    });
}

// Adds the ancestors on the device that the host lacks. Path by path: if ancestors of several paths came
// first, they could evict each other for ever in a small host.
BlockList CopyOut::with_ancestors(BlockList blocks, const HostIndex &target,
                                  std::uint32_t most_levels) const {
    std::vector<std::size_t> heads = uncovered_heads(blocks, target);
    if (heads.empty()) return blocks;
    const DigestSet own = set_of(blocks);
    std::erase_if(heads, [&](std::size_t i) { return own.contains(blocks.parents[i]); });
    if (!heads.empty()) {
        BlockList above = absent_above(blocks, heads, target, most_levels);
        blocks.append(
            select_if(std::move(above), [&](std::size_t i) { return !own.contains(above.hashes[i]); }));
    }
    return paths_from_root(blocks);
}

// The walk up a path ends at the first block that the target has, so the cost grows with the blocks returned,
// not with their depth.
BlockList CopyOut::absent_above(const BlockList &blocks, std::span<const std::size_t> heads,
                                const HostIndex &target, std::uint32_t most_levels) const {
    std::size_t listed = 0;
    for (std::uint32_t levels = 0;;) {
        BlockList above = device_.above(blocks, heads, levels);
        const bool has_grown = above.slots.size() > listed;
        listed = above.slots.size();
        above = joined_to(blocks, heads, absent(std::move(above), target));
        if (!has_grown || levels >= most_levels) return above;
        const std::vector<std::size_t> open = uncovered_heads(above, target);
        const DigestSet own = set_of(above);
        if (std::ranges::all_of(open, [&](std::size_t i) { return own.contains(above.parents[i]); }))
            return above;
        levels = std::min(std::max(kFirstLevels, 4 * levels), most_levels);
    }
}

// Adds ancestors that the host lacks, and drops the paths for which these would be too many. Some of a path
// that is too long are left out, so that its blocks find no parent.
BlockList CopyOut::with_few_ancestors(const BlockList &evicted, Call &call) {
    const BlockList blocks = with_ancestors(evicted, call.target, kMostAncestors);
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

// Leaves the blocks of paths that are no longer than the host tier; the others can never be there.
BlockList CopyOut::that_fit(BlockList blocks, Call &call) {
    const std::size_t longest = call.target.longest_path();
    if (longest == SIZE_MAX) return blocks;
    std::size_t depth = 0;
    return select_if(std::move(blocks), [&](std::size_t i) {
        depth = is_head(blocks, i) ? device_.depth(blocks.slots[i]) : depth + 1;
        if (depth >= longest) drop(blocks, i, call);
        return depth < longest;
    });
}

// Reserves host slots for blocks, parents first, as far as there is room, and plans their copies, which hold
// their blocks.
void CopyOut::copy(const BlockList &blocks, Call &call) {
    const std::size_t all = blocks.slots.size();
    call.copies.reserve_for(call.copies.size() + all);
    CopyReservation taken;
    std::size_t count = all;
    while (count) {
        const std::span parents(blocks.parents), hashes(blocks.hashes);
        taken = call.target.reserve(parents.first(count), hashes.first(count), true);
        const auto asked = std::ranges::count(taken.status, ReserveStatus::kReserved);
        call.out.asked = std::max(call.out.asked, static_cast<std::uint32_t>(asked));
        if (!taken.missing) break;
        count = less(count, taken.missing);
    }
    if (count) starved_since_.reset();
    if (count < all && may_wait_for_room(call)) {
        std::vector<std::size_t> late(all - count);
        std::iota(late.begin(), late.end(), count);
        call.late.append(select(blocks, late));
    } else {
        for (std::size_t i = count; i < all; ++i) drop(blocks, i, call);
    }
    std::vector<Slot> sources;
    sources.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
        if (taken.status[i] == ReserveStatus::kNoParent) drop(blocks, i, call);
        if (taken.status[i] != ReserveStatus::kReserved) continue;
        const std::size_t next = sources.size();
        call.copies.add(blocks, i, taken.slots[next], taken.generations[next]);
        sources.push_back(blocks.slots[i]);
    }
    device_.hold(sources);
    call.out.planned += static_cast<std::uint32_t>(sources.size());
    call.out.displaced.append(taken.evicted);
}

bool CopyOut::may_wait_for_room(const Call &call) {
    if (!call.now || call.target.capacity() <= call.target.room()) return false;
    if (!starved_since_) starved_since_ = call.now;
    return *call.now - *starved_since_ < kPatience;
}

// Counts a block that finds no room once, as long as it is on the device.
void CopyOut::drop(const BlockList &blocks, std::size_t i, Call &call) {
    call.dropped.insert(blocks.hashes[i]);
    const Slot slot = blocks.slots[i];
    if (slot >= dropped_.size()) dropped_.resize(std::size_t{slot} + 1);
    if (std::exchange(dropped_[slot], blocks.generations[i]) != blocks.generations[i]) ++call.out.dropped;
}

std::vector<std::uint8_t> copies_that_may_end(std::span<const Digest> hashes, std::span<const Digest> parents,
                                              const HostIndex &target) {
    std::vector<std::uint8_t> may_end(hashes.size(), 1);
    std::vector<Digest> above;
    for (std::size_t i = 0; i < hashes.size(); ++i)
        if (i == 0 || parents[i] != hashes[i - 1]) above.push_back(parents[i]);
    const auto is_pending = [](Presence each) { return each == Presence::kPending; };
    if (std::ranges::none_of(target.contains(above), is_pending)) return may_end;
    const DigestSet own(hashes.begin(), hashes.end());
    const std::vector<Presence> presence = target.contains(parents);
    DigestSet held;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        if (!is_pending(presence[i])) continue;
        if (own.contains(parents[i]) && !held.contains(parents[i])) continue;
        held.insert(hashes[i]);
        may_end[i] = 0;
    }
    return may_end;
}

}  // namespace fdcache
