// What a tier needs whose blocks outlive the process: entries found on start, entries that turn out bad.
#include <algorithm>
#include <numeric>

#include "core/tier.hpp"

namespace fdcache {

namespace {

struct DigestHash {
    std::size_t operator()(const Digest &digest) const { return digest.word(0); }
};

constexpr std::size_t kNone = SIZE_MAX;

// Positions of `hashes`, parents first, each under a parent that comes before it; of equal hashes the newest.
std::vector<std::size_t> parents_first(const FoundEntries &found) {
    const std::size_t count = found.hashes.size();
    std::unordered_map<Digest, std::size_t, DigestHash> by_hash;
    by_hash.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
        const auto [place, fresh] = by_hash.emplace(found.hashes[i], i);
        if (!fresh && found.time(place->second) < found.time(i)) place->second = i;
    }
    enum : std::uint8_t { kUnknown, kRooted, kOrphan };
    std::vector<std::uint8_t> known(count, kUnknown);
    std::vector<std::size_t> order, path;
    order.reserve(count);
    for (const auto &[hash, start] : by_hash) {
        path.clear();
        std::uint8_t verdict = kUnknown;
        for (std::size_t at = start; verdict == kUnknown;) {
            verdict = known[at];
            if (verdict != kUnknown) break;
            path.push_back(at);
            known[at] = kOrphan;  // until proved; so that a ring of hashes ends
            if (found.parents[at].is_zero()) {
                verdict = kRooted;
                break;
            }
            const auto parent = by_hash.find(found.parents[at]);
            if (parent == by_hash.end())
                verdict = kOrphan;
            else
                at = parent->second;
        }
        for (auto up = path.rbegin(); up != path.rend(); ++up) {
            known[*up] = verdict;
            if (verdict == kRooted) order.push_back(*up);
        }
    }
    return order;
}

}  // namespace

std::vector<std::uint8_t> Tier::restore(const FoundEntries &found, std::uint32_t generation) {
    std::lock_guard lock(mutex_);
    check_hashes(found.hashes);
    check_tenants(found.tenants);
    std::vector<std::uint8_t> restored(found.hashes.size(), 0);
    std::vector<std::size_t> kept;  // parents first
    std::unordered_map<Slot, std::uint64_t> newest;
    for (const std::size_t i : parents_first(found)) {
        const Slot slot = found.slots[i];
        const Slot parent = resolve_parent(found.parents[i]);
        if (slot >= entries_.size() || entries_[slot].state != SlotState::kFree || parent == kNoSlot ||
            index_.find(found.hashes[i]) != kNoSlot)
            continue;
        Entry &entry = entries_[slot];
        entry = Entry{};
        entry.generation = found.generations[i];
        entry.checksum = found.checksums[i];
        entry.state = SlotState::kWriting;
        // Pinned until all stand, so that each joins the order in its turn.
        entry.pins = 1;
        ++pins_;
        ++writing_;
        link(slot, found.hashes[i], parent, found.tenants.empty() ? 0 : found.tenants[i]);
        make_ready(slot);
        newest[slot] = found.time(i);
        restored[i] = 1;
        kept.push_back(i);
    }
    for (const std::uint32_t each : found.generations) generation = std::max(generation, each);
    free_.clear();
    for (Slot slot = static_cast<Slot>(entries_.size()); slot-- > 0;) {
        Entry &entry = entries_[slot];
        if (entry.state != SlotState::kFree) continue;
        entry.generation = std::max(entry.generation, generation);
        free_.add(slot);
    }
    // Coldest first: by the newest block of a subtree, its deepest blocks before those above them.
    for (auto i = kept.rbegin(); i != kept.rend(); ++i) {
        const Slot slot = found.slots[*i], parent = entries_[slot].parent;
        if (parent == kRoot) continue;
        if (const auto above = newest.find(parent); above != newest.end())
            above->second = std::max(above->second, newest[slot]);
    }
    std::stable_sort(kept.begin(), kept.end(), [&](std::size_t a, std::size_t b) {
        const Slot left = found.slots[a], right = found.slots[b];
        if (newest[left] != newest[right]) return newest[left] < newest[right];
        return entries_[left].depth > entries_[right].depth;
    });
    for (const std::size_t i : kept) unpin(found.slots[i]);
    return restored;
}

void Tier::quarantine(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    for (const Slot slot : slots) check_slot(slot);
    for (const Slot slot : slots) {
        begin_hold(slot);
        ++quarantined_;
    }
}

void Tier::withhold(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    for (const Slot slot : slots) check_slot(slot);
    for (const Slot slot : slots) {
        Entry &entry = entries_[slot];
        if (entry.withheld) continue;
        entry.withheld = true;
        ++withheld_;
        begin_hold(slot);
    }
}

void Tier::give_back(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    for (const Slot slot : slots)
        if (slot >= entries_.size() || !entries_[slot].withheld)
            throw std::invalid_argument("slot " + std::to_string(slot) + " is not withheld");
    for (const Slot slot : slots) {
        if (!entries_[slot].withheld) continue;  // named twice
        entries_[slot].withheld = false;
        --withheld_;
        end_hold(slot);
    }
}

// Cuts entries and all below them out of the tier, as a reset does with everything.
BlockList Tier::discard(std::span<const Slot> slots, bool quarantine) {
    std::lock_guard lock(mutex_);
    BlockList gone;
    enum : std::uint8_t { kUnknown, kKept, kDoomed };
    std::vector<std::uint8_t> known(entries_.size(), kUnknown);
    std::vector<Slot> named, path;
    for (const Slot slot : slots) {
        if (slot >= entries_.size())
            throw std::out_of_range("slot " + std::to_string(slot) + " is out of range");
        if (!entries_[slot].findable || entries_[slot].state != SlotState::kReady) continue;
        if (known[slot] != kDoomed) named.push_back(slot);
        known[slot] = kDoomed;
    }
    if (named.empty()) return gone;
    for (Slot start = 0; start < entries_.size(); ++start) {
        if (!entries_[start].findable) continue;
        path.clear();
        Slot at = start;
        // Above a pending block may stand one whose copy failed, which has no parent any more.
        while (at < known.size() && known[at] == kUnknown) {
            path.push_back(at);
            at = entries_[at].parent;
        }
        const std::uint8_t verdict = at < known.size() ? known[at] : static_cast<std::uint8_t>(kKept);
        for (const Slot slot : path) known[slot] = verdict;
    }
    std::vector<Slot> doomed;
    for (Slot slot = 0; slot < entries_.size(); ++slot)
        if (known[slot] == kDoomed && entries_[slot].findable) doomed.push_back(slot);
    for (const Slot slot : doomed) {
        append(gone, slot);
        if (entries_[slot].state == SlotState::kReady) note(TierEvent::Kind::kRemoved, slot);
    }
    for (const Slot slot : named) {
        const Slot parent = entries_[slot].parent;
        if (parent == kRoot || known[parent] == kDoomed) continue;
        unlink_child(parent, entries_[slot]);
        refresh(parent);
    }
    for (const Slot slot : doomed) {
        index_.erase(slot);
        if (order_->holds(slot)) order_remove(slot);
        tenants_.leave(slot);
        cut_off(slot);
    }
    if (quarantine) {
        for (const Slot slot : named) {
            ++entries_[slot].holds;
            ++holds_;
            ++quarantined_;
        }
    }
    for (const Slot slot : doomed) free_if_unused(slot);
    return gone;
}

}  // namespace fdcache
