// The model's copies, and what removes and restores blocks.
#include <algorithm>
#include <optional>
#include <utility>

#include "native/tier_model.hpp"

namespace fdcache::tests {

// --- copies

std::uint32_t TierModel::reserve_copies(LeaseId lease, std::span<const Digest> parents,
                                        std::span<const Digest> hashes, const CopyReservation &taken,
                                        std::vector<ReserveStatus> &status) {
    if (lease) current_lease(lease);
    if (std::ranges::count(hashes, Digest{})) throw Refused();
    std::vector<std::size_t> wanted;
    std::set<Slot> kept;
    const auto is_wanted = [&](const Digest &hash) {
        return std::ranges::any_of(wanted, [&](std::size_t i) { return hashes[i] == hash; });
    };
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        const Slot parent = parents[i].is_zero() ? kRoot : find_ready(parents[i]);
        if (find_ready(hashes[i]) != kNoSlot) {
            status.push_back(ReserveStatus::kReady);
            kept.insert(find_ready(hashes[i]));
        } else if (find(hashes[i]) != kNoSlot || is_wanted(hashes[i])) {
            status.push_back(ReserveStatus::kPending);
        } else if (parent == kNoSlot && !is_wanted(parents[i])) {
            status.push_back(ReserveStatus::kNoParent);
        } else {
            status.push_back(ReserveStatus::kReserved);
            wanted.push_back(i);
            if (parent < kRoot) kept.insert(parent);
        }
    }
    const std::size_t room = free() + eviction_order(kept).size();
    if (wanted.size() > room) return static_cast<std::uint32_t>(wanted.size() - room);
    take(lease, static_cast<std::uint32_t>(wanted.size()), taken, kept);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        Block &block = used_.at(taken.slots[i]);
        const Digest &parent = parents[wanted[i]];
        link(taken.slots[i], hashes[wanted[i]], parent.is_zero() ? kRoot : find(parent), 0);
        block.guards = 0;
        block.copies = 1;
        if (lease) leases_.at(lease).pins.push_back(taken.slots[i]);
        settle();
    }
    return 0;
}

void TierModel::check_copies(std::span<const Slot> slots, bool arriving) {
    std::map<Slot, std::uint32_t> named;
    for (const Slot slot : slots) {
        const Block &block = in_use(slot);
        const bool pending = block.findable() && !block.ready;
        if (++named[slot] + (pending && !arriving) > block.copies) throw Refused();
    }
}

std::vector<std::uint8_t> TierModel::complete(std::span<const Slot> slots,
                                              std::span<const std::uint8_t> copied,
                                              std::span<const std::uint64_t> checksums) {
    check_copies(slots, true);
    std::vector<std::uint8_t> ready;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        Block &block = used_.at(slots[i]);
        --block.copies;
        const bool pending = block.findable() && !block.ready;
        const bool arrives = pending && copied[i] && (block.parent == kRoot || used_.at(block.parent).ready);
        if (arrives) {
            become_ready(slots[i], checksums.empty() ? 0 : checksums[i]);
        } else if (pending) {
            block.hash = {};
            block.parent = kRoot;
        }
        ready.push_back(arrives);
        settle();
    }
    return ready;
}

void TierModel::hold(std::span<const Slot> slots) {
    for (const Slot slot : slots) in_use(slot);
    for (const Slot slot : slots) ++used_.at(slot).copies;
}

void TierModel::unhold(std::span<const Slot> slots) {
    check_copies(slots, false);
    for (const Slot slot : slots) {
        --used_.at(slot).copies;
        settle();
    }
}

// --- removal

std::vector<Slot> TierModel::subtree(const std::set<Slot> &named) const {
    std::vector<Slot> doomed;
    for (const auto &[slot, block] : used_)
        if (std::ranges::any_of(path(slot), [&](Slot above) { return named.contains(above); }))
            doomed.push_back(slot);
    return doomed;
}

void TierModel::remove_subtrees(std::vector<Slot> doomed) {
    for (const Slot slot : doomed)
        if (used_.at(slot).ready) note(TierEvent::Kind::kRemoved, slot);
    std::vector<Slot> parents;
    for (const Slot slot : doomed) {
        Block &block = used_.at(slot);
        parents.push_back(block.parent);
        block.hash = {};
        block.parent = kRoot;
        if (std::exchange(block.ready, false)) block.owner = 0;
        block.idle_since = 0;
    }
    for (const Slot parent : parents)
        if (parent != kRoot) settle_path(parent);
    settle();
}

std::uint32_t TierModel::drop(std::span<const Digest> hashes) {
    std::set<Slot> named;
    for (const Digest &hash : hashes)
        if (find(hash) != kNoSlot) named.insert(find(hash));
    const std::vector<Slot> doomed = subtree(named);
    const auto ready = std::ranges::count_if(doomed, [this](Slot slot) { return used_.at(slot).ready; });
    remove_subtrees(doomed);
    return static_cast<std::uint32_t>(ready);
}

