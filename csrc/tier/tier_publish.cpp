// Slots filled by other processes (publish), tenants, and the removal of subtrees (drop).
#include <algorithm>

#include "tier/positions.hpp"
#include "tier/tier.hpp"

namespace fdcache {

std::vector<PublishStatus> Tier::publish(LeaseId lease_id, std::span<const Digest> parents,
                                         std::span<const Digest> hashes, std::span<const Slot> slots,
                                         std::span<const std::uint8_t> copied,
                                         std::span<const std::uint64_t> checksums,
                                         std::span<const Tenant> tenants) {
    std::lock_guard lock(mutex_);
    Lease &lease = lease_of(lease_id);
    check_computed(lease_id, slots);
    check_hashes(hashes);
    check_tenants(tenants);
    const bool current = lease.epoch == epoch_;
    std::vector<PublishStatus> status(slots.size(), PublishStatus::kDropped);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        // Pending children of a failed copy belong to the block that was copied.
        if (!copied[i] || !current || entries_[slots[i]].children) continue;
        const Slot parent = resolve_parent(parents[i]);
        const Tenant tenant = parent < kRoot ? tenants_.of(parent) : tenants.empty() ? 0 : tenants[i];
        if (const Slot present = index_.find(hashes[i]); present != kNoSlot) {
            join_to(present, parents[i]);
            status[i] = PublishStatus::kDuplicate;
        } else if (parent == kNoSlot) {
            status[i] = PublishStatus::kNoParent;
        } else if (!make_tenant_room(tenant, parent)) {
            status[i] = PublishStatus::kOverLimit;
        } else {
            link(slots[i], hashes[i], parent, tenant, parents[i].is_unknown());
            entries_[slots[i]].checksum = checksums[i];
            add_entry(slots[i]);
            status[i] = PublishStatus::kStored;
        }
    }
    // Path by path, each from its end as in `release`, so that refresh walks up once per path and not per
    // block.
    for (std::size_t first = 0, last = 0; first < slots.size(); first = last) {
        for (++last; last < slots.size() && parents[last] == hashes[last - 1];) ++last;
        for (std::size_t i = last; i-- > first;) {
            if (entries_[slots[i]].state == SlotState::kWriting) entries_[slots[i]].owner = 0;
            unpin(slots[i]);
        }
    }
    const SlotSet gone(slots);
    std::erase_if(lease.slots, [&gone](Slot slot) { return gone.contains(slot); });
    return status;
}

void Tier::check_tenants(std::span<const Tenant> tenants) const {
    for (const Tenant tenant : tenants)
        if (!tenants_.known(tenant))
            throw std::invalid_argument("tenant " + std::to_string(tenant) + " has no limit yet");
}

void Tier::set_tenant_limit(Tenant tenant, std::uint32_t most) {
    std::lock_guard lock(mutex_);
    if (!tenants_.on()) {
        if (index_.size()) throw std::invalid_argument("tenants are turned on while the tier is empty");
        tenants_.turn_on(static_cast<std::uint32_t>(entries_.size()));
    }
    tenants_.set_limit(tenant, most);
}

std::vector<std::uint32_t> Tier::tenant_entries() const {
    std::lock_guard lock(mutex_);
    std::vector<std::uint32_t> entries(tenants_.size());
    for (Tenant tenant = 0; tenant < entries.size(); ++tenant) entries[tenant] = tenants_.entries(tenant);
    return entries;
}

// Evicts the coldest leaves of a tenant at its limit, except the ancestors of the new block. Returns false if
// there is no room for a block below `parent`.
bool Tier::make_tenant_room(Tenant tenant, Slot parent) {
    ScopedHolds kept(*this);
    if (tenants_.full(tenant, 1) && parent != kRoot) kept.add(parent);
    evict_of_tenant(tenant, 1);
    return !tenants_.full(tenant, 1);
}

// Evicts the coldest leaves of a tenant until `count` more blocks fit, or none is left that can be evicted.
void Tier::evict_of_tenant(Tenant tenant, std::uint32_t count, BlockList *evicted) {
    while (tenants_.full(tenant, count) && tenants_.idle(tenant)) {
        const Slot victim = tenants_.take(tenant);
        if (evicted) append(*evicted, victim);
        order_->remove(victim);
        evict(victim);
    }
}

std::vector<Slot> Tier::drop(std::span<const Digest> hashes) {
    std::lock_guard lock(mutex_);
    std::vector<Slot> doomed = subtrees_of(hashes);
    remove_subtrees(doomed);
    return doomed;
}

std::vector<Slot> Tier::free_among(std::span<const Slot> slots) const {
    std::lock_guard lock(mutex_);
    std::vector<Slot> free;
    for (const Slot slot : slots)
        if (slot < entries_.size() && entries_[slot].state == SlotState::kFree) free.push_back(slot);
    return free;
}

std::vector<Slot> Tier::below(std::span<const Digest> hashes) const {
    std::lock_guard lock(mutex_);
    return subtrees_of(hashes);
}

std::vector<Slot> Tier::subtrees_of(std::span<const Digest> hashes) const {
    std::vector<Slot> named;
    for (const Digest &hash : hashes)
        if (const Slot slot = index_.find(hash); slot != kNoSlot) named.push_back(slot);
    std::sort(named.begin(), named.end());
    named.erase(std::unique(named.begin(), named.end()), named.end());
    return subtree(named);
}

// The findable slots in `named` and everything below them, ascending. Walks all slots unless all are leaves.
std::vector<Slot> Tier::subtree(const std::vector<Slot> &named) const {
    if (std::none_of(named.begin(), named.end(), [this](Slot slot) { return entries_[slot].children; }))
        return named;
    enum class Fate : std::uint8_t { kUnknown, kStays, kGoes };
    std::vector<Fate> fates(entries_.size(), Fate::kUnknown);
    for (const Slot slot : named) fates[slot] = Fate::kGoes;
    std::vector<Slot> path, doomed;
    for (Slot slot = 0; slot < entries_.size(); ++slot) {
        if (!entries_[slot].findable) continue;
        path.clear();
        Slot above = slot;
        // The parent of a pending block may be one whose copy failed, which has no parent any more.
        for (; above != kRoot && entries_[above].findable && fates[above] == Fate::kUnknown;
             above = entries_[above].parent)
            path.push_back(above);
        const bool goes = above != kRoot && entries_[above].findable && fates[above] == Fate::kGoes;
        for (const Slot each : path) fates[each] = goes ? Fate::kGoes : Fate::kStays;
        if (fates[slot] == Fate::kGoes) doomed.push_back(slot);
    }
    return doomed;
}

// Removes whole subtrees from the table. Slots that are pinned or held stay, anonymous, until they are not.
void Tier::remove_subtrees(const std::vector<Slot> &doomed) {
    for (const Slot slot : doomed)
        if (entries_[slot].state == SlotState::kReady) publish_event(TierEvent::Kind::kRemoved, slot);
    for (const Slot slot : doomed) {
        Entry &entry = entries_[slot];
        index_.erase(slot);
        if (order_->holds(slot)) order_remove(slot);
        if (learns_ && entry.state == SlotState::kReady) order_->leave(slot, digests_[slot], false);
        tenants_.leave(slot);
        entry.findable = false;
        if (entry.parent < kRoot) unlink_child(entry.parent, entry);
    }
    for (const Slot slot : doomed) {
        const Slot parent = entries_[slot].parent;
        make_anonymous(slot);
        if (parent < kRoot) {
            refresh(parent);
            free_if_unused(parent);
        }
    }
    for (const Slot slot : doomed) free_if_unused(slot);
}

}  // namespace fdcache
