// Changes of a whole tier (reset, resize), its mirror and events, and its invariants.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "tier/tier.hpp"

namespace fdcache {

void Tier::reset() {
    std::lock_guard lock(mutex_);
    index_.clear();
    order_->clear();
    tenants_.clear();
    ++epoch_;
    for (const Slot slot : orphans_.slots()) end_orphan(slot);
    for (Slot slot = 0; slot < entries_.size(); ++slot) {
        if (entries_[slot].state == SlotState::kFree) continue;
        make_anonymous(slot);
        free_if_unused(slot);
    }
    if (mirror_) mirror_->clear();
    if (event_capacity_) {
        events_.clear();
        events_.push_back({TierEvent::Kind::kCleared, {}, {}});
    }
}

std::uint32_t Tier::resize(std::uint32_t slots) {
    std::lock_guard lock(mutex_);
    if (slots == 0 || slots > INT32_MAX)
        throw std::invalid_argument("a tier has between 1 and 2^31 - 1 slots");
    const auto old = static_cast<std::uint32_t>(entries_.size());
    std::uint32_t in_use = 0;
    for (Slot slot = slots; slot < old; ++slot)
        in_use +=
            (entries_[slot].state == SlotState::kWriting && !orphans_.is_idle(slot)) || entries_[slot].busy;
    if (in_use) return in_use;
    for (const Slot slot : orphans_.slots()) {
        if (slot < slots) continue;
        end_orphan(slot);
        free_if_unused(slot);
    }
    if (slots < old)
        evict_above(slots);
    else
        reserve_memory(slots);
    entries_.resize(slots);
    digests_.resize(slots);
    order_->resize(slots);
    tenants_.resize(slots);
    free_.resize(slots);
    if (slots > old) free_.add(old, slots - old);
    return 0;
}

// Allocates everything that growing needs, before anything changes.
void Tier::reserve_memory(std::uint32_t slots) {
    entries_.reserve(slots);
    digests_.reserve(slots);
    free_.reserve(slots);
    order_->resize(slots);
    tenants_.resize(slots);
    index_.rebuild(slots);
}

// Evicts the entries in slots to remove, none of them in use, and everything below them.
void Tier::evict_above(std::uint32_t slots) {
    const std::vector<Slot> idle = order_->first(order_->size());  // children before parents
    std::vector<bool> doomed(entries_.size(), false);
    for (auto slot = idle.rbegin(); slot != idle.rend(); ++slot) {
        const Slot parent = entries_[*slot].parent;
        doomed[*slot] = *slot >= slots || (parent != kRoot && doomed[parent]);
    }
    for (const Slot slot : idle) {
        if (!doomed[slot]) continue;
        order_remove(slot);
        evict(slot);
    }
    for (std::size_t slot = slots; slot < entries_.size(); ++slot)
        least_generation_ = std::max(least_generation_, entries_[slot].generation);
}

// Each block is visited once for all hints that keep it, since a client may give many for one path.
std::vector<HintTaken> Tier::hint(std::span<const Digest> hashes, std::span<const HintRange> hints) {
    std::lock_guard lock(mutex_);
    std::vector<HintTaken> taken(hints.size(), {HintAnswer::kNoBlock});
    if (!order_->tables()) {
        std::ranges::fill(taken, HintTaken{HintAnswer::kNotLearning});
        return taken;
    }
    std::size_t stop = 0;
    const Slot last = unjoined_ ? end_one_by_one(hashes, 0, stop) : end_by_halves(hashes, 0, stop);
    std::vector<Slot> run(stop);
    if (last == kNoSlot || !fill_ancestors(last, hashes, run)) return taken;
    const bool is_own = std::ranges::any_of(hints, &HintRange::own);
    const std::size_t own = is_own ? first_own(hashes, run) : 0;
    std::vector<std::uint8_t> has_hint(stop);
    std::size_t begin = stop, end = 0, left = stop;  // those with a hint are between `begin` and `end`
    make_room(path_, stop);
    order_->set_time(now_ms());
    for (std::size_t i = hints.size(); i-- > 0;) {
        const std::size_t first = hints[i].own ? std::max(hints[i].start, own) : hints[i].start;
        const std::size_t after = std::min(hints[i].stop, stop);
        if (first >= after) continue;
        std::span<const Slot> path(run.data() + first, after - first);
        if (first < end && after > begin) {
            path_.clear();
            for (std::size_t at = left ? first : after; at < after; ++at)
                if (!has_hint[at]) path_.push_back(run[at]);
            path = path_;
        }
        taken[i].answer = path.empty() ? HintAnswer::kReplaced : order_->hint(path, hints[i].hint);
        if (taken[i].answer != HintAnswer::kTaken) continue;
        taken[i] = {HintAnswer::kTaken, static_cast<std::uint32_t>(first),
                    static_cast<std::uint32_t>(path.size())};
        left -= path.size();
        begin = std::min(begin, first);
        end = std::max(end, after);
        std::fill_n(has_hint.begin() + static_cast<std::ptrdiff_t>(first), after - first, true);
    }
    return taken;
}

// Sets `run` to the entry `last` and those above it. Returns false unless they have the first and the last of
// these hashes, and so all of them if the hashes are one path.
bool Tier::fill_ancestors(Slot last, std::span<const Digest> hashes, std::span<Slot> run) const {
    for (std::size_t i = run.size(); i-- > 0;) {
        run[i] = last;
        if (i) last = entries_[last].parent;
        if (last == kRoot) return false;
        if (last >= kAhead) __builtin_prefetch(&entries_[last - kAhead]);
    }
    return digests_[run.front()] == hashes.front() && digests_[run.back()] == hashes[run.size() - 1];
}

// Returns the position of the first block of a run that nobody else has: no request runs on it, and no other
// path goes through it. The block after the run may be on its way.
std::size_t Tier::first_own(std::span<const Digest> hashes, std::span<const Slot> run) const {
    std::size_t first = run.size();
    std::uint32_t children = first < hashes.size() && index_.find(hashes[first]) != kNoSlot;
    for (; first > 0; --first, children = 1) {
        const Entry &entry = entries_[run[first - 1]];
        if (entry.pins || entry.children > children) break;
    }
    return first;
}

std::vector<HintFate> Tier::hint_fates(std::span<const Digest> hashes) const {
    std::lock_guard lock(mutex_);
    std::vector<HintFate> fates;
    for (const Digest &hash : hashes) fates.push_back(order_->fate(find_ready(hash), hash));
    return fates;
}

std::optional<ReuseTables> Tier::reuse() const {
    std::lock_guard lock(mutex_);
    const ReuseTables *const tables = order_->tables();
    return tables ? std::optional(*tables) : std::nullopt;
}

std::vector<std::uint8_t> Tier::save_reuse() const {
    std::lock_guard lock(mutex_);
    const ReuseTables *const tables = order_->tables();
    return tables ? tables->save() : std::vector<std::uint8_t>();
}

bool Tier::load_reuse(std::span<const std::uint8_t> saved) {
    std::lock_guard lock(mutex_);
    ReuseTables *const tables = order_->tables();
    return tables && tables->load(saved);
}

void Tier::mirror(PresenceTable table) {
    std::lock_guard lock(mutex_);
    table.clear();
    for (Slot slot = 0; slot < entries_.size(); ++slot)
        if (entries_[slot].findable && entries_[slot].state == SlotState::kReady)
            table.add(digests_[slot], {slot, entries_[slot].generation});
    mirror_ = table;
}

void Tier::record_events(std::size_t capacity) {
    std::lock_guard lock(mutex_);
    std::vector<TierEvent> events;
    events.reserve(std::max<std::size_t>(capacity, 2));
    events_ = std::move(events);
    event_capacity_ = capacity;
}

void Tier::tell(TierEvent::Kind kind, Slot slot) {
    if (mirror_ && kind == TierEvent::Kind::kStored)
        mirror_->add(digests_[slot], {slot, entries_[slot].generation});
    if (mirror_ && kind == TierEvent::Kind::kRemoved) mirror_->remove(digests_[slot]);
    if (!event_capacity_) return;
    if (events_.size() >= event_capacity_) {
        // A reader that is too late sees that events are missing, and starts again from a snapshot.
        events_.clear();
        events_.push_back({TierEvent::Kind::kLost, {}, {}});
    }
    events_.push_back({kind, digests_[slot], parent_of(entries_[slot])});
}

std::vector<TierEvent> Tier::take_events() {
    std::lock_guard lock(mutex_);
    std::vector<TierEvent> taken = events_;  // a copy, so that events_ keeps its capacity
    events_.clear();
    return taken;
}

std::vector<std::string> Tier::check_integrity() const {
    std::lock_guard lock(mutex_);
    std::vector<std::string> broken = free_.check_integrity();
    const auto expect = [&broken](bool holds, const std::string &what) {
        if (!holds) broken.push_back(what);
    };
    const std::size_t slots = entries_.size();
    std::vector<std::uint32_t> pins(slots), children(slots), used_children(slots), busy_children(slots),
        listed(slots);
    for (const auto &[id, lease] : leases_)
        for (const Slot slot : lease.slots) ++pins[slot];
    for (const FreeRuns::Run &run : free_.runs())
        for (Slot slot = run.first; slot < run.first + run.count; ++slot) ++listed[slot];

    std::uint32_t orphans = 0, free = 0, writing = 0, ready = 0, findable = 0, unused = 0, evictable = 0,
                  withheld = 0, quarantined = 0, above_copies = 0, unjoined = 0;
    std::uint64_t holds = 0;
    std::vector<std::uint32_t> of_tenant(tenants_.size());
    for (Slot slot = 0; slot < slots; ++slot) {
        const Entry &entry = entries_[slot];
        unjoined += entry.unjoined;
        const std::string name = "slot " + std::to_string(slot) + ": ";
        expect(!mirror_ || entry.state != SlotState::kReady || mirror_->holds(digests_[slot]),
               name + "ready but not in the mirror");
        free += entry.state == SlotState::kFree;
        writing += entry.state == SlotState::kWriting;
        ready += entry.state == SlotState::kReady;
        findable += entry.findable;
        holds += entry.holds;
        withheld += entry.withheld;
        quarantined += entry.quarantined;
        expect(entry.holds >= entry.kept(), name + "withheld or quarantined but not held");
        expect(entry.pins == pins[slot], name + "pins differ from what the leases hold");
        expect(listed[slot] == (entry.state == SlotState::kFree ? 1u : 0u),
               name + "free list disagrees with state");
        expect(entry.state != SlotState::kFree || (!entry.pins && !entry.holds), name + "freed while in use");
        expect(entry.state != SlotState::kReady || entry.findable, name + "ready but not in the table");
        expect(entry.state != SlotState::kWriting || !entry.findable || entry.holds,
               name + "pending but no copy is to complete it");
        if (!entry.findable) {
            expect(!order_->holds(slot), name + "evictable but not in the table");
            expect(entry.state == SlotState::kFree || entry.pins || entry.holds || entry.children ||
                       entry.orphan,
                   name + "neither free nor owned");
            expect(!entry.orphan || orphans_.find(digests_[slot]) == slot, name + "its orphan is unknown");
            expect(!entry.orphan || index_.find(digests_[slot]) == kNoSlot, name + "an orphan and an entry");
            orphans += entry.orphan;
            continue;
        }
        expect(index_.find(digests_[slot]) == slot, name + "its hash leads elsewhere");
        if (tenants_.on()) ++of_tenant[tenants_.of(slot)];
        if (entry.parent != kRoot) {
            const Entry &parent = entries_[entry.parent];
            ++children[entry.parent];
            used_children[entry.parent] += entry.used;
            busy_children[entry.parent] += entry.busy;
            expect(entry.state != SlotState::kReady || (parent.findable && parent.state == SlotState::kReady),
                   name + "ready below a parent that is not");
            expect(tenants_.of(slot) == tenants_.of(entry.parent), name + "another tenant's than its parent");
            expect(!entry.unjoined, name + "its parent is unknown and there");
        } else {
            expect(entry.depth == 0, name + "below the root but not at depth 0");
        }
    }
    for (Slot slot = 0; slot < slots; ++slot) {
        const Entry &entry = entries_[slot];
        if (entry.state == SlotState::kFree) continue;
        const std::string name = "slot " + std::to_string(slot) + ": ";
        expect(entry.children == children[slot], name + "child count is wrong");
        if (!entry.findable) continue;
        expect(entry.used_children == used_children[slot], name + "used child count is wrong");
        expect(entry.busy_children == busy_children[slot], name + "busy child count is wrong");
        const bool used = entry.pins || entry.used_children || entry.state != SlotState::kReady;
        const bool busy = used || entry.holds || entry.busy_children;
        expect(entry.used == used, name + "used flag is wrong");
        expect(entry.busy == busy, name + "busy flag is wrong");
        expect(order_->holds(slot) == !used, name + "eviction order disagrees with its use");
        unused += !used;
        evictable += !busy;
        above_copies += entry.is_above_copies();
    }
    std::vector<bool> seen(slots, false);
    const std::vector<Slot> order = order_->all();
    std::vector<Slot> idle;
    for (const Slot slot : order) {
        const Slot parent = entries_[slot].parent;
        expect(parent == kRoot || !seen[parent],
               "slot " + std::to_string(slot) + ": evicted after its parent");
        seen[slot] = true;
        if (!entries_[slot].busy) idle.push_back(slot);
    }
    expect(order.size() == unused, "eviction order has lost or gained entries");
    std::vector<Slot> first = order_->first(order_->size());
    if (learns_) {  // the tier below may have changed since the other listing
        std::sort(idle.begin(), idle.end());
        std::sort(first.begin(), first.end());
    }
    expect(order_->size() == evictable && first == idle,
           "eviction order has lost or gained entries that are not busy");
    for (Tenant tenant = 0; tenant < of_tenant.size(); ++tenant) {
        const std::string name = "tenant " + std::to_string(tenant) + ": ";
        expect(tenants_.entries(tenant) == of_tenant[tenant], name + "its entries are miscounted");
        std::vector<Slot> own, listed = tenants_.first(tenant);
        for (const Slot slot : idle)
            if (tenants_.of(slot) == tenant) own.push_back(slot);
        // A tenant at its limit evicts by last use, whatever the policy.
        if (learns_) std::sort(listed.begin(), listed.end());
        expect(listed == own, name + "its eviction order is wrong");
    }
    expect(free + writing + ready == slots, "slots are not conserved");
    expect(free == free_.size() && writing == writing_ && ready == ready_, "slot counters are wrong");
    expect(findable == index_.size(), "hash table and entries disagree");
    expect(!mirror_ || mirror_->size() == ready_, "mirror and entries disagree");
    expect(holds == holds_, "hold counter is wrong");
    expect(above_copies == above_copies_, "counter of entries above copies is wrong");
    expect(unjoined == unjoined_, "counter of unknown parents is wrong");
    expect(orphans == orphans_.size(), "orphans have been lost or gained");
    for (const Digest &parent : orphans_.parents())
        expect(find_ready(parent) == kNoSlot, "an orphan's parent is there");
    expect(withheld == withheld_ && quarantined == quarantined_,
           "counter of withheld or quarantined slots is wrong");
    expect(std::accumulate(pins.begin(), pins.end(), std::uint64_t{0}) == pins_, "pin counter is wrong");
    return broken;
}

}  // namespace fdcache
