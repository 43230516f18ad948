#include "tier/tier.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "tier/session.hpp"

namespace fdcache {

Tier::Tier(std::uint32_t slots, std::string_view eviction, std::uint32_t extent, double spare)
    : order_(make_eviction_order(eviction)), learns_(order_->learns()), free_(extent), spare_(spare) {
    if (!(spare >= 0 && spare <= 0.5)) throw std::invalid_argument("the spare share is between 0 and 0.5");
    resize(slots);
}

// --- leases ------------------------------------------------------------------------------------------------

LeaseId Tier::open_lease() {
    return Session(*this).open_lease();
}

LeaseId Tier::add_lease() {
    make_room(spare_leases_, leases_.size() + 1);  // so that a release need not allocate
    if (spare_leases_.empty()) {
        leases_.emplace(next_lease_, Lease{epoch_, {}});
    } else {
        spare_leases_.back().key() = next_lease_;
        spare_leases_.back().mapped().epoch = epoch_;
        spare_leases_.back().mapped().is_loaded = false;
        leases_.insert(std::move(spare_leases_.back()));
        spare_leases_.pop_back();
    }
    return next_lease_++;
}

bool Tier::release(LeaseId lease) {
    return Session(*this).release(lease);
}

bool Tier::is_loaded(LeaseId lease) const {
    const auto found = leases_.find(lease);
    return found != leases_.end() && found->second.is_loaded;
}

bool Tier::finish(LeaseId lease, const RequestEnd *end) {
    return Session(*this).finish(lease, end);
}

bool Tier::end_use(LeaseId lease, const RequestEnd *end) {
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return false;
    if (!learns_) return end_lease(lease);
    path_of(found->second);
    order_->set_time(now_ms());
    order_->use(path_, end);
    return end_lease(lease);
}

// Sets `path_` to the entries that the lease pins, from the deepest one up.
void Tier::path_of(const Lease &lease) {
    path_.clear();
    make_room(path_, lease.slots.size());
    bool in_order = true;
    for (std::size_t i = 0; i < lease.slots.size(); ++i) {
        if (i + kAhead < lease.slots.size()) __builtin_prefetch(&entries_[lease.slots[i + kAhead]], 1);
        const Slot slot = lease.slots[i];
        const Entry &entry = entries_[slot];
        if (!entry.findable || entry.state != SlotState::kReady) continue;
        in_order = in_order && (path_.empty() || entry.parent == path_.back());
        path_.push_back(slot);
    }
    if (in_order) return std::reverse(path_.begin(), path_.end());
    const std::size_t count = path_.size();
    Slot slot = *std::max_element(path_.begin(), path_.end(),
                                  [this](Slot a, Slot b) { return entries_[a].depth < entries_[b].depth; });
    path_.clear();
    for (; path_.size() < count && slot != kRoot; slot = entries_[slot].parent) path_.push_back(slot);
}

bool Tier::end_lease(LeaseId lease) {
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return false;
    std::vector<Slot> &slots = found->second.slots;
    // From the end of the path, so that the deepest block is evicted first.
    for (std::size_t left = slots.size(); left > 0;) {
        left -= unpin_path({slots.data(), left});
        if (left) unpin(slots[--left]);
    }
    slots.clear();
    if (slots.capacity() > kMostKeptPins)
        leases_.erase(found);
    else
        spare_leases_.push_back(leases_.extract(found));
    return true;
}

Tier::Lease &Tier::lease_of(LeaseId lease) {
    const auto found = leases_.find(lease);
    if (found == leases_.end()) throw StaleLease("lease " + std::to_string(lease) + " was released");
    return found->second;
}

Tier::Lease &Tier::current_lease(LeaseId lease) {
    Lease &found = lease_of(lease);
    if (found.epoch != epoch_) throw StaleLease("lease " + std::to_string(lease) + " is from before a reset");
    return found;
}

void Tier::check_slot(Slot slot) const {
    if (slot >= entries_.size() || entries_[slot].state == SlotState::kFree)
        throw std::out_of_range("slot " + std::to_string(static_cast<std::int32_t>(slot)) + " is not in use");
}

void Tier::check_hashes(std::span<const Digest> hashes) {
    if (std::any_of(hashes.begin(), hashes.end(), [](const Digest &hash) { return hash.is_no_block(); }))
        throw std::invalid_argument(
            "a block hash is all zero or all ones, which stand for the root and for an unknown parent");
}

// One time for all that happens in one turn of the mutex, and never an earlier one than before.
std::uint64_t Tier::now_ms() const {
    if (timed_turn_ == mutex_.turn()) return now_ms_;
    timed_turn_ = mutex_.turn();
    using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::steady_clock;
    const auto now =
        clock_ms_
            ? *clock_ms_
            : static_cast<std::uint64_t>(duration_cast<milliseconds>(steady_clock::now() - start_).count());
    return now_ms_ = std::max(now_ms_, now);
}

void Tier::set_below(const HostIndex &below, bool is_always_copied) {
    std::lock_guard lock(mutex_);
    Demotion demotion{.is_always_copied = is_always_copied};
    demotion.blocks = [&below] { return below.blocks(); };
    demotion.below = [this, &below](std::span<const Slot> slots) {
        std::array<const Digest *, kMostAsked> digests;
        for (std::size_t i = 0; i < slots.size(); ++i) {
            digests[i] = &digests_[slots[i]];
            __builtin_prefetch(digests[i]);
        }
        return below.holds(std::span(digests).first(slots.size()));
    };
    order_->set_demotion(std::move(demotion));
}

void Tier::set_above() {
    std::lock_guard lock(mutex_);
    order_->set_above();
}

void Tier::set_clock(std::uint64_t milliseconds) {
    std::lock_guard lock(mutex_);
    clock_ms_ = milliseconds;
}

// --- the life of a slot ------------------------------------------------------------------------------------

Slot Tier::find_ready(const Digest &digest) const {
    const Slot slot = index_.find(digest);
    return slot != kNoSlot && entries_[slot].state == SlotState::kReady ? slot : kNoSlot;
}

Slot Tier::resolve_parent(const Digest &parent) const {
    return parent.is_no_block() ? kRoot : find_ready(parent);
}

// Propagates a change of pins, holds, state or children up the path, as far as it changes anything.
void Tier::refresh(Slot slot) {
    while (slot != kRoot && entries_[slot].findable) {
        Entry &entry = entries_[slot];
        const bool used = entry.pins || entry.used_children || entry.state != SlotState::kReady;
        const bool busy = used || entry.holds || entry.busy_children;
        const int more_used = used - entry.used, more_busy = busy - entry.busy;
        if (!more_used && !more_busy) return;
        above_copies_ -= entry.is_above_copies();
        entry.used = used;
        entry.busy = busy;
        above_copies_ += entry.is_above_copies();
        if (more_used < 0)
            order_add(slot, busy);
        else if (!used)
            order_set_busy(slot, busy);
        else if (more_used)
            order_remove(slot);
        if (entry.parent == kRoot) return;
        entries_[entry.parent].used_children += more_used;
        entries_[entry.parent].busy_children += more_busy;
        slot = entry.parent;
    }
}

// Removes `child`, in its state before make_anonymous, from the counts of `parent`.
void Tier::unlink_child(Slot parent, const Entry &child) {
    Entry &entry = entries_[parent];
    --entry.children;
    entry.used_children -= child.used;
    entry.busy_children -= child.busy;
}

// Resets an entry or pending slot that was removed from the table.
void Tier::make_anonymous(Slot slot) {
    Entry &entry = entries_[slot];
    above_copies_ -= entry.is_above_copies();
    set_unjoined(slot, false);
    entry.parent = kNoSlot;
    entry.children = entry.used_children = entry.busy_children = 0;
    entry.findable = entry.used = entry.busy = false;
    if (entry.state != SlotState::kReady) return;
    entry.owner = 0;  // others may read it: no lease may give it another hash
    entry.state = SlotState::kWriting;
    --ready_;
    ++writing_;
}

void Tier::pin(Lease &lease, Slot slot) {
    ++pins_;
    lease.slots.push_back(slot);
    if (entries_[slot].pins++ == 0) refresh(slot);
}

// Uses the READY blocks of a path, each the parent of the next one. `known`: the leading blocks without a
// hit.
void Tier::pin_path(Lease &lease, std::span<const Slot> path, std::size_t known) {
    const std::uint64_t now = now_ms();
    pins_ += path.size();
    lease.slots.insert(lease.slots.end(), path.begin(), path.end());
    // An entry that is not used is above others that are not: these leave the eviction order together.
    std::size_t used = path.size();
    std::uint32_t newly_used = 0, newly_busy = 0;  // children
    std::uint32_t above_copies = 0;
    for (std::size_t i = path.size(); i-- > 0;) {
        Entry &entry = entries_[path[i]];
        ++entry.pins;
        entry.hits += i >= known && entry.hits != UINT32_MAX;
        entry.touched_ms = now;
        if (entry.used) continue;
        used = i;
        entry.used_children += newly_used;
        entry.busy_children += newly_busy;
        newly_used = newly_busy = 1;
        if (entry.busy) {
            newly_busy = 0;
            above_copies += entry.is_above_copies();
        }
        entry.used = entry.busy = true;
    }
    above_copies_ -= above_copies;
    const std::span<const Slot> idle = path.subspan(used);
    if (idle.empty()) return;
    if (learns_) {
        order_->set_time(now);
        order_->begin(idle);
    }
    order_->remove_path(idle);
    tenants_.remove_path(idle);
    const Slot above = entries_[idle.front()].parent;
    if (above == kRoot) return;
    ++entries_[above].used_children;
    entries_[above].busy_children += newly_busy;
    refresh(above);
}

void Tier::unpin(Slot slot) {
    --pins_;
    if (--entries_[slot].pins) return;
    if (!entries_[slot].findable) return free_if_unused(slot);
    refresh(slot);
}

// Unpins the end of a lease's path, as far up as nothing else uses or holds its blocks, and returns how many
// that are: with them, nothing changes further up.
std::size_t Tier::unpin_path(std::span<const Slot> pinned) {
    std::size_t first = pinned.size();
    std::uint32_t below = 0;  // children of a block that were unpinned before it
    Slot above = kRoot;
    for (; first > 0; --first) {
        if (first > kAhead) __builtin_prefetch(&entries_[pinned[first - 1 - kAhead]], 1);
        Entry &entry = entries_[pinned[first - 1]];
        const bool is_next = first < 2 ? entry.parent == kRoot : entry.parent == pinned[first - 2];
        if (!is_next || entry.pins != 1 || entry.used_children != below || entry.busy_children != below ||
            entry.holds || entry.state != SlotState::kReady)
            break;
        entry.pins = entry.used_children = entry.busy_children = 0;
        entry.used = entry.busy = false;
        above = entry.parent;
        below = 1;
    }
    const std::span<const Slot> idle = pinned.subspan(first);
    if (idle.empty()) return 0;
    pins_ -= idle.size();
    order_->add_path(above == kRoot ? kNoSlot : above, idle);
    tenants_.add_path(idle);
    if (above != kRoot) {
        --entries_[above].used_children;
        --entries_[above].busy_children;
    }
    return idle.size();
}

void Tier::free_slot(Slot slot) {
    entries_[slot].state = SlotState::kFree;
    entries_[slot].parent = kNoSlot;
    --writing_;
    free_.add(slot);
}

void Tier::free_if_unused(Slot slot) {
    const Entry &entry = entries_[slot];
    if (entry.state == SlotState::kWriting && !entry.findable && !entry.pins && !entry.holds &&
        !entry.children) {
        if (entry.orphan)
            orphans_.set_idle(slot, true);
        else
            free_slot(slot);
    }
}

// Makes a WRITING slot findable below `parent`. The caller sets the pins or holds that protect it.
// `is_unjoined`: it is below the root because its parent is unknown.
void Tier::link(Slot slot, const Digest &digest, Slot parent, Tenant tenant, bool is_unjoined) {
    Entry &entry = entries_[slot];
    set_unjoined(slot, is_unjoined);
    digests_[slot] = digest;
    index_.insert(slot);
    entry.findable = entry.used = entry.busy = true;  // WRITING is a use
    entry.parent = parent;
    tenants_.join(slot, parent == kRoot ? tenant : tenants_.of(parent));
    if (parent == kRoot) {
        entry.depth = 0;
        return;
    }
    Entry &above = entries_[parent];
    entry.depth = above.depth + 1;
    ++above.children;
    ++above.used_children;
    ++above.busy_children;
    if (!above.used) refresh(parent);
}

void Tier::set_unjoined(Slot slot, bool is_unjoined) {
    Entry &entry = entries_[slot];
    unjoined_ += is_unjoined - entry.unjoined;
    entry.unjoined = is_unjoined;
}

// Takes what was told of the parent of an entry whose parent is unknown. Returns false if that is another
// tenant's, so that the entry stays a root. While it moves below its parent it counts as used, so that the
// blocks above it leave the eviction order and come back after it.
bool Tier::join(Slot slot, Slot parent) {
    if (parent == kRoot) {
        set_unjoined(slot, false);
        return true;
    }
    if (tenants_.of(slot) != tenants_.of(parent)) return false;
    for (Slot above = parent; above != kRoot; above = entries_[above].parent)
        if (above == slot) return false;  // hashes that are not one path
    ++pins_;
    if (entries_[slot].pins++ == 0) refresh(slot);
    Entry &entry = entries_[slot], &above = entries_[parent];
    set_unjoined(slot, false);
    entry.parent = parent;
    ++above.children;
    ++above.used_children;
    ++above.busy_children;
    refresh(parent);
    unpin(slot);
    return true;
}

// Does so if the entry of this hash has an unknown parent and the one that was told is there.
void Tier::join_to(Slot slot, const Digest &parent) {
    if (!entries_[slot].unjoined || entries_[slot].state != SlotState::kReady || parent.is_unknown()) return;
    if (const Slot above = resolve_parent(parent); above != kNoSlot) join(slot, above);
}

void Tier::join(std::span<const Digest> hashes, std::span<const Digest> parents) {
    std::lock_guard lock(mutex_);
    for (std::size_t i = 0; unjoined_ && i < hashes.size(); ++i)
        if (const Slot slot = index_.find(hashes[i]); slot != kNoSlot) join_to(slot, parents[i]);
}

void Tier::make_ready(Slot slot) {
    Entry &entry = entries_[slot];
    entry.state = SlotState::kReady;
    entry.hits = 1;
    entry.touched_ms = entry.ready_ms = now_ms();
    --writing_;
    ++ready_;
    publish_event(TierEvent::Kind::kStored, slot);
}

// Tells the eviction order of blocks of one path, each the parent of the next one, that became READY.
void Tier::arrive(std::span<const Slot> path, std::span<const Digest> hashes) {
    if (!learns_ || path.empty()) return;
    order_->set_time(now_ms());
    order_->arrive(path, hashes);
}

// The same for blocks that no request may have pinned: those that are not in use can be evicted from now on.
void Tier::arrive(std::span<const Slot> path) {
    std::vector<Digest> hashes;
    if (learns_) {
        hashes.reserve(path.size());
        for (const Slot slot : path) hashes.push_back(digests_[slot]);
    }
    arrive(path, hashes);
    for (const Slot slot : path)
        if (!entries_[slot].pins) refresh(slot);
}

void Tier::add_entry(Slot slot) {
    make_ready(slot);
    arrive({&slot, 1});
}

void Tier::order_add(Slot slot, bool busy) {
    const Slot parent = entries_[slot].parent;
    order_->add(slot, parent == kRoot ? kNoSlot : parent, busy);
    tenants_.add(slot, busy);
}

void Tier::order_remove(Slot slot) {
    order_->remove(slot);
    tenants_.remove(slot);
}

void Tier::order_set_busy(Slot slot, bool busy) {
    order_->set_busy(slot, busy);
    tenants_.set_busy(slot, busy);
}

// Removes an entry that left the eviction order from the table. The caller adds its slot to the free ones.
void Tier::remove_entry(Slot slot) {
    Entry &entry = entries_[slot];
    publish_event(TierEvent::Kind::kRemoved, slot);
    index_.erase(slot);
    tenants_.leave(slot);
    if (learns_) order_->leave(slot, digests_[slot], true);
    if (entry.parent != kRoot) --entries_[entry.parent].children;
    set_unjoined(slot, false);
    entry.parent = kNoSlot;
    entry.findable = false;
    entry.state = SlotState::kFree;
    --ready_;
    ++evictions_;
}

void Tier::append(BlockList &list, Slot slot) const {
    const Entry &entry = entries_[slot];
    list.slots.push_back(slot);
    list.generations.push_back(entry.generation);
    list.hashes.push_back(digests_[slot]);
    list.parents.push_back(parent_of(entry));
    list.hits.push_back(entry.hits);
}

}  // namespace fdcache
