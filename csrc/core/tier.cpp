#include "core/tier.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace fdcache {

namespace {

struct DigestHash {
    std::size_t operator()(const Digest &digest) const { return digest.word(0); }
};

}  // namespace

Tier::Tier(std::uint32_t slots) {
    resize(slots);
}

// --- leases ------------------------------------------------------------------------------------------------

LeaseId Tier::open_lease() {
    std::lock_guard lock(mutex_);
    const LeaseId id = next_lease_++;
    leases_.emplace(id, Lease{epoch_, {}});
    return id;
}

bool Tier::release(LeaseId lease) {
    std::lock_guard lock(mutex_);
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return false;
    const std::vector<Slot> slots = std::move(found->second.slots);
    leases_.erase(found);
    // The end of the path first: so the deepest block is the first to be evicted.
    for (auto slot = slots.rbegin(); slot != slots.rend(); ++slot) unpin(*slot);
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
        throw std::out_of_range("slot " + std::to_string(static_cast<std::int64_t>(slot)) + " is not in use");
}

std::uint32_t Tier::now_ms() const {
    using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::steady_clock;
    return static_cast<std::uint32_t>(duration_cast<milliseconds>(steady_clock::now() - start_).count());
}

// --- the life of a slot ------------------------------------------------------------------------------------

Slot Tier::find_ready(const Digest &digest) const {
    const Slot slot = index_.find(digest);
    return slot != kNoSlot && entries_[slot].state == SlotState::kReady ? slot : kNoSlot;
}

Slot Tier::resolve_parent(const Digest &parent) const {
    return parent.is_zero() ? kRoot : find_ready(parent);
}

// Follows a change of pins, holds, state or busy children up the path, as far as it changes anything.
void Tier::refresh_busy(Slot slot) {
    while (slot != kRoot && entries_[slot].findable) {
        Entry &entry = entries_[slot];
        const bool busy =
            entry.pins || entry.holds || entry.busy_children || entry.state != SlotState::kReady;
        if (busy == entry.busy) return;
        entry.busy = busy;
        if (!busy)
            order_->add(slot);
        else if (order_->holds(slot))
            order_->remove(slot);
        if (entry.parent == kRoot) return;
        entries_[entry.parent].busy_children += busy ? 1 : -1;
        slot = entry.parent;
    }
}

void Tier::pin(Lease &lease, Slot slot) {
    ++entries_[slot].pins;
    ++pins_;
    lease.slots.push_back(slot);
    refresh_busy(slot);
}

void Tier::unpin(Slot slot) {
    --entries_[slot].pins;
    --pins_;
    refresh_busy(slot);
    free_if_unused(slot);
}

void Tier::free_slot(Slot slot) {
    Entry &entry = entries_[slot];
    --(entry.state == SlotState::kReady ? ready_ : writing_);
    entry.state = SlotState::kFree;
    entry.parent = kNoSlot;
    free_.push_back(slot);
}

void Tier::free_if_unused(Slot slot) {
    const Entry &entry = entries_[slot];
    if (entry.state == SlotState::kWriting && !entry.findable && !entry.pins && !entry.holds &&
        !entry.children)
        free_slot(slot);
}

// Makes a WRITING slot findable below `parent`; the caller sets what keeps it busy before the refresh.
void Tier::link(Slot slot, const Digest &digest, Slot parent) {
    Entry &entry = entries_[slot];
    digests_[slot] = digest;
    index_.insert(slot);
    entry.findable = true;
    entry.busy = false;
    entry.parent = parent;
    entry.depth = parent == kRoot ? 0 : entries_[parent].depth + 1;
    if (parent != kRoot) ++entries_[parent].children;
    refresh_busy(slot);
}

void Tier::make_ready(Slot slot) {
    Entry &entry = entries_[slot];
    entry.state = SlotState::kReady;
    entry.hits = 1;
    entry.touched_ms = now_ms();
    --writing_;
    ++ready_;
    note(TierEvent::Kind::kStored, slot);
    refresh_busy(slot);
}

