// What a tier needs whose slots are filled by other processes: publish, restore, drop.
#include <algorithm>
#include <unordered_set>

#include "core/tier.hpp"

namespace fdcache {

std::vector<PublishStatus> Tier::publish(LeaseId lease_id, std::span<const Digest> parents,
                                         std::span<const Digest> hashes, std::span<const Slot> slots,
                                         std::span<const std::uint8_t> copied,
                                         std::span<const std::uint64_t> checksums) {
    std::lock_guard lock(mutex_);
    Lease &lease = lease_of(lease_id);
    check_computed(lease_id, slots);
    check_hashes(hashes);
    const bool current = lease.epoch == epoch_;
    std::vector<PublishStatus> status(slots.size(), PublishStatus::kDropped);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        if (!copied[i] || !current) continue;
        const Slot parent = resolve_parent(parents[i]);
        if (index_.find(hashes[i]) != kNoSlot) {
            status[i] = PublishStatus::kDuplicate;
        } else if (parent == kNoSlot) {
            status[i] = PublishStatus::kNoParent;
        } else {
            link(slots[i], hashes[i], parent);
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

std::vector<std::uint8_t> Tier::restore(std::span<const FoundSlot> found, std::uint32_t generation) {
    std::lock_guard lock(mutex_);
    for (const FoundSlot &each : found) {
        if (each.slot >= entries_.size() || entries_[each.slot].state != SlotState::kFree)
            throw std::invalid_argument("slot " + std::to_string(static_cast<std::int32_t>(each.slot)) +
                                        " is not a free one");
        if (each.hash.is_zero())
            throw std::invalid_argument("a block hash is all zero, which stands for the root");
    }
    std::vector<std::uint8_t> taken(found.size(), 0);
    std::vector<Slot> slots;
    for (std::size_t i = 0; i < found.size(); ++i) {
        const FoundSlot &each = found[i];
        const Slot parent = resolve_parent(each.parent);
        Entry &entry = entries_[each.slot];
        if (parent == kNoSlot || index_.find(each.hash) != kNoSlot || entry.state != SlotState::kFree)
            continue;
        entry = Entry{};
        entry.generation = each.generation;
        entry.checksum = each.checksum;
        entry.state = SlotState::kWriting;
        entry.holds = 1;  // keeps the path above busy until all of it stands
        ++holds_;
        ++writing_;
        link(each.slot, each.hash, parent);
        make_ready(each.slot);
        slots.push_back(each.slot);
        taken[i] = 1;
    }
    std::erase_if(free_, [this](Slot slot) { return entries_[slot].state != SlotState::kFree; });
    for (const Slot slot : free_) entries_[slot].generation = std::max(entries_[slot].generation, generation);
    for (auto slot = slots.rbegin(); slot != slots.rend(); ++slot) end_hold(*slot);
    return taken;
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
        if (order_->holds(slot)) order_->remove(slot);
        Entry &entry = entries_[slot];
        const Slot parent = entry.parent;
        if (parent != kRoot && fates[parent] != Fate::kGoes) {
            --entries_[parent].children;
            if (entry.busy) --entries_[parent].busy_children;
        }
    }
    for (const Slot slot : doomed) {
        Entry &entry = entries_[slot];
        const Slot parent = entry.parent;
        entry.parent = kNoSlot;
        entry.children = entry.busy_children = 0;
        entry.findable = entry.busy = false;
        if (entry.state == SlotState::kReady) {
            entry.state = SlotState::kWriting;
            --ready_;
            ++writing_;
            ++entries;
        }
        if (parent != kRoot && fates[parent] != Fate::kGoes) {
            refresh_busy(parent);
            free_if_unused(parent);
        }
    }
    for (const Slot slot : doomed) free_if_unused(slot);
    return entries;
}

}  // namespace fdcache
