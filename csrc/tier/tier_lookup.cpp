// Look-ups in a tier: matches, listings, statistics.
#include <utility>

#include "tier/positions.hpp"
#include "tier/session.hpp"
#include "tier/tier.hpp"

namespace fdcache {

MatchRun Tier::match(LeaseId lease, std::span<const Digest> hashes, std::size_t start, std::size_t known) {
    Session session(*this);
    MatchRun run;
    run.generations.reserve(hashes.size());
    run.hits.reserve(hashes.size());
    run.pending = session.match(lease, hashes, start, known, run.slots);
    for (const Slot slot : run.slots) {
        run.generations.push_back(session.generation(slot));
        run.hits.push_back(session.hits(slot));
    }
    return run;
}

bool Tier::pin_run(LeaseId lease_id, std::span<const Digest> hashes, std::size_t start, std::size_t known,
                   std::vector<Slot> &table) {
    Lease &lease = current_lease(lease_id);
    const std::size_t first = table.size();
    std::size_t stop = 0;
    Slot last = end_by_halves(hashes, start, stop);
    const auto fill = [&] {
        const std::size_t count = stop - start;
        make_room(lease.slots, count);
        make_room(table, count);
        table.resize(first + count);
        return fill_run(last, hashes.subspan(start, count), std::span(table).subspan(first));
    };
    bool is_path = last == kNoSlot || fill();
    if (!is_path && unjoined_) {  // a run with an unknown parent may follow missing blocks
        last = end_one_by_one(hashes, start, stop);
        is_path = fill();
    }
    if (!is_path) {
        ++contradictions_;
        table.resize(first);
        return false;
    }
    if (last != kNoSlot) {
        const std::span<Slot> run = std::span(table).subspan(first);
        if (start) join_to(run.front(), hashes[start - 1]);
        pin_path(lease, run, known > start ? known - start : 0);
    }
    return stop < hashes.size() && presence_of(hashes[stop]) == Presence::kPending;
}

// Returns the last of the leading READY blocks from `start` on, kNoSlot if there is none, and sets `stop` to
// the position after it, where no READY block is. READY entries are closed under prefixes, so it is found by
// bisection; it may be a later one if runs with an unknown parent follow missing blocks.
Slot Tier::end_by_halves(std::span<const Digest> hashes, std::size_t start, std::size_t &stop) const {
    std::size_t high = hashes.size();
    Slot last = kNoSlot;
    for (stop = start; stop < high;) {
        const std::size_t middle = stop + (high - stop) / 2;
        ++lookups_;
        const Slot slot = find_ready(hashes[middle]);
        if (slot == kNoSlot) {
            high = middle;
        } else {
            last = slot;
            stop = middle + 1;
        }
    }
    return last;
}

// The same, whatever follows missing blocks.
Slot Tier::end_one_by_one(std::span<const Digest> hashes, std::size_t start, std::size_t &stop) const {
    Slot last = kNoSlot;
    for (stop = start; stop < hashes.size(); ++stop) {
        if (stop + kAhead < hashes.size()) index_.prefetch(hashes[stop + kAhead]);
        const Slot slot = find_ready(hashes[stop]);
        if (slot == kNoSlot) break;
        last = slot;
    }
    lookups_ += stop - std::min(start, stop);
    return last;
}

// Sets `run` to the path that ends at `last`, and joins runs with an unknown parent that are parts of it.
// Returns false unless its blocks have these hashes, whatever the hashes are.
bool Tier::fill_run(Slot last, std::span<const Digest> hashes, std::span<Slot> run) {
    const bool may_join = unjoined_ > 0;
    for (std::size_t i = run.size(); i-- > 0;) {
        run[i] = last;
        if (!(digests_[last] == hashes[i])) return false;
        if (i == 0) break;
        if (may_join && entries_[last].unjoined) {
            const Slot above = find_ready(hashes[i - 1]);
            if (above == kNoSlot || !join(last, above)) return false;
        }
        const Slot parent = entries_[last].parent;
        if (parent == kRoot) return false;
        if (last >= kAhead && parent == last - 1) {
            // A run of neighbours, as most paths have: the next entry need not wait for this one.
            prefetch_entry(last - kAhead);
            --last;
        } else {
            if (i >= 2 * kAhead) index_.prefetch(hashes[i - 2 * kAhead]);
            if (i >= kAhead) prefetch_entry(index_.guess(hashes[i - kAhead]));
            last = parent;
        }
    }
    return true;
}

Presence Tier::presence_of(const Digest &hash) const {
    const Slot slot = index_.find(hash);
    if (slot == kNoSlot) return Presence::kAbsent;
    return entries_[slot].state == SlotState::kReady ? Presence::kReady : Presence::kPending;
}

HostIndex::Found Tier::find_and_pin(std::span<const Digest> path, std::size_t start, StorageUse) {
    Found found;
    HostRun &run = found.run;
    Session session(*this);
    run.lease = session.open_lease();
    try {
        found.pending = session.match(run.lease, path, start, 0, run.slots);
    } catch (...) {
        session.release(run.lease);
        throw;
    }
    if (run.slots.empty()) {
        session.release(std::exchange(run.lease, 0));
        return found;
    }
    run.generations.reserve(run.slots.size());
    for (const Slot slot : run.slots) run.generations.push_back(session.generation(slot));
    return found;
}

std::vector<Presence> Tier::contains(std::span<const Digest> hashes) const {
    std::lock_guard lock(mutex_);
    std::vector<Presence> presence;
    presence.reserve(hashes.size());
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        if (i + kAhead < hashes.size()) index_.prefetch(hashes[i + kAhead]);
        presence.push_back(presence_of(hashes[i]));
    }
    lookups_ += hashes.size();
    return presence;
}