// Takes an entry that is not busy out of the table; its slot is still READY and the caller frees it.
void Tier::forget(Slot slot) {
    Entry &entry = entries_[slot];
    note(TierEvent::Kind::kRemoved, slot);
    index_.erase(slot);
    order_->remove(slot);
    entry.findable = false;
    if (entry.parent != kRoot) --entries_[entry.parent].children;
}

// A copy failed: nobody may find the slot any more. It stays WRITING for whoever still pins or holds it, and
// as long as pending children name it as their parent.
void Tier::drop_pending(Slot slot) {
    Entry &entry = entries_[slot];
    index_.erase(slot);
    entry.findable = false;
    const Slot parent = entry.parent;
    entry.parent = kNoSlot;
    if (parent != kRoot) {
        --entries_[parent].children;
        if (entry.busy) --entries_[parent].busy_children;
        refresh_busy(parent);
        free_if_unused(parent);
    }
    entry.busy = false;
    free_if_unused(slot);
}

void Tier::append(BlockList &list, Slot slot) const {
    const Entry &entry = entries_[slot];
    list.slots.push_back(slot);
    list.generations.push_back(entry.generation);
    list.hashes.push_back(digests_[slot]);
    list.parents.push_back(entry.parent == kRoot ? Digest{} : digests_[entry.parent]);
    list.hits.push_back(entry.hits);
}

void Tier::evict_coldest(BlockList &evicted) {
    const Slot slot = order_->coldest();
    append(evicted, slot);
    forget(slot);
    free_slot(slot);
    ++evictions_;
}

// Ascending, so that blocks of one path lie in runs where the free slots allow it.
void Tier::take_slots(std::uint32_t count, Reservation &out) {
    while (free_.size() < count) evict_coldest(out.evicted);
    out.slots.assign(free_.end() - count, free_.end());
    free_.resize(free_.size() - count);
    std::sort(out.slots.begin(), out.slots.end());
    writing_ += count;
    out.generations.reserve(count);
    for (const Slot slot : out.slots) {
        Entry &entry = entries_[slot];
        const std::uint32_t generation = entry.generation + 1;
        entry = Entry{};
        entry.generation = generation;
        entry.state = SlotState::kWriting;
        out.generations.push_back(generation);
    }
}

// --- look-up -----------------------------------------------------------------------------------------------

MatchRun Tier::match(LeaseId lease_id, std::span<const Digest> hashes, std::size_t start) {
    std::lock_guard lock(mutex_);
    Lease &lease = current_lease(lease_id);
    MatchRun run;
    // READY entries are closed under prefixes, so the end of the run is found by bisection.
    std::size_t low = start, high = hashes.size();
    Slot last = kNoSlot;
    while (low < high) {
        const std::size_t middle = low + (high - low) / 2;
        ++lookups_;
        const Slot slot = find_ready(hashes[middle]);
        if (slot == kNoSlot) {
            high = middle;
        } else {
            last = slot;
            low = middle + 1;
        }
    }
    if (low < hashes.size()) {
        const Slot next = index_.find(hashes[low]);
        run.pending = next != kNoSlot && entries_[next].state == SlotState::kWriting;
    }
    if (last == kNoSlot) return run;
    if (entries_[last].depth != low - 1) throw std::invalid_argument("hashes are not one path from the root");
    run.slots.resize(low - start);
    for (std::size_t i = run.slots.size(); i-- > 0; last = entries_[last].parent) run.slots[i] = last;
    const std::uint32_t now = now_ms();
    lease.slots.reserve(lease.slots.size() + run.slots.size());
    run.generations.reserve(run.slots.size());
    run.hits.reserve(run.slots.size());
    for (const Slot slot : run.slots) {
        Entry &entry = entries_[slot];
        entry.touched_ms = now;
        if (entry.hits != UINT32_MAX) ++entry.hits;
        run.generations.push_back(entry.generation);
        run.hits.push_back(entry.hits);
        pin(lease, slot);
    }
    return run;
}

