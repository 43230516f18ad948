#include "native/tier_model.hpp"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include "native/checks.hpp"

namespace fdcache::tests {

// --- what can be read off the state

const std::vector<LeaseId> TierModel::leases() const {
    std::vector<LeaseId> open;
    for (const auto &[id, lease] : leases_) open.push_back(id);
    return open;
}

Slot TierModel::find(const Digest &hash) const {
    for (const auto &[slot, block] : used_)
        if (block.findable() && block.hash == hash) return slot;
    return kNoSlot;
}

Slot TierModel::find_ready(const Digest &hash) const {
    const Slot slot = find(hash);
    return slot != kNoSlot && used_.at(slot).ready ? slot : kNoSlot;
}

Presence TierModel::presence(const Digest &hash) const {
    if (find(hash) == kNoSlot) return Presence::kAbsent;
    return find_ready(hash) == kNoSlot ? Presence::kPending : Presence::kReady;
}

std::uint32_t TierModel::pins(Slot slot) const {
    std::size_t count = 0;
    for (const auto &[id, lease] : leases_) count += std::ranges::count(lease.pins, slot);
    return static_cast<std::uint32_t>(count);
}

std::uint32_t TierModel::children(Slot slot) const {
    return static_cast<std::uint32_t>(std::ranges::count_if(
        used_, [slot](const auto &each) { return each.second.findable() && each.second.parent == slot; }));
}

std::uint32_t TierModel::entries(Tenant tenant) const {
    return static_cast<std::uint32_t>(std::ranges::count_if(used_, [tenant](const auto &each) {
        return each.second.findable() && each.second.tenant == tenant;
    }));
}

std::vector<Slot> TierModel::path(Slot slot) const {
    std::vector<Slot> up;
    for (; slot != kRoot && used_.at(slot).findable(); slot = used_.at(slot).parent) up.push_back(slot);
    return {up.rbegin(), up.rend()};
}

std::set<Slot> TierModel::used_entries() const {
    std::set<Slot> pinned;
    for (const auto &[id, lease] : leases_) pinned.insert(lease.pins.begin(), lease.pins.end());
    std::set<Slot> used;
    for (const auto &[slot, block] : used_) {
        if (!block.findable() || (block.ready && !block.guards && !pinned.contains(slot))) continue;
        for (const Slot above : path(slot)) used.insert(above);
    }
    return used;
}

std::vector<Slot> TierModel::eviction_order(const std::set<Slot> &kept) const {
    std::set<Slot> busy = used_entries();
    for (const auto &[slot, block] : used_) {
        if (!block.holds() && !kept.contains(slot)) continue;
        for (const Slot above : path(slot)) busy.insert(above);
    }
    std::vector<Slot> order;
    for (const auto &[slot, block] : used_)
        if (block.findable() && !busy.contains(slot)) order.push_back(slot);
    std::ranges::sort(order, {}, [this](Slot slot) { return used_.at(slot).idle_since; });
    return order;
}

std::vector<Slot> TierModel::ancestry(std::span<const Slot> slots, std::uint32_t levels) const {
    std::vector<Slot> listed;
    for (const Slot slot : slots) {
        if (!used_.contains(slot)) throw Refused();
        std::vector<Slot> up = path(slot), taken;
        std::uint32_t above = 0;
        for (auto each = up.rbegin(); each != up.rend(); ++each) {
            above = std::ranges::count(slots, *each) ? 0 : above + 1;
            if (above > levels || std::ranges::count(listed, *each)) break;
            taken.push_back(*each);
        }
        listed.insert(listed.end(), taken.rbegin(), taken.rend());
    }
    return listed;
}

std::uint32_t TierModel::above_copies() const {
    const std::set<Slot> used = used_entries();
    const std::vector<Slot> order = eviction_order();
    return static_cast<std::uint32_t>(std::ranges::count_if(used_, [&](const auto &each) {
        const auto &[slot, block] = each;
        return block.findable() && !block.holds() && !used.contains(slot) && !std::ranges::count(order, slot);
    }));
}

// --- what changes end with

// Lets the entries of a path that are no longer used join the eviction order: each after all its children.
void TierModel::settle_path(Slot slot) {
    const std::set<Slot> used = used_entries();
    const std::vector<Slot> up = path(slot);
    for (auto each = up.rbegin(); each != up.rend() && !used.contains(*each); ++each) {
        const bool waits = std::ranges::any_of(used_, [&](const auto &other) {
            return other.second.findable() && other.second.parent == *each && !other.second.idle_since;
        });
        if (waits) return;
        if (Block &block = used_.at(*each); !block.idle_since) block.idle_since = ++ticks_;
    }
}

// Frees anonymous slots that nothing uses, and gives the entries that are no longer used their place in the
// order.
void TierModel::settle() {
    std::erase_if(used_, [this](const auto &each) {
        const auto &[slot, block] = each;
        return !block.findable() && !block.holds() && !block.guards && !pins(slot) && !children(slot);
    });
    const std::set<Slot> used = used_entries();
    std::vector<std::pair<std::size_t, Slot>> fresh;
    for (auto &[slot, block] : used_) {
        if (!block.findable() || used.contains(slot))
            block.idle_since = 0;
        else if (!block.idle_since)
            fresh.emplace_back(path(slot).size(), slot);
    }
    std::ranges::sort(fresh, std::greater<>(), &std::pair<std::size_t, Slot>::first);
    for (const auto &[depth, slot] : fresh) used_.at(slot).idle_since = ++ticks_;
}

void TierModel::note(TierEvent::Kind kind, Slot slot) {
    if (!event_capacity_) return;
    if (events_.size() >= event_capacity_) events_ = {{TierEvent::Kind::kLost, {}, {}}};
    events_.push_back({kind, used_.at(slot).hash, used_.at(slot).parent_hash});
}

// `tenant`: of a block below the root; others have their parent's.
void TierModel::link(Slot slot, const Digest &hash, Slot parent, Tenant tenant) {
    Block &block = used_.at(slot);
    block.hash = hash;
    block.parent = parent;
    block.parent_hash = parent == kRoot ? Digest{} : used_.at(parent).hash;
    block.tenant = parent == kRoot ? tenant : used_.at(parent).tenant;
}

void TierModel::become_ready(Slot slot, std::uint64_t checksum) {
    Block &block = used_.at(slot);
    block.ready = true;
    block.hits = 1;
    block.checksum = checksum;
    note(TierEvent::Kind::kStored, slot);
}

void TierModel::evict(Slot slot) {
    note(TierEvent::Kind::kRemoved, slot);
    used_.erase(slot);
    ++evictions_;
    settle();
}

// --- leases

TierModel::Lease &TierModel::lease_of(LeaseId lease) {
    const auto found = leases_.find(lease);
    if (found == leases_.end()) throw Refused();
    return found->second;
}

TierModel::Lease &TierModel::current_lease(LeaseId lease) {
    Lease &found = lease_of(lease);
    if (found.epoch != epoch_) throw Refused();
    return found;
}

TierModel::Block &TierModel::in_use(Slot slot) {
    const auto found = used_.find(slot);
    if (found == used_.end()) throw Refused();
    return found->second;
}

void TierModel::pin(LeaseId lease, Slot slot) {
    leases_.at(lease).pins.push_back(slot);
    settle();
}

LeaseId TierModel::open_lease() {
    leases_[++opened_] = {epoch_, {}};
    return opened_;
}

bool TierModel::release(LeaseId lease) {
    const auto found = leases_.find(lease);
    if (found == leases_.end()) return false;
    for (auto &pins = found->second.pins; !pins.empty(); settle()) pins.pop_back();
    leases_.erase(found);
    return true;
}

bool TierModel::is_exact(std::span<const Digest> hashes, std::size_t start) const {
    bool ended = false;
    for (std::size_t i = start; i < hashes.size(); ++i) {
        const bool ready = find_ready(hashes[i]) != kNoSlot;
        if (ended && ready) return false;
        ended = ended || !ready;
    }
    return true;
}

std::vector<Slot> TierModel::match(LeaseId lease, std::span<const Digest> hashes, std::size_t start,
                                   std::size_t known) {
    current_lease(lease);
    std::vector<Slot> run;
    for (std::size_t i = start; i < hashes.size() && find_ready(hashes[i]) != kNoSlot; ++i)
        run.push_back(find_ready(hashes[i]));
    if (run.empty()) return run;
    const std::vector<Slot> whole = path(run.back());
    // A run may begin anywhere in a path: `start` is the caller's count, not the depth in the tier.
    if (whole.size() < run.size() || !std::equal(run.rbegin(), run.rend(), whole.rbegin())) throw Refused();
    adopt_match(lease, run, start, known);
    return run;
}

void TierModel::adopt_match(LeaseId lease, std::span<const Slot> run, std::size_t start, std::size_t known) {
    for (std::size_t i = 0; i < run.size(); ++i) {
        if (start + i >= known) ++used_.at(run[i]).hits;
        pin(lease, run[i]);
    }
}

// --- slots to compute into

void TierModel::take(LeaseId owner, std::uint32_t count, const Reservation &taken,
                     const std::set<Slot> &kept) {
    const std::uint32_t needed = count > free() ? count - free() : 0;
    const auto spare = static_cast<std::uint32_t>(spare_ * slots_);
    const auto evictions = static_cast<std::uint32_t>(taken.evicted.slots.size());
    expect(evictions == needed || (evictions > needed && evictions + free() <= count + spare),
           "more or fewer entries are evicted than needed");
    for (const Slot slot : taken.evicted.slots) {
        const std::vector<Slot> order = eviction_order(kept);
        expect(by_last_use_ ? order.front() == slot : std::ranges::count(order, slot) && !children(slot),
               "another entry than the coldest is evicted");
        evict(slot);
    }
    expect(taken.slots.size() == count && std::ranges::is_sorted(taken.slots, std::less_equal<>()),
           "not as many slots as asked for, ascending");
    for (std::size_t i = 0; i < count; ++i) {
        const Slot slot = taken.slots[i];
        expect(slot < slots_ && !used_.contains(slot), "a slot is given that is in use");
        expect(taken.generations[i] > last_generation_[slot], "a generation is not above the earlier ones");
        last_generation_[slot] = taken.generations[i];
        Block &block = used_[slot];
        block.generation = taken.generations[i];
        block.owner = owner;
        block.guards = 1;  // until its owner has pinned it
    }
}

std::uint32_t TierModel::reserve(LeaseId lease, std::uint32_t count, const Reservation &taken) {
    lease_of(lease);
    const std::size_t room = free() + eviction_order().size();
    if (count > room) return static_cast<std::uint32_t>(count - room);
    take(lease, count, taken, {});
    for (const Slot slot : taken.slots) {
        used_.at(slot).guards = 0;
        leases_.at(lease).pins.push_back(slot);
    }
    settle();
    return 0;
}

bool TierModel::evict_copied(std::uint32_t count, const BlockList &gone) {
    if (count > above_copies()) return gone.slots.empty();
    const auto room = [this] { return free() + eviction_order().size(); };
    const std::size_t evictable = eviction_order().size(), enough = room() + count;
    if (gone.slots.size() < evictable) return false;
    for (const Slot slot : gone.slots) {
        const std::vector<Slot> order = eviction_order();
        if (std::ranges::count(order, slot)) {
            if (by_last_use_ ? order.front() != slot : children(slot)) return false;
            evict(slot);
            continue;
        }
        if (used_entries().contains(slot) || !used_.at(slot).holds() || children(slot) || room() >= enough)
            return false;
        ++evictions_;
        remove_subtrees({slot});
    }
    return room() >= enough;
}

void TierModel::check_computed(LeaseId lease, std::span<const Slot> slots) {
    for (const Slot slot : slots)
        if (const Block &block = in_use(slot); block.findable() || block.owner != lease) throw Refused();
    if (std::set<Slot>(slots.begin(), slots.end()).size() != slots.size()) throw Refused();
}

std::vector<CommitStatus> TierModel::commit(LeaseId lease, const Digest &parent,
                                            std::span<const Digest> hashes, std::span<const Slot> slots) {
    current_lease(lease);
    check_computed(lease, slots);
    if (std::ranges::count(hashes, Digest{})) throw Refused();
    std::vector<CommitStatus> status;
    Slot above = parent.is_zero() ? kRoot : find_ready(parent);
    for (std::size_t i = 0; i < hashes.size() && above != kNoSlot; ++i) {
        Block &block = used_.at(slots[i]);
        if (block.holds() || children(slots[i])) break;
        const Slot present = find(hashes[i]);
        if (present == kNoSlot) {
            link(slots[i], hashes[i], above, 0);
            become_ready(slots[i], block.checksum);
            above = slots[i];
            status.push_back(CommitStatus::kStored);
        } else if (used_.at(present).ready && used_.at(present).parent == above) {
            leases_.at(lease).pins.push_back(present);
            above = present;
            status.push_back(CommitStatus::kDuplicate);
        } else {
            break;
        }
        settle();
    }
    return status;
}

// --- slots filled by others

bool TierModel::has_tenant_room(Tenant tenant, Slot parent) {
    while (!limits_.empty() && entries(tenant) >= limits_.at(tenant)) {
        std::vector<Slot> own = eviction_order(parent == kRoot ? std::set<Slot>{} : std::set{parent});
        std::erase_if(own, [&](Slot slot) { return used_.at(slot).tenant != tenant; });
        if (own.empty()) return false;
        evict(own.front());
    }
    return true;
}

std::vector<PublishStatus> TierModel::publish(LeaseId lease, std::span<const Digest> parents,
                                              std::span<const Digest> hashes, std::span<const Slot> slots,
                                              std::span<const std::uint8_t> copied,
                                              std::span<const std::uint64_t> checksums,
                                              std::span<const Tenant> tenants) {
    const bool current = lease_of(lease).epoch == epoch_;
    check_computed(lease, slots);
    if (std::ranges::count(hashes, Digest{})) throw Refused();
    for (const Tenant tenant : tenants)
        if (!limits_.contains(tenant)) throw Refused();
    std::vector<PublishStatus> status;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const Slot parent = parents[i].is_zero() ? kRoot : find_ready(parents[i]);
        PublishStatus &own = status.emplace_back(PublishStatus::kDropped);
        if (!copied[i] || !current || children(slots[i])) continue;
        const Tenant own_tenant = tenants.empty() ? 0 : tenants[i];
        const Tenant tenant = parent < kRoot ? used_.at(parent).tenant : own_tenant;
        if (find(hashes[i]) != kNoSlot) {
            own = PublishStatus::kDuplicate;
        } else if (parent == kNoSlot) {
            own = PublishStatus::kNoParent;
        } else if (!has_tenant_room(tenant, parent)) {
            own = PublishStatus::kOverLimit;
        } else {
            link(slots[i], hashes[i], parent, tenant);
            become_ready(slots[i], checksums[i]);
            own = PublishStatus::kStored;
            settle();
        }
    }
    // The lease gives them up path by path, each from its end.
    for (const Slot slot : slots) used_.at(slot).owner = 0;
    for (std::size_t first = 0, last = 0; first < slots.size(); first = last) {
        for (++last; last < slots.size() && parents[last] == hashes[last - 1];) ++last;
        for (std::size_t i = last; i-- > first; settle()) std::erase(leases_.at(lease).pins, slots[i]);
    }
    return status;
}

void TierModel::set_tenant_limit(Tenant tenant, std::uint32_t most) {
    const bool empty = std::ranges::none_of(used_, [](const auto &each) { return each.second.findable(); });
    if (limits_.empty() && !empty) throw Refused();
    for (Tenant each = 0; each <= tenant; ++each) limits_.try_emplace(each, Tenants::kNoLimit);
    limits_[tenant] = most;
}

}  // namespace fdcache::tests
