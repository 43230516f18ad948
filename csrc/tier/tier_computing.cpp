// Slots that a request computes: taken without a hash, and findable once they are committed.
#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "tier/session.hpp"
#include "tier/tier.hpp"

namespace fdcache {

Reservation Tier::reserve(LeaseId lease, std::uint32_t count) {
    Session session(*this);
    Reservation out;
    out.generations.reserve(std::min(count, session.available()));
    out.missing = session.reserve(lease, count, out.slots, &out.evicted);
    for (const Slot slot : out.slots) out.generations.push_back(session.generation(slot));
    return out;
}

std::uint32_t Tier::take_anonymous(LeaseId lease_id, std::uint32_t count, std::vector<Slot> &table,
                                   BlockList *evicted) {
    Lease &lease = lease_of(lease_id);
    if (const std::uint32_t short_of = missing(count)) return short_of;
    make_room(lease.slots, count);
    make_room(table, count);
    Entry fresh;
    fresh.state = SlotState::kWriting;
    fresh.owner = lease_id;
    fresh.pins = 1;
    take_slots(count, fresh, table, evicted);
    lease.slots.insert(lease.slots.end(), table.end() - count, table.end());
    pins_ += count;
    return 0;
}

void Tier::check_computed(LeaseId lease, std::span<const Slot> slots) const {
    for (const Slot slot : slots) {
        check_slot(slot);
        const Entry &entry = entries_[slot];
        if (entry.state != SlotState::kWriting || entry.findable || entry.owner != lease)
            throw std::invalid_argument("slot " + std::to_string(slot) +
                                        " is not one that this lease reserved and has yet to commit");
    }
    // Reserved slots come ascending, and are mostly committed so.
    if (std::adjacent_find(slots.begin(), slots.end(), std::greater_equal<>()) == slots.end()) return;
    std::vector<Slot> sorted(slots.begin(), slots.end());
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
        throw std::invalid_argument("a slot is committed twice in one call");
}

std::vector<CommitStatus> Tier::commit(LeaseId lease, const Digest &parent, std::span<const Digest> hashes,
                                       std::span<const Slot> slots) {
    std::vector<CommitStatus> status;
    Session(*this).commit(lease, parent, hashes, slots, &status);
    return status;
}

std::size_t Tier::make_entries(LeaseId lease_id, const Digest &parent_hash, std::span<const Digest> hashes,
                               std::span<const Slot> slots, std::vector<CommitStatus> *status) {
    Lease &lease = current_lease(lease_id);
    check_computed(lease_id, slots);
    check_hashes(hashes);
    make_room(lease.slots, hashes.size());
    if (status) make_room(*status, hashes.size());
    const auto prefetch = [&](std::size_t at) {
        index_.prefetch(hashes[at]);
        if (learns_) order_->prefetch(slots[at], hashes[at]);
        __builtin_prefetch(&digests_[slots[at]], 1);
    };
    for (std::size_t at = 0; at < std::min(kAhead, hashes.size()); ++at) prefetch(at);
    std::size_t i = 0, arrived = 0;  // those before it are known to the eviction order
    const auto arrive_before = [&](std::size_t end) {
        arrive(slots.subspan(arrived, end - arrived), hashes.subspan(arrived, end - arrived));
        arrived = end;
    };
    Slot parent = resolve_parent(parent_hash);
    for (; i < hashes.size() && parent != kNoSlot; ++i) {
        if (i + kAhead < hashes.size()) prefetch(i + kAhead);
        const Entry &entry = entries_[slots[i]];
        if (entry.children || entry.holds) break;  // a copy into it, or into its children, is in flight
        const Slot present = index_.find(hashes[i]);
        if (present == kNoSlot) {
            link(slots[i], hashes[i], parent);
            make_ready(slots[i]);  // pinned by the lease
            parent = slots[i];
            if (status) status->push_back(CommitStatus::kStored);
        } else if (entries_[present].state == SlotState::kReady && entries_[present].parent == parent) {
            arrive_before(i);
            arrived = i + 1;
            pin(lease, present);
            parent = present;
            if (status) status->push_back(CommitStatus::kDuplicate);
        } else {
            break;
        }
    }
    arrive_before(i);
    return i;
}

}  // namespace fdcache
