// Copies into and out of a tier, from plan to report.
#include "tier/positions.hpp"
#include "tier/session.hpp"
#include "tier/tier.hpp"

namespace fdcache {

CopyReservation Tier::reserve_copies(LeaseId lease, std::span<const Digest> parents,
                                     std::span<const Digest> hashes, bool below_pending, Tenant tenant) {
    CopyReservation out;
    std::lock_guard lock(mutex_);
    check_tenants({&tenant, tenants_.on() ? 1u : 0u});
    take_pending(lease, parents, hashes, out, below_pending, tenant);
    return out;
}

void Tier::take_pending(LeaseId lease_id, std::span<const Digest> parents, std::span<const Digest> hashes,
                        CopyReservation &out, bool below_pending, Tenant tenant) {
    Lease *lease = lease_id ? &current_lease(lease_id) : nullptr;
    check_hashes(hashes);
    out.clear();
    out.status.reserve(hashes.size());
    Positions wanted(hashes);
    std::uint32_t count = 0;
    ScopedHolds kept(*this);  // protects each entry and its ancestors
    kept.reserve(hashes.size());
    for (std::uint32_t i = 0; i < hashes.size(); ++i) {
        const Slot present = index_.find(hashes[i]);
        ReserveStatus status = ReserveStatus::kReserved;
        if (present != kNoSlot) {
            const bool ready = entries_[present].state == SlotState::kReady;
            status = ready ? ReserveStatus::kReady : ReserveStatus::kPending;
            if (ready) join_to(present, parents[i]);
            if (ready) kept.add(present);
        } else if (wanted.find(hashes[i]) != Positions::kNone || orphans_.find(hashes[i]) != kNoSlot) {
            status = ReserveStatus::kPending;
        } else if (wanted.find(parents[i]) == Positions::kNone) {
            const Slot parent = resolve_parent(parents[i]);
            if (parent == kNoSlot) {
                if (!below_pending || index_.find(parents[i]) == kNoSlot) status = ReserveStatus::kNoParent;
            } else if (parent != kRoot) {
                kept.add(parent);
                tenant = tenants_.of(parent);
            }
        }
        if (status == ReserveStatus::kReserved) {
            wanted[hashes[i]] = i;
            ++count;
        }
        out.status.push_back(status);
    }
    out.missing = std::max(missing(count), tenants_.beyond(tenant, count));
    if (out.missing) return;
    evict_of_tenant(tenant, count, &out.evicted);
    if (lease) make_room(lease->slots, count);
    out.slots.reserve(count);
    out.generations.reserve(count);
    Entry fresh;
    fresh.state = SlotState::kWriting;
    fresh.owner = lease_id;
    fresh.holds = 1;
    take_slots(count, fresh, out.slots, &out.evicted);
    holds_ += count;
    auto slot = out.slots.begin();
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        if (out.status[i] != ReserveStatus::kReserved) continue;
        link(*slot, hashes[i], parents[i].is_no_block() ? kRoot : index_.find(parents[i]), tenant,
             parents[i].is_unknown());
        if (lease) pin(*lease, *slot);
        out.generations.push_back(entries_[*slot].generation);
        ++slot;
    }
}

// Checks that each slot has as many holds of copies as `slots` names it. Only the end of the copy into a
// pending slot
// (`arriving`) may release its last hold, because nothing else completes it.
void Tier::check_held(std::span<const Slot> slots, bool arriving) {
    std::size_t held = 0;
    for (; held < slots.size(); ++held) {
        if (slots[held] >= entries_.size()) break;
        Entry &entry = entries_[slots[held]];
        const bool pending = entry.findable && entry.state == SlotState::kWriting;
        if (entry.holds <= entry.kept() + (pending && !arriving)) break;
        --entry.holds;
    }
    for (const Slot slot : slots.first(held)) ++entries_[slot].holds;
    if (held == slots.size()) return;
    check_slot(slots[held]);
    throw std::invalid_argument("no copy " + std::string(arriving ? "" : "out of it ") + "holds slot " +
                                std::to_string(slots[held]));
}