std::vector<Presence> Tier::contains(std::span<const Digest> hashes) const {
    std::lock_guard lock(mutex_);
    std::vector<Presence> presence;
    presence.reserve(hashes.size());
    for (const Digest &hash : hashes) {
        const Slot slot = index_.find(hash);
        presence.push_back(slot == kNoSlot                             ? Presence::kAbsent
                           : entries_[slot].state == SlotState::kReady ? Presence::kReady
                                                                       : Presence::kPending);
    }
    lookups_ += hashes.size();
    return presence;
}

BlockList Tier::find(std::span<const Digest> hashes) const {
    std::lock_guard lock(mutex_);
    BlockList list;
    for (const Digest &hash : hashes)
        if (const Slot slot = find_ready(hash); slot != kNoSlot) append(list, slot);
    return list;
}

BlockList Tier::ancestry(std::span<const Slot> slots) const {
    std::lock_guard lock(mutex_);
    BlockList list;
    std::unordered_set<Slot> seen;
    std::vector<Slot> path;
    for (Slot slot : slots) {
        check_slot(slot);
        path.clear();
        for (; slot != kRoot && entries_[slot].findable && seen.insert(slot).second;
             slot = entries_[slot].parent)
            path.push_back(slot);
        for (auto up = path.rbegin(); up != path.rend(); ++up) append(list, *up);
    }
    return list;
}

BlockList Tier::coldest(std::uint32_t count) const {
    std::lock_guard lock(mutex_);
    BlockList list;
    for (Slot slot = order_->coldest(); slot != kNoSlot && list.slots.size() < count;
         slot = order_->after(slot))
        append(list, slot);
    return list;
}

// --- reserve, commit, copy ---------------------------------------------------------------------------------

std::uint32_t Tier::available() const {
    std::lock_guard lock(mutex_);
    return static_cast<std::uint32_t>(free_.size()) + order_->size();
}

Reservation Tier::reserve(LeaseId lease_id, std::uint32_t count) {
    std::lock_guard lock(mutex_);
    Lease &lease = lease_of(lease_id);
    Reservation out;
    const std::uint32_t room = static_cast<std::uint32_t>(free_.size()) + order_->size();
    if (count > room) {
        out.missing = count - room;
        return out;
    }
    take_slots(count, out);
    for (const Slot slot : out.slots) pin(lease, slot);
    return out;
}

CopyReservation Tier::reserve_copies(LeaseId lease_id, std::span<const Digest> parents,
                                     std::span<const Digest> hashes) {
    std::lock_guard lock(mutex_);
    Lease *lease = lease_id ? &current_lease(lease_id) : nullptr;
    CopyReservation out;
    out.status.reserve(hashes.size());
    std::unordered_set<Digest, DigestHash> wanted;
    std::vector<Slot> guarded;  // existing parents, kept from being evicted for their own children
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        const Slot present = index_.find(hashes[i]);
        ReserveStatus status = ReserveStatus::kReserved;
        if (present != kNoSlot) {
            status = entries_[present].state == SlotState::kReady ? ReserveStatus::kReady
                                                                  : ReserveStatus::kPending;
        } else if (wanted.contains(hashes[i])) {
            status = ReserveStatus::kPending;
        } else if (!wanted.contains(parents[i])) {
            const Slot parent = resolve_parent(parents[i]);
            if (parent == kNoSlot) {
                status = ReserveStatus::kNoParent;
            } else if (parent != kRoot) {
                ++entries_[parent].pins;
                refresh_busy(parent);
                guarded.push_back(parent);
            }
        }
        if (status == ReserveStatus::kReserved) wanted.insert(hashes[i]);
        out.status.push_back(status);
    }
    const auto count = static_cast<std::uint32_t>(wanted.size());
    const std::uint32_t room = static_cast<std::uint32_t>(free_.size()) + order_->size();
    if (count > room) {
        out.missing = count - room;
    } else {
        take_slots(count, out);
        std::size_t next = 0;
        for (std::size_t i = 0; i < hashes.size(); ++i) {
            if (out.status[i] != ReserveStatus::kReserved) continue;
            const Slot slot = out.slots[next++];
            entries_[slot].holds = 1;
            ++holds_;
            link(slot, hashes[i], parents[i].is_zero() ? kRoot : index_.find(parents[i]));
            if (lease) pin(*lease, slot);
        }
    }
    for (const Slot slot : guarded) {
        --entries_[slot].pins;
        refresh_busy(slot);
    }
    return out;
}

