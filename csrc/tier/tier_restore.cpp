// Blocks that outlive the process: entries found on start (restore), bad entries (discard, quarantine), and
// orphans.
#include <algorithm>
#include <functional>

#include "tier/positions.hpp"
#include "tier/tier.hpp"

namespace fdcache {

namespace {

constexpr std::uint32_t kNone = Positions::kNone;

// The blocks of a scan as trees below the root.
struct Forest {
    std::vector<std::uint32_t> parents;  // position of each block's parent in the scan, or kNone
    std::vector<std::uint32_t> order;    // positions, parents first; of equal hashes only the newest
    std::vector<std::uint32_t> orphans;  // the others, without a path to the root, in the same order
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
    Forest forest{std::vector<std::uint32_t>(count, kNone), {}, {}};
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
            if (found.parents[at].is_no_block()) {
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
            (verdict == kRooted ? forest.order : forest.orphans).push_back(*up);
        }
    }
    return forest;
}

// The blocks of a forest that `listed` has, parents first, in eviction order: by the newest block of a
// subtree, and children before parents.
std::vector<std::uint32_t> coldest_first(const FoundEntries &found, const Forest &forest,
                                         const std::vector<std::uint32_t> &listed) {
    struct Age {
        std::uint64_t newest;
        std::uint32_t height;  // from the deepest level up
        std::uint32_t position;
    };
    std::vector<std::uint64_t> newest(found.hashes.size(), 0);
    std::vector<std::uint32_t> depth(found.hashes.size(), 0);
    for (const std::uint32_t i : listed) {
        newest[i] = found.time(i);
        if (forest.parents[i] != kNone) depth[i] = depth[forest.parents[i]] + 1;
    }
    std::vector<Age> ages;
    ages.reserve(listed.size());
    for (auto i = listed.rbegin(); i != listed.rend(); ++i) {
        const std::uint32_t parent = forest.parents[*i];
        if (parent != kNone) newest[parent] = std::max(newest[parent], newest[*i]);
    }
    for (const std::uint32_t i : listed) ages.push_back({newest[i], UINT32_MAX - depth[i], i});
    std::stable_sort(ages.begin(), ages.end(), [](const Age &a, const Age &b) {
        return a.newest != b.newest ? a.newest < b.newest : a.height < b.height;
    });
    std::vector<std::uint32_t> order;
    order.reserve(ages.size());
    for (const Age &age : ages) order.push_back(age.position);
    return order;
}

}  // namespace