std::uint64_t Tier::holds(std::span<const Digest *const> digests) const {
    std::lock_guard lock(mutex_);
    return index_.holds(digests);
}

std::size_t Tier::blocks() const {
    std::lock_guard lock(mutex_);
    return ready_;
}

BlockList Tier::find(std::span<const Digest> hashes) const {
    std::lock_guard lock(mutex_);
    BlockList list;
    for (const Digest &hash : hashes)
        if (const Slot slot = find_ready(hash); slot != kNoSlot) append(list, slot);
    return list;
}

BlockList Tier::ancestry(std::span<const Slot> slots, std::uint32_t levels) const {
    std::lock_guard lock(mutex_);
    BlockList list;
    const SlotSet named(slots);
    SlotSet seen(slots.size());
    std::vector<Slot> path;
    for (Slot slot : slots) {
        check_slot(slot);
        path.clear();
        std::uint32_t above = 0;  // levels above the last named slot
        for (; slot != kRoot && entries_[slot].findable; slot = entries_[slot].parent) {
            above = named.contains(slot) ? 0 : above + 1;
            if (above > levels || !seen.insert(slot)) break;
            path.push_back(slot);
        }
        for (auto up = path.rbegin(); up != path.rend(); ++up) append(list, *up);
    }
    return list;
}

std::uint32_t Tier::available() const {
    std::lock_guard lock(mutex_);
    return free_or_evictable();
}

std::uint32_t Tier::above_copies() const {
    std::lock_guard lock(mutex_);
    return above_copies_;
}

BlockList Tier::entries_in(std::span<const Slot> slots) const {
    std::lock_guard lock(mutex_);
    BlockList list;
    list.make_room(slots.size());
    for (const Slot slot : slots)
        if (slot < entries_.size() && entries_[slot].findable && entries_[slot].state == SlotState::kReady)
            append(list, slot);
    return list;
}

BlockList Tier::above(const BlockList &blocks, std::span<const std::size_t> which,
                      std::uint32_t levels) const {
    std::vector<Digest> parents;
    parents.reserve(which.size());
    for (const std::size_t i : which) parents.push_back(blocks.parents[i]);
    return ancestry(find(parents).slots, levels);
}

std::uint32_t Tier::depth(Slot slot) const {
    std::lock_guard lock(mutex_);
    check_slot(slot);
    return entries_[slot].depth;
}

std::uint32_t Tier::num_slots() const {
    std::lock_guard lock(mutex_);
    return static_cast<std::uint32_t>(entries_.size());
}