std::vector<Slot> TierModel::discard(std::span<const Slot> slots, bool quarantine) {
    std::set<Slot> named;
    for (const Slot slot : slots) {
        if (slot >= slots_) throw Refused();
        if (used_.contains(slot) && used_.at(slot).ready) named.insert(slot);
    }
    const std::vector<Slot> doomed = subtree(named);
    if (quarantine)
        for (const Slot slot : named) used_.at(slot).quarantined = true;
    remove_subtrees(doomed);
    return doomed;
}

void TierModel::quarantine(std::span<const Slot> slots) {
    for (const Slot slot : slots) in_use(slot);
    for (const Slot slot : slots) used_.at(slot).quarantined = true;
}

void TierModel::withhold(std::span<const Slot> slots) {
    for (const Slot slot : slots) in_use(slot);
    for (const Slot slot : slots) used_.at(slot).withheld = true;
}

void TierModel::give_back(std::span<const Slot> slots) {
    for (const Slot slot : slots)
        if (slot >= slots_ || !used_.contains(slot) || !used_.at(slot).withheld) throw Refused();
    for (const Slot slot : slots) {
        if (!used_.contains(slot)) continue;  // named twice
        used_.at(slot).withheld = false;
        settle();
    }
}

// --- the whole tier

std::vector<std::uint8_t> TierModel::restore(const FoundEntries &found, std::uint32_t generation) {
    if (std::ranges::count(found.hashes, Digest{})) throw Refused();
    for (const Tenant tenant : found.tenants)
        if (!limits_.contains(tenant)) throw Refused();
    const std::size_t count = found.hashes.size();
    const auto position = [&](const Digest &hash) {
        std::optional<std::size_t> newest;
        for (std::size_t i = 0; i < count; ++i)
            if (found.hashes[i] == hash && (!newest || found.time(i) > found.time(*newest))) newest = i;
        return newest;
    };
    // The blocks that have a path to the root in the scan, parents first, and the depth of each.
    std::vector<std::size_t> order;
    std::map<std::size_t, std::size_t> depth;
    std::map<std::size_t, std::uint64_t> newest;
    for (std::size_t start = 0; start < count; ++start) {
        if (position(found.hashes[start]) != start) continue;
        std::vector<std::size_t> up{start};
        while (!found.parents[up.back()].is_zero() && up.size() <= count) {
            const auto above = position(found.parents[up.back()]);
            if (!above) break;
            up.push_back(*above);
        }
        if (!found.parents[up.back()].is_zero()) continue;  // an orphan, or a cycle
        for (std::size_t level = 0; level < up.size(); ++level) {
            const std::size_t at = up[up.size() - 1 - level];
            if (depth.try_emplace(at, level).second) order.push_back(at);
            newest[at] = std::max(newest[at], found.time(start));
        }
    }
    std::vector<std::uint8_t> restored(count, 0);
    for (const std::size_t i : order) {
        const Slot slot = found.slots[i];
        const Slot parent = found.parents[i].is_zero() ? kRoot : find_ready(found.parents[i]);
        if (slot >= slots_ || used_.contains(slot) || parent == kNoSlot || find(found.hashes[i]) != kNoSlot)
            continue;
        Block &block = used_[slot];
        block.generation = found.generations[i];
        link(slot, found.hashes[i], parent, found.tenants.empty() ? 0 : found.tenants[i]);
        block.guards = 1;
        become_ready(slot, found.checksums[i]);
        restored[i] = 1;
    }
    settle();
    for (const std::uint32_t each : found.generations) generation = std::max(generation, each);
    for (Slot slot = 0; slot < slots_; ++slot)
        last_generation_[slot] = std::max(last_generation_[slot], generation);
    std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
        return newest[a] != newest[b] ? newest[a] < newest[b] : depth[a] > depth[b];
    });
    for (const std::size_t i : order) {
        if (restored[i]) used_.at(found.slots[i]).guards = 0;
        settle();
    }
    return restored;
}

void TierModel::reset() {
    ++epoch_;
    for (auto &[slot, block] : used_) {
        block.hash = {};
        block.parent = kRoot;
        if (std::exchange(block.ready, false)) block.owner = 0;
    }
    settle();
    if (event_capacity_) events_ = {{TierEvent::Kind::kCleared, {}, {}}};
}

std::uint32_t TierModel::resize(std::uint32_t slots) {
    if (!slots) throw Refused();
    const std::vector<Slot> order = eviction_order();
    std::uint32_t standing = 0;
    for (const auto &[slot, block] : used_) standing += slot >= slots && !std::ranges::count(order, slot);
    if (standing) return standing;
    for (const Slot slot : order)
        if (std::ranges::any_of(path(slot), [slots](Slot above) { return above >= slots; })) evict(slot);
    slots_ = slots;
    return 0;
}

void TierModel::record_events(std::size_t capacity) {
    event_capacity_ = capacity;
    events_.clear();
}

}  // namespace fdcache::tests
