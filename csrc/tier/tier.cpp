#include "tier/tier.hpp"

#include <algorithm>
#include <utility>

namespace fdcache {

Tier::Tier(std::uint32_t slots, std::string_view eviction, std::uint32_t extent, double spare)
    : order_(make_eviction_order(eviction)), free_(extent), spare_(spare) {
    if (!(spare >= 0 && spare <= 0.5)) throw std::invalid_argument("the spare share is between 0 and 0.5");
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
    // From the end of the path, so that the deepest block is evicted first.
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
        throw std::out_of_range("slot " + std::to_string(static_cast<std::int32_t>(slot)) + " is not in use");
}

void Tier::check_hashes(std::span<const Digest> hashes) {
    if (std::any_of(hashes.begin(), hashes.end(), [](const Digest &hash) { return hash.is_zero(); }))
        throw std::invalid_argument("a block hash is all zero, which stands for the root");
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

// Propagates a change of pins, holds, state or children up the path, as far as it changes anything.
void Tier::refresh(Slot slot) {
    while (slot != kRoot && entries_[slot].findable) {
        Entry &entry = entries_[slot];
        const bool used = entry.pins || entry.used_children || entry.state != SlotState::kReady;
        const bool busy = used || entry.holds || entry.busy_children;
        const int more_used = used - entry.used, more_busy = busy - entry.busy;
        if (!more_used && !more_busy) return;
        entry.used = used;
        entry.busy = busy;
        if (more_used < 0)
            order_add(slot, busy);
        else if (!used)
            order_set_busy(slot, busy);
        else if (more_used && order_->holds(slot))
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
    ++entries_[slot].pins;
    ++pins_;
    lease.slots.push_back(slot);
    refresh(slot);
}

void Tier::unpin(Slot slot) {
    --entries_[slot].pins;
    --pins_;
    refresh(slot);
    free_if_unused(slot);
}

void Tier::free_slot(Slot slot) {
    Entry &entry = entries_[slot];
    --(entry.state == SlotState::kReady ? ready_ : writing_);
    entry.state = SlotState::kFree;
    entry.parent = kNoSlot;
    free_.add(slot);
}

void Tier::free_if_unused(Slot slot) {
    const Entry &entry = entries_[slot];
    if (entry.state == SlotState::kWriting && !entry.findable && !entry.pins && !entry.holds &&
        !entry.children)
        free_slot(slot);
}

// Makes a WRITING slot findable below `parent`. The caller sets the pins or holds that protect it.
void Tier::link(Slot slot, const Digest &digest, Slot parent, Tenant tenant) {
    Entry &entry = entries_[slot];
    digests_[slot] = digest;
    index_.insert(slot);
    entry.findable = true;
    entry.used = entry.busy = false;
    entry.parent = parent;
    entry.depth = parent == kRoot ? 0 : entries_[parent].depth + 1;
    if (parent != kRoot) ++entries_[parent].children;
    tenants_.join(slot, parent == kRoot ? tenant : tenants_.of(parent));
    refresh(slot);
}

void Tier::make_ready(Slot slot) {
    Entry &entry = entries_[slot];
    entry.state = SlotState::kReady;
    entry.hits = 1;
    entry.touched_ms = entry.ready_ms = now_ms();
    --writing_;
    ++ready_;
    publish_event(TierEvent::Kind::kStored, slot);
    refresh(slot);
}

void Tier::order_add(Slot slot, bool busy) {
    order_->add(slot, busy);
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

// Removes an entry that left the eviction order from the table. Its slot is still READY; the caller frees it.
void Tier::remove_entry(Slot slot) {
    Entry &entry = entries_[slot];
    publish_event(TierEvent::Kind::kRemoved, slot);
    index_.erase(slot);
    tenants_.leave(slot);
    entry.findable = false;
    if (entry.parent != kRoot) --entries_[entry.parent].children;
}

void Tier::append(BlockList &list, Slot slot) const {
    const Entry &entry = entries_[slot];
    list.slots.push_back(slot);
    list.generations.push_back(entry.generation);
    list.hashes.push_back(digests_[slot]);
    list.parents.push_back(entry.parent == kRoot ? Digest{} : digests_[entry.parent]);
    list.hits.push_back(entry.hits);
}

void Tier::evict(Slot slot) {
    remove_entry(slot);
    free_slot(slot);
    ++evictions_;
}

std::uint32_t Tier::missing(std::size_t count) const {
    const std::size_t room = free_.size() + order_->size();
    return static_cast<std::uint32_t>(count > room ? count - room : 0);
}

// Evicts up to `count` of the coldest entries. `victims` and `evicted` have room for them.
void Tier::evict_coldest(std::size_t count, std::vector<Slot> &victims, BlockList &evicted) {
    victims.clear();
    order_->take(static_cast<std::uint32_t>(std::min<std::size_t>(count, order_->size())), victims);
    // In three rounds, each of which prefetches the data of the next: in a large tier, cache misses dominate.
    for (const Slot slot : victims) {
        tenants_.remove(slot);
        __builtin_prefetch(&entries_[slot], 1);
        __builtin_prefetch(&digests_[slot]);
    }
    for (const Slot slot : victims) {
        append(evicted, slot);
        index_.prefetch(digests_[slot]);
    }
    for (const Slot slot : victims) evict(slot);
}

// Takes `count` free slots, ascending, and evicts entries for them if it must. While the slots form short
// runs, evicts ahead of need, in growing batches, up to the spare share: with more free slots, runs are
// longer.
std::vector<FreeRuns::Run> Tier::take_runs(std::uint32_t count, BlockList &evicted) {
    const std::size_t short_of = count > free_.size() ? count - free_.size() : 0;
    const std::size_t left = free_.size() + short_of - count;
    const auto spare = static_cast<std::size_t>(spare_ * static_cast<double>(entries_.size()));
    std::size_t ahead = std::min(spare > left ? spare - left : 0, kMostAhead);
    std::vector<FreeRuns::Run> runs;
    std::vector<Slot> victims;
    runs.reserve(count);
    victims.reserve(std::max(short_of, ahead));
    evicted.reserve(short_of + ahead);
    evict_coldest(short_of, victims, evicted);
    free_.take(count, runs);
    for (std::size_t batch = kFirstBatch; ahead && runs.size() > count / kGoodRun + 1; batch *= 2) {
        evict_coldest(std::min(batch, ahead), victims, evicted);
        if (victims.empty()) break;
        ahead -= victims.size();
        for (const FreeRuns::Run &run : runs) free_.add(run.first, run.count);
        runs.clear();
        free_.take(count, runs);
    }
    return runs;
}

// Takes slots in the order in which the blocks of a path will use them.
void Tier::take_slots(std::uint32_t count, Reservation &out) {
    out.slots.reserve(count);
    out.generations.reserve(count);
    for (const FreeRuns::Run &run : take_runs(count, out.evicted))
        for (Slot slot = run.first; slot < run.first + run.count; ++slot) out.slots.push_back(slot);
    writing_ += count;
    for (const Slot slot : out.slots) {
        Entry &entry = entries_[slot];
        const std::uint32_t generation = std::max(entry.generation, least_generation_) + 1;
        entry = Entry{};
        entry.generation = generation;
        entry.state = SlotState::kWriting;
        out.generations.push_back(generation);
    }
}

// --- computing ---------------------------------------------------------------------------------------------

Reservation Tier::reserve(LeaseId lease_id, std::uint32_t count) {
    std::lock_guard lock(mutex_);
    Lease &lease = lease_of(lease_id);
    Reservation out;
    out.missing = missing(count);
    if (out.missing) return out;
    lease.make_room(count);
    take_slots(count, out);
    for (const Slot slot : out.slots) {
        entries_[slot].owner = lease_id;
        pin(lease, slot);
    }
    return out;
}

void Tier::check_computed(LeaseId lease, std::span<const Slot> slots) const {
    for (const Slot slot : slots) {
        check_slot(slot);
        const Entry &entry = entries_[slot];
        if (entry.state != SlotState::kWriting || entry.findable || entry.owner != lease)
            throw std::invalid_argument("slot " + std::to_string(slot) +
                                        " is not one that this lease reserved and has yet to commit");
    }
    std::vector<Slot> sorted(slots.begin(), slots.end());
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
        throw std::invalid_argument("a slot is committed twice in one call");
}

std::vector<CommitStatus> Tier::commit(LeaseId lease_id, const Digest &parent_hash,
                                       std::span<const Digest> hashes, std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    Lease &lease = current_lease(lease_id);
    check_computed(lease_id, slots);
    check_hashes(hashes);
    lease.make_room(hashes.size());
    std::vector<CommitStatus> status;
    status.reserve(hashes.size());
    Slot parent = resolve_parent(parent_hash);
    for (std::size_t i = 0; i < hashes.size() && parent != kNoSlot; ++i) {
        const Entry &entry = entries_[slots[i]];
        if (entry.children || entry.holds) break;  // a copy into it, or into its children, is in flight
        const Slot present = index_.find(hashes[i]);
        if (present == kNoSlot) {
            link(slots[i], hashes[i], parent);
            make_ready(slots[i]);
            parent = slots[i];
            status.push_back(CommitStatus::kStored);
        } else if (entries_[present].state == SlotState::kReady && entries_[present].parent == parent) {
            pin(lease, present);
            parent = present;
            status.push_back(CommitStatus::kDuplicate);
        } else {
            break;
        }
    }
    return status;
}

}  // namespace fdcache