std::vector<std::uint8_t> Tier::restore(const FoundEntries &found, std::uint32_t generation,
                                        bool keep_orphans) {
    if (found.hashes.size() >= kNone) throw std::invalid_argument("a tier has at most 2^31 - 1 slots");
    check_hashes(found.hashes);
    const Forest forest = forest_of(found);
    const std::vector<std::uint32_t> order = coldest_first(found, forest, forest.order);
    std::vector<std::uint32_t> waiting = coldest_first(found, forest, forest.orphans);
    std::vector<std::uint32_t> cut_off;  // their parent is in a slot that is not free
    std::vector<std::uint8_t> restored(found.hashes.size(), 0);
    std::lock_guard lock(mutex_);
    check_tenants(found.tenants);
    // A restored block may have an earlier generation than what its slot had since.
    for (const Entry &entry : entries_) generation = std::max(generation, entry.generation);
    for (const std::uint32_t each : found.generations) generation = std::max(generation, each);
    least_generation_ = std::max(least_generation_, generation);
    const bool has_orphans = !orphans_.empty();
    const auto is_new = [&](std::uint32_t i) {
        const Slot slot = found.slots[i];
        return slot < entries_.size() && entries_[slot].state == SlotState::kFree &&
               index_.find(found.hashes[i]) == kNoSlot && orphans_.find(found.hashes[i]) == kNoSlot;
    };
    const auto fresh = [&](std::uint32_t i) {
        Entry entry;
        entry.generation = found.generations[i];
        entry.checksum = found.checksums[i];
        entry.state = SlotState::kWriting;
        ++writing_;
        return entry;
    };
    for (const std::uint32_t i : forest.order) {
        const Slot slot = found.slots[i];
        const std::uint32_t above = forest.parents[i];
        const Slot parent =
            above != kNone && restored[above] ? found.slots[above] : resolve_parent(found.parents[i]);
        if (!is_new(i)) continue;
        if (parent == kNoSlot) {
            cut_off.push_back(i);
            continue;
        }
        Entry &entry = entries_[slot];
        entry = fresh(i);
        // Pinned until all are created, so that they join the eviction order in the right order.
        entry.pins = 1;
        ++pins_;
        link(slot, found.hashes[i], parent, found.tenants.empty() ? 0 : found.tenants[i],
             found.parents[i].is_unknown());
        add_entry(slot);
        restored[i] = 1;
    }
    waiting.insert(waiting.end(), cut_off.rbegin(), cut_off.rend());
    for (const std::uint32_t i : waiting) {
        const Slot slot = found.slots[i];
        if (!keep_orphans || !is_new(i) || resolve_parent(found.parents[i]) != kNoSlot) continue;
        const Orphans::Orphan orphan{slot, found.hashes[i], found.parents[i]};
        orphans_.add({&orphan, 1});
        entries_[slot] = fresh(i);
        entries_[slot].orphan = true;
        digests_[slot] = found.hashes[i];
        orphans_.set_idle(slot, true);
    }
    free_.clear();
    for (Slot slot = static_cast<Slot>(entries_.size()); slot-- > 0;)
        if (entries_[slot].state == SlotState::kFree) free_.add(slot);
    for (const std::uint32_t i : order)
        if (restored[i]) unpin(found.slots[i]);
    for (const std::uint32_t i : order)
        if (has_orphans && restored[i]) adopt_orphans(found.slots[i]);
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

BlockList Tier::discard(std::span<const Slot> slots, bool quarantine, bool keep_orphans) {
    std::lock_guard lock(mutex_);
    BlockList gone;
    std::vector<Slot> named, orphans;
    for (const Slot slot : slots) {
        if (slot >= entries_.size())
            throw std::out_of_range("slot " + std::to_string(slot) + " is out of range");
        if (entries_[slot].findable && entries_[slot].state == SlotState::kReady) named.push_back(slot);
        if (entries_[slot].orphan) orphans.push_back(slot);
    }
    std::sort(named.begin(), named.end());
    named.erase(std::unique(named.begin(), named.end()), named.end());
    const std::vector<Slot> doomed = subtree(named);
    gone.make_room(doomed.size());
    for (const Slot slot : doomed) append(gone, slot);
    if (keep_orphans) keep_below(named, doomed);
    for (const Slot slot : orphans) end_orphan(slot);
    named.insert(named.end(), orphans.begin(), orphans.end());
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
    for (const Slot slot : orphans) free_if_unused(slot);
    return gone;
}

// --- orphans -----------------------------------------------------------------------------------------------

// Makes orphans of the READY entries of subtrees that are about to be removed, apart from the named ones.
void Tier::keep_below(const std::vector<Slot> &named, const std::vector<Slot> &doomed) {
    std::vector<Slot> below;
    for (const Slot slot : doomed)
        if (entries_[slot].state == SlotState::kReady && !std::ranges::binary_search(named, slot))
            below.push_back(slot);
    std::ranges::stable_sort(below, std::greater{}, [this](Slot slot) { return entries_[slot].depth; });
    std::vector<Orphans::Orphan> orphans;
    orphans.reserve(below.size());
    for (const Slot slot : below) orphans.push_back({slot, digests_[slot], digests_[entries_[slot].parent]});
    orphans_.add(orphans);
    for (const Slot slot : below) entries_[slot].orphan = true;
}

// The orphan becomes an anonymous slot, which the caller frees or links.
void Tier::end_orphan(Slot slot) {
    entries_[slot].orphan = false;
    orphans_.remove(slot);
}

// Makes entries of the orphans that wait for a READY one, and of those that wait for them.
void Tier::adopt_orphans(Slot root) {
    // Pinned until all are there, so that no change goes up the path more than once.
    const auto hold_back = [this](Slot slot) {
        ++pins_;
        ++entries_[slot].pins;
        refresh(slot);
    };
    std::vector<Slot> path{root};
    hold_back(root);
    for (std::size_t i = 0; i < path.size(); ++i) {
        for (const Slot slot : orphans_.below(digests_[path[i]])) {
            end_orphan(slot);
            hold_back(slot);
            link(slot, digests_[slot], path[i]);
            add_entry(slot);
            path.push_back(slot);
        }
    }
    for (auto slot = path.rbegin(); slot != path.rend(); ++slot) unpin(*slot);
}

// Frees the slots of up to `count` orphans that nothing uses.
void Tier::evict_orphans(std::uint32_t count) {
    for (; count > 0 && orphans_.idle() > 0; --count) {
        const Slot slot = orphans_.first();
        end_orphan(slot);
        free_slot(slot);
        ++evictions_;
    }
}

std::vector<Digest> Tier::awaited(std::size_t count) {
    std::lock_guard lock(mutex_);
    return orphans_.awaited(count);
}

std::uint32_t Tier::num_orphans() const {
    std::lock_guard lock(mutex_);
    return orphans_.size();
}

std::vector<Slot> Tier::drop_orphans() {
    std::lock_guard lock(mutex_);
    std::vector<Slot> slots = orphans_.slots();
    for (const Slot slot : slots) {
        end_orphan(slot);
        free_if_unused(slot);
    }
    return slots;
}

}  // namespace fdcache
