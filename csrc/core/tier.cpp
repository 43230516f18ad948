#include "core/tier.hpp"

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

// Follows a change of pins, holds, state or busy children up the path, as far as it changes anything.
void Tier::refresh_busy(Slot slot) {
    while (slot != kRoot && entries_[slot].findable) {
        Entry &entry = entries_[slot];
        const bool busy =
            entry.pins || entry.holds || entry.busy_children || entry.state != SlotState::kReady;
        if (busy == entry.busy) return;
        entry.busy = busy;
        if (!busy)
            order_add(slot);
        else if (order_->holds(slot))
            order_remove(slot);
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
    free_.add(slot);
}

void Tier::free_if_unused(Slot slot) {
    const Entry &entry = entries_[slot];
    if (entry.state == SlotState::kWriting && !entry.findable && !entry.pins && !entry.holds &&
        !entry.children)
        free_slot(slot);
}

// Makes a WRITING slot findable below `parent`; the caller sets what keeps it busy before the refresh.
void Tier::link(Slot slot, const Digest &digest, Slot parent, Tenant tenant) {
    Entry &entry = entries_[slot];
    digests_[slot] = digest;
    index_.insert(slot);
    entry.findable = true;
    entry.busy = false;
    entry.parent = parent;
    entry.depth = parent == kRoot ? 0 : entries_[parent].depth + 1;
    if (parent != kRoot) ++entries_[parent].children;
    tenants_.join(slot, parent == kRoot ? tenant : tenants_.of(parent));
    refresh_busy(slot);
}

void Tier::make_ready(Slot slot) {
    Entry &entry = entries_[slot];
    entry.state = SlotState::kReady;
    entry.hits = 1;
    entry.touched_ms = entry.ready_ms = now_ms();
    --writing_;
    ++ready_;
    note(TierEvent::Kind::kStored, slot);
    refresh_busy(slot);
}

void Tier::order_add(Slot slot) {
    order_->add(slot);
    tenants_.add(slot);
}

void Tier::order_remove(Slot slot) {
    order_->remove(slot);
    tenants_.remove(slot);
}

// Takes an entry that is not busy out of the table; its slot is still READY and the caller frees it.
void Tier::forget(Slot slot) {
    Entry &entry = entries_[slot];
    note(TierEvent::Kind::kRemoved, slot);
    index_.erase(slot);
    order_remove(slot);
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
    forget(slot);
    free_slot(slot);
    ++evictions_;
}

std::uint32_t Tier::missing(std::size_t count, const SlotSet &kept) const {
    const std::size_t room = free_.size() + order_->size() - kept.size();
    return static_cast<std::uint32_t>(count > room ? count - room : 0);
}

// Evicts the coldest `count` entries but those kept, as far as there are as many; `victims` and `evicted`
// have room for them. With a block everything above it is kept, so what is passed over never leaves a child
// without its parent.
void Tier::evict_coldest(std::size_t count, const SlotSet &kept, std::vector<Slot> &victims,
                         BlockList &evicted) {
    victims.clear();
    // In three rounds, each fetching what the next one reads: a large tier costs cache misses, not steps.
    for (Slot slot = order_->coldest(); victims.size() < count && slot != kNoSlot;
         slot = order_->after(slot)) {
        if (kept.contains(slot)) continue;
        victims.push_back(slot);
        __builtin_prefetch(&entries_[slot], 1);
        __builtin_prefetch(&digests_[slot]);
    }
    for (const Slot slot : victims) {
        append(evicted, slot);
        index_.prefetch(digests_[slot]);
    }
    for (const Slot slot : victims) evict(slot);
}

// Takes `count` free slots, ascending, evicting what it must. While they would lie in short runs it evicts
// ahead of need, in growing batches, as far as the tier may have slots to spare: the more are free, the
// longer their runs.
std::vector<FreeRuns::Run> Tier::take_runs(std::uint32_t count, const SlotSet &kept, BlockList &evicted) {
    const std::size_t short_of = count > free_.size() ? count - free_.size() : 0;
    const std::size_t left = free_.size() + short_of - count;
    const auto spare = static_cast<std::size_t>(spare_ * static_cast<double>(entries_.size()));
    std::size_t ahead = std::min(spare > left ? spare - left : 0, kMostAhead);
    std::vector<FreeRuns::Run> runs;
    std::vector<Slot> victims;
    runs.reserve(count);
    victims.reserve(std::max(short_of, ahead));
    evicted.reserve(short_of + ahead);
    evict_coldest(short_of, kept, victims, evicted);
    free_.take(count, runs);
    for (std::size_t batch = kFirstBatch; ahead && runs.size() > count / kGoodRun + 1; batch *= 2) {
        evict_coldest(std::min(batch, ahead), kept, victims, evicted);
        if (victims.empty()) break;
        ahead -= victims.size();
        for (const FreeRuns::Run &run : runs) free_.add(run.first, run.count);
        runs.clear();
        free_.take(count, runs);
    }
    return runs;
}

// Blocks of one path go into the slots in order.
void Tier::take_slots(std::uint32_t count, const SlotSet &kept, Reservation &out) {
    out.slots.reserve(count);
    out.generations.reserve(count);
    for (const FreeRuns::Run &run : take_runs(count, kept, out.evicted))
        for (Slot slot = run.first; slot < run.first + run.count; ++slot) out.slots.push_back(slot);
    writing_ += count;
    for (const Slot slot : out.slots) {
        Entry &entry = entries_[slot];
        const std::uint32_t generation = entry.generation + 1;
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
    out.missing = missing(count, {});
    if (out.missing) return out;
    lease.make_room(count);
    take_slots(count, {}, out);
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
        if (entry.children || entry.holds)
            break;  // of a copy that is, or whose children are, still under way
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