BlockList Tier::coldest(std::uint32_t count) const {
    std::lock_guard lock(mutex_);
    BlockList list;
    if (learns_) order_->set_time(now_ms());
    for (const Slot slot : order_->first(count)) append(list, slot);
    return list;
}

BlockList Tier::hottest(std::uint32_t count) const {
    std::lock_guard lock(mutex_);
    std::vector<Slot> slots;
    slots.reserve(ready_);
    for (Slot slot = 0; slot < entries_.size(); ++slot)
        if (entries_[slot].findable && entries_[slot].state == SlotState::kReady) slots.push_back(slot);
    const auto most = slots.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(count, slots.size()));
    std::partial_sort(slots.begin(), most, slots.end(), [this](Slot a, Slot b) {
        const Entry &left = entries_[a], &right = entries_[b];
        return left.hits != right.hits ? left.hits > right.hits : left.depth < right.depth;
    });
    BlockList list;
    for (auto slot = slots.begin(); slot != most; ++slot) append(list, *slot);
    return list;
}

BlockList Tier::idle(std::uint64_t milliseconds, const Tenant *tenant) const {
    std::lock_guard lock(mutex_);
    BlockList list;
    const std::uint64_t now = now_ms();
    for (Slot slot = 0; slot < entries_.size(); ++slot) {
        const Entry &entry = entries_[slot];
        if (entry.findable && entry.state == SlotState::kReady && now - entry.touched_ms >= milliseconds &&
            (!tenant || tenants_.of(slot) == *tenant))
            append(list, slot);
    }
    return list;
}

BlockList Tier::starting_with(std::span<const std::uint8_t> prefix) const {
    std::lock_guard lock(mutex_);
    BlockList list;
    if (prefix.size() > sizeof(Digest)) return list;
    for (Slot slot = 0; slot < entries_.size(); ++slot)
        if (entries_[slot].findable && entries_[slot].state == SlotState::kReady &&
            std::equal(prefix.begin(), prefix.end(), digests_[slot].bytes.begin()))
            append(list, slot);
    return list;
}

TierStats Tier::stats() const {
    std::lock_guard lock(mutex_);
    TierStats stats{};
    stats.slots = static_cast<std::uint32_t>(entries_.size());
    stats.free = static_cast<std::uint32_t>(free_.size());
    stats.writing = writing_;
    stats.ready = ready_;
    stats.pending = index_.size() - ready_;
    stats.evictable = order_->size();
    stats.pins = pins_;
    stats.quarantined = quarantined_;
    stats.withheld = withheld_;
    stats.orphans = orphans_.size();
    stats.unjoined = unjoined_;
    stats.contradictions = contradictions_;
    stats.holds = holds_ - quarantined_ - withheld_;
    stats.leases = leases_.size();
    stats.epoch = epoch_;
    stats.evictions = evictions_;
    stats.lookups = lookups_;
    stats.memory_bytes = entries_.capacity() * sizeof(Entry) + digests_.capacity() * sizeof(Digest) +
                         index_.bytes() + order_->bytes() + tenants_.bytes() + free_.bytes();
    return stats;
}

NodeView Tier::node(Slot slot) const {
    std::lock_guard lock(mutex_);
    if (slot >= entries_.size()) throw std::out_of_range("slot " + std::to_string(slot) + " is out of range");
    const Entry &entry = entries_[slot];
    NodeView view{};
    view.slot = slot;
    view.parent = entry.findable && entry.parent != kRoot ? entry.parent : kNoSlot;
    view.tenant = tenants_.of(slot);
    view.generation = entry.generation;
    view.children = entry.children;
    view.pins = entry.pins;
    view.holds = entry.holds;
    view.hits = entry.hits;
    for (Slot above = entry.findable ? entry.parent : kRoot; above < kRoot; above = entries_[above].parent)
        ++view.depth;
    view.state = entry.state;
    view.findable = entry.findable;
    view.hash = entry.findable ? digests_[slot] : Digest{};
    view.checksum = entry.checksum;
    const std::uint64_t now = now_ms();
    view.idle_seconds = static_cast<double>(now - entry.touched_ms) / 1000;
    if (entry.state == SlotState::kReady)
        view.ready_seconds = static_cast<double>(now - entry.ready_ms) / 1000;
    return view;
}

}  // namespace fdcache
