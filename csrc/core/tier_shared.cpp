// What a tier needs whose slots are filled by other processes: publish, drop.
#include <algorithm>
#include <unordered_set>

#include "core/tier.hpp"

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
        if (!copied[i] || !current) continue;
        const Slot parent = resolve_parent(parents[i]);
        const Tenant tenant = parent < kRoot ? tenants_.of(parent) : tenants.empty() ? 0 : tenants[i];
        if (index_.find(hashes[i]) != kNoSlot) {
            status[i] = PublishStatus::kDuplicate;
        } else if (parent == kNoSlot) {
            status[i] = PublishStatus::kNoParent;
        } else if (!make_tenant_room(tenant, parent)) {
            status[i] = PublishStatus::kOverLimit;
        } else {
            link(slots[i], hashes[i], parent, tenant);
            entries_[slots[i]].checksum = checksums[i];
            make_ready(slots[i]);
            status[i] = PublishStatus::kStored;
        }
    }
    // The end of each path first, as in a release: so a path is walked up once and not once a block.
    for (auto slot = slots.rbegin(); slot != slots.rend(); ++slot) unpin(*slot);
    const std::unordered_set<Slot> gone(slots.begin(), slots.end());
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

// Evicts the coldest leaves of a tenant that has all it may have, but never what the new block hangs below:
// whether there is room for one more below `parent`.
bool Tier::make_tenant_room(Tenant tenant, Slot parent) {
    Kept kept(*this);
    if (tenants_.full(tenant) && parent != kRoot) kept.add(parent);
    while (tenants_.full(tenant)) {
        if (!tenants_.idle(tenant)) return false;
        const Slot victim = tenants_.take(tenant);
        order_->remove(victim);
        evict(victim);
    }
    return true;
}

std::uint32_t Tier::drop(std::span<const Digest> hashes) {
    std::lock_guard lock(mutex_);
    enum class Fate : std::uint8_t { kUnknown, kStays, kGoes };
    std::vector<Fate> fates(entries_.size(), Fate::kUnknown);
    bool any = false;
    for (const Digest &hash : hashes) {
        const Slot slot = index_.find(hash);
        if (slot == kNoSlot) continue;
        fates[slot] = Fate::kGoes;
        any = true;
    }
    if (!any) return 0;
    std::vector<Slot> path, doomed;
    for (Slot slot = 0; slot < entries_.size(); ++slot) {
        if (!entries_[slot].findable) continue;
        path.clear();
        Slot above = slot;
        for (; above != kRoot && entries_[above].findable && fates[above] == Fate::kUnknown;
             above = entries_[above].parent)
            path.push_back(above);
        const bool goes = above != kRoot && entries_[above].findable && fates[above] == Fate::kGoes;
        for (const Slot each : path) fates[each] = goes ? Fate::kGoes : Fate::kStays;
        if (fates[slot] == Fate::kGoes) doomed.push_back(slot);
    }
    std::uint32_t entries = 0;
    for (const Slot slot : doomed)
        if (entries_[slot].state == SlotState::kReady) note(TierEvent::Kind::kRemoved, slot);
    for (const Slot slot : doomed) {
        index_.erase(slot);
        if (order_->holds(slot)) order_remove(slot);
        tenants_.leave(slot);
        Entry &entry = entries_[slot];
        const Slot parent = entry.parent;
        if (parent != kRoot && fates[parent] != Fate::kGoes) unlink_child(parent, entry);
    }
    for (const Slot slot : doomed) {
        const Slot parent = entries_[slot].parent;
        entries += entries_[slot].state == SlotState::kReady;
        cut_off(slot);
        if (parent != kRoot && fates[parent] != Fate::kGoes) {
            refresh(parent);
            free_if_unused(parent);
        }
    }
    for (const Slot slot : doomed) free_if_unused(slot);
    return entries;
}

}  // namespace fdcache