std::vector<CommitStatus> Tier::commit(LeaseId lease_id, const Digest &parent_hash,
                                       std::span<const Digest> hashes, std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    Lease &lease = current_lease(lease_id);
    std::vector<CommitStatus> status;
    Slot parent = resolve_parent(parent_hash);
    for (std::size_t i = 0; i < hashes.size() && parent != kNoSlot; ++i) {
        check_slot(slots[i]);
        Entry &entry = entries_[slots[i]];
        if (entry.state != SlotState::kWriting || entry.findable || entry.pins == 0)
            throw std::invalid_argument("slot " + std::to_string(slots[i]) +
                                        " is not one reserved for computing");
        if (entry.children) break;  // pending children of a failed copy still name this slot
        const Slot present = index_.find(hashes[i]);
        if (present == kNoSlot) {
            link(slots[i], hashes[i], parent);
            make_ready(slots[i]);
            parent = slots[i];
            status.push_back(CommitStatus::kStored);
        } else if (entries_[present].state == SlotState::kReady) {
            pin(lease, present);
            parent = present;
            status.push_back(CommitStatus::kDuplicate);
        } else {
            break;
        }
    }
    return status;
}

std::vector<std::uint8_t> Tier::complete(std::span<const Slot> slots, std::span<const std::uint8_t> copied,
                                         std::span<const std::uint64_t> checksums) {
    std::lock_guard lock(mutex_);
    for (const Slot slot : slots) {
        check_slot(slot);
        if (!entries_[slot].holds) throw std::invalid_argument("no copy holds slot " + std::to_string(slot));
    }
    std::vector<std::uint8_t> ready(slots.size(), 0);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const Slot slot = slots[i];
        Entry &entry = entries_[slot];
        --entry.holds;
        --holds_;
        if (!entry.findable || entry.state != SlotState::kWriting) {
            refresh_busy(slot);
            free_if_unused(slot);
            continue;
        }
        const bool parent_ready =
            entry.parent == kRoot ||
            (entries_[entry.parent].findable && entries_[entry.parent].state == SlotState::kReady);
        if (copied[i] && parent_ready) {
            if (!checksums.empty()) entry.checksum = checksums[i];
            make_ready(slot);
            ready[i] = 1;
        } else {
            drop_pending(slot);
        }
    }
    return ready;
}

void Tier::hold(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    for (const Slot slot : slots) check_slot(slot);
    for (const Slot slot : slots) {
        ++entries_[slot].holds;
        ++holds_;
        refresh_busy(slot);
    }
}

void Tier::unhold(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    for (const Slot slot : slots) {
        check_slot(slot);
        if (!entries_[slot].holds) throw std::invalid_argument("no copy holds slot " + std::to_string(slot));
    }
    for (const Slot slot : slots) {
        --entries_[slot].holds;
        --holds_;
        refresh_busy(slot);
        free_if_unused(slot);
    }
}

// --- the whole tier ----------------------------------------------------------------------------------------

