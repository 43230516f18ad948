// Blocks that outlive the process: entries found on start (restore), and bad entries (discard, quarantine).
#include <algorithm>

#include "tier/positions.hpp"
#include "tier/tier.hpp"

namespace fdcache {

namespace {

constexpr std::uint32_t kNone = Positions::kNone;

// The blocks of a scan as trees below the root.
struct Forest {
    std::vector<std::uint32_t> parents;  // position of each block's parent in the scan, or kNone
    std::vector<std::uint32_t> order;    // positions, parents first; of equal hashes only the newest
};

// Of equal hashes the newest block counts.
Positions positions_of(const FoundEntries &found) {
    Positions positions(found.hashes);
    for (std::uint32_t i = 0; i < found.hashes.size(); ++i) {
        std::uint32_t &position = positions[found.hashes[i]];
        if (position == Positions::kNone || found.time(position) < found.time(i)) position = i;
    }
    return positions;
}

Forest forest_of(const FoundEntries &found) {
    const auto count = static_cast<std::uint32_t>(found.hashes.size());
    const Positions positions = positions_of(found);
    Forest forest{std::vector<std::uint32_t>(count, kNone), {}};
    forest.order.reserve(count);
    enum : std::uint8_t { kUnknown, kRooted, kOrphan };
    std::vector<std::uint8_t> known(count, kUnknown);
    std::vector<std::uint32_t> path;
    for (std::uint32_t start = 0; start < count; ++start) {
        if (positions.find(found.hashes[start]) != start) continue;
        path.clear();
        std::uint8_t verdict = kUnknown;
        for (std::uint32_t at = start; verdict == kUnknown;) {
            verdict = known[at];
            if (verdict != kUnknown) break;
            path.push_back(at);
            known[at] = kOrphan;  // until proved otherwise, so that a cycle of hashes ends
            if (found.parents[at].is_zero()) {
                verdict = kRooted;
                break;
            }
            const std::uint32_t parent = positions.find(found.parents[at]);
            forest.parents[at] = parent;
            if (parent == kNone)
                verdict = kOrphan;
            else
                at = parent;
        }
        for (auto up = path.rbegin(); up != path.rend(); ++up) {
            known[*up] = verdict;
            if (verdict == kRooted) forest.order.push_back(*up);
        }
    }
    return forest;
}

// The forest in eviction order: by the newest block of a subtree, and children before parents.
std::vector<std::uint32_t> coldest_first(const FoundEntries &found, const Forest &forest) {
    struct Age {
        std::uint64_t newest;
        std::uint32_t height;  // from the deepest level up
        std::uint32_t position;
    };
    std::vector<std::uint64_t> newest(found.hashes.size(), 0);
    std::vector<std::uint32_t> depth(found.hashes.size(), 0);
    for (const std::uint32_t i : forest.order) {
        newest[i] = found.time(i);
        if (forest.parents[i] != kNone) depth[i] = depth[forest.parents[i]] + 1;
    }
    std::vector<Age> ages;
    ages.reserve(forest.order.size());
    for (auto i = forest.order.rbegin(); i != forest.order.rend(); ++i) {
        const std::uint32_t parent = forest.parents[*i];
        if (parent != kNone) newest[parent] = std::max(newest[parent], newest[*i]);
    }
    for (const std::uint32_t i : forest.order) ages.push_back({newest[i], UINT32_MAX - depth[i], i});
    std::stable_sort(ages.begin(), ages.end(), [](const Age &a, const Age &b) {
        return a.newest != b.newest ? a.newest < b.newest : a.height < b.height;
    });
    std::vector<std::uint32_t> order;
    order.reserve(ages.size());
    for (const Age &age : ages) order.push_back(age.position);
    return order;
}

}  // namespace

std::vector<std::uint8_t> Tier::restore(const FoundEntries &found, std::uint32_t generation) {
    if (found.hashes.size() >= kNone) throw std::invalid_argument("a tier has at most 2^31 - 1 slots");
    check_hashes(found.hashes);
    const Forest forest = forest_of(found);
    const std::vector<std::uint32_t> order = coldest_first(found, forest);
    std::vector<std::uint8_t> restored(found.hashes.size(), 0);
    std::lock_guard lock(mutex_);
    check_tenants(found.tenants);
    // A restored block may have an earlier generation than what its slot had since.
    for (const Entry &entry : entries_) generation = std::max(generation, entry.generation);
    for (const std::uint32_t each : found.generations) generation = std::max(generation, each);
    least_generation_ = std::max(least_generation_, generation);
    for (const std::uint32_t i : forest.order) {
        const Slot slot = found.slots[i];
        const std::uint32_t above = forest.parents[i];
        const Slot parent =
            above != kNone && restored[above] ? found.slots[above] : resolve_parent(found.parents[i]);
        if (slot >= entries_.size() || entries_[slot].state != SlotState::kFree || parent == kNoSlot ||
            index_.find(found.hashes[i]) != kNoSlot)
            continue;
        Entry &entry = entries_[slot];
        entry = Entry{};
        entry.generation = found.generations[i];
        entry.checksum = found.checksums[i];
        entry.state = SlotState::kWriting;
        // Pinned until all are created, so that they join the eviction order in the right order.
        entry.pins = 1;
        ++pins_;
        ++writing_;
        link(slot, found.hashes[i], parent, found.tenants.empty() ? 0 : found.tenants[i]);
        add_entry(slot);
        restored[i] = 1;
    }
    free_.clear();
    for (Slot slot = static_cast<Slot>(entries_.size()); slot-- > 0;)
        if (entries_[slot].state == SlotState::kFree) free_.add(slot);
    for (const std::uint32_t i : order)
        if (restored[i]) unpin(found.slots[i]);
    return restored;
}

void Tier::quarantine(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    for (const Slot slot : slots) check_slot(slot);
    for (const Slot slot : slots) {
        Entry &entry = entries_[slot];
        if (entry.quarantined) continue;
        entry.quarantined = true;
        ++quarantined_;
        begin_hold(slot);
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

BlockList Tier::discard(std::span<const Slot> slots, bool quarantine) {
    std::lock_guard lock(mutex_);
    BlockList gone;
    std::vector<Slot> named;
    for (const Slot slot : slots) {
        if (slot >= entries_.size())
            throw std::out_of_range("slot " + std::to_string(slot) + " is out of range");
        if (entries_[slot].findable && entries_[slot].state == SlotState::kReady) named.push_back(slot);
    }
    std::sort(named.begin(), named.end());
    named.erase(std::unique(named.begin(), named.end()), named.end());
    const std::vector<Slot> doomed = subtree(named);
    gone.make_room(doomed.size());
    for (const Slot slot : doomed) append(gone, slot);
    for (const Slot slot : named) {
        Entry &entry = entries_[slot];
        if (!quarantine || entry.quarantined) continue;
        entry.quarantined = true;
        above_copies_ -= entry.is_above_copies();
        ++entry.holds;
        ++holds_;
        ++quarantined_;
    }
    remove_subtrees(doomed);
    return gone;
}

}  // namespace fdcache