std::vector<std::uint8_t> Tier::complete(std::span<const Slot> slots, std::span<const std::uint8_t> copied,
                                         std::span<const std::uint64_t> checksums) {
    std::lock_guard lock(mutex_);
    check_held(slots, true);
    std::vector<std::uint8_t> ready(slots.size(), 0);
    std::size_t arrived = 0;  // those before it are known to the eviction order
    const auto arrive_before = [&](std::size_t end) {
        const std::span<const Slot> path = slots.subspan(arrived, end - arrived);
        arrive(path);
        for (std::size_t i = 0; i < path.size() && !orphans_.empty(); ++i) adopt_orphans(path[i]);
        arrived = end;
    };
    for (std::size_t i = 0; i < slots.size(); ++i) {
        end_hold(slots[i]);
        ready[i] = copied[i] && may_be_ready(slots[i]);
        if (i > arrived && !(ready[i] && entries_[slots[i]].parent == slots[i - 1])) arrive_before(i);
        if (ready[i]) {
            entries_[slots[i]].checksum = checksums.empty() ? 0 : checksums[i];
            make_ready(slots[i]);
        } else {
            drop_pending(slots[i]);
            arrived = i + 1;
        }
    }
    arrive_before(slots.size());
    return ready;
}

void Tier::end_hold(Slot slot) {
    Entry &entry = entries_[slot];
    above_copies_ -= entry.is_above_copies();
    --entry.holds;
    above_copies_ += entry.is_above_copies();
    --holds_;
    refresh(slot);
    free_if_unused(slot);
}

void Tier::begin_hold(Slot slot) {
    Entry &entry = entries_[slot];
    if (entry.orphan) orphans_.set_idle(slot, false);
    above_copies_ -= entry.is_above_copies();
    ++entry.holds;
    above_copies_ += entry.is_above_copies();
    ++holds_;
    refresh(slot);
}

// The slot is still pending (there was no reset), and its parent is READY.
bool Tier::may_be_ready(Slot slot) const {
    const Entry &entry = entries_[slot];
    if (!entry.findable || entry.state != SlotState::kWriting) return false;
    return entry.parent == kRoot ||
           (entries_[entry.parent].findable && entries_[entry.parent].state == SlotState::kReady);
}

// Removes a slot whose copy failed from the table, if it is pending. It stays WRITING while it is pinned,
// held, or the parent of pending children.
void Tier::drop_pending(Slot slot) {
    Entry &entry = entries_[slot];
    if (!entry.findable || entry.state != SlotState::kWriting) return;
    index_.erase(slot);
    tenants_.leave(slot);
    set_unjoined(slot, false);
    entry.findable = false;
    const Slot parent = entry.parent;
    entry.parent = kNoSlot;
    if (parent != kRoot) {
        unlink_child(parent, entry);
        refresh(parent);
        free_if_unused(parent);
    }
    entry.used = entry.busy = false;
    free_if_unused(slot);
}

void Tier::begin_load(LeaseId lease, std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    Lease &run = lease_of(lease);
    for (const Slot slot : slots) check_slot(slot);
    for (const Slot slot : slots) begin_hold(slot);
    run.is_loaded = true;
}

void Tier::end_load(const EndedLoad &ended) {
    std::vector<Slot> bad;
    for (std::size_t i = 0; i < ended.bad.size(); ++i)
        if (ended.bad[i]) bad.push_back(ended.slots[i]);
    if (!bad.empty()) discard(bad, false);
    unhold(ended.slots);
}

void Tier::hold(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    for (const Slot slot : slots) check_slot(slot);
    for (const Slot slot : slots) begin_hold(slot);
}

BlockList Tier::hold_ready(std::span<const Digest> hashes, std::size_t most) {
    std::lock_guard lock(mutex_);
    BlockList list;
    std::vector<Slot> slots;
    for (std::size_t i = 0; i < hashes.size() && slots.size() < most; ++i) {
        const Slot slot = find_ready(hashes[i]);
        if (slot == kNoSlot) continue;
        append(list, slot);
        slots.push_back(slot);
    }
    for (const Slot slot : slots) begin_hold(slot);
    return list;
}

void Tier::unhold(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    check_held(slots, false);
    for (const Slot slot : slots) end_hold(slot);
}

}  // namespace fdcache