void Tier::reset() {
    std::lock_guard lock(mutex_);
    index_.clear();
    order_->clear();
    ++epoch_;
    for (Slot slot = 0; slot < entries_.size(); ++slot) {
        Entry &entry = entries_[slot];
        if (entry.state == SlotState::kFree) continue;
        entry.parent = kNoSlot;
        entry.children = entry.busy_children = 0;
        entry.findable = entry.busy = false;
        if (entry.state == SlotState::kReady) {
            entry.state = SlotState::kWriting;
            --ready_;
            ++writing_;
        }
        free_if_unused(slot);
    }
    if (event_capacity_) {
        events_.clear();
        events_.push_back({TierEvent::Kind::kCleared, {}, {}});
    }
}

std::uint32_t Tier::resize(std::uint32_t slots) {
    std::lock_guard lock(mutex_);
    if (slots == 0 || slots >= kRoot / 2)
        throw std::invalid_argument("a tier has between 1 and 2^31 - 1 slots");
    const auto old = static_cast<std::uint32_t>(entries_.size());
    std::uint32_t in_use = 0;
    for (Slot slot = slots; slot < old; ++slot)
        in_use += entries_[slot].state == SlotState::kWriting || entries_[slot].busy;
    if (in_use) return in_use;
    if (slots < old) {
        std::vector<Slot> idle;  // children before parents
        for (Slot slot = order_->coldest(); slot != kNoSlot; slot = order_->after(slot)) idle.push_back(slot);
        std::vector<bool> doomed(old, false);
        for (auto slot = idle.rbegin(); slot != idle.rend(); ++slot) {
            const Slot parent = entries_[*slot].parent;
            doomed[*slot] = *slot >= slots || (parent != kRoot && doomed[parent]);
        }
        for (const Slot slot : idle) {
            if (!doomed[slot]) continue;
            forget(slot);
            free_slot(slot);
            ++evictions_;
        }
        std::erase_if(free_, [slots](Slot slot) { return slot >= slots; });
    }
    entries_.resize(slots);
    digests_.resize(slots);
    order_->resize(slots);
    index_.rebuild(slots);
    std::vector<Slot> added;
    for (Slot slot = slots; slot-- > old;) added.push_back(slot);
    free_.insert(free_.begin(), added.begin(), added.end());
    return 0;
}

void Tier::record_events(std::size_t capacity) {
    std::lock_guard lock(mutex_);
    event_capacity_ = capacity;
    events_.clear();
}

void Tier::note(TierEvent::Kind kind, Slot slot) {
    if (!event_capacity_) return;
    if (events_.size() >= event_capacity_) {
        // Whoever reads too late learns that events are missing and has to start over from a snapshot.
        events_.clear();
        events_.push_back({TierEvent::Kind::kLost, {}, {}});
    }
    const Slot parent = entries_[slot].parent;
    events_.push_back({kind, digests_[slot], parent == kRoot ? Digest{} : digests_[parent]});
}

std::vector<TierEvent> Tier::take_events() {
    std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
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
    stats.holds = holds_;
    stats.leases = leases_.size();
    stats.epoch = epoch_;
    stats.evictions = evictions_;
    stats.lookups = lookups_;
    stats.memory_bytes = entries_.capacity() * sizeof(Entry) + digests_.capacity() * sizeof(Digest) +
                         index_.bytes() + order_->bytes() + free_.capacity() * sizeof(Slot);
    return stats;
}

NodeView Tier::node(Slot slot) const {
    std::lock_guard lock(mutex_);
    if (slot >= entries_.size()) throw std::out_of_range("slot " + std::to_string(slot) + " is out of range");
    const Entry &entry = entries_[slot];
    NodeView view{};
    view.slot = slot;
    view.parent = entry.findable && entry.parent != kRoot ? entry.parent : kNoSlot;
    view.generation = entry.generation;
    view.children = entry.children;
    view.pins = entry.pins;
    view.holds = entry.holds;
    view.hits = entry.hits;
    view.depth = entry.depth;
    view.state = entry.state;
    view.findable = entry.findable;
    view.hash = entry.findable ? digests_[slot] : Digest{};
    view.checksum = entry.checksum;
    view.idle_seconds = (now_ms() - entry.touched_ms) / 1000.0;
    return view;
}

}  // namespace fdcache
