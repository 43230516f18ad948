// How a tier makes room: which blocks leave it for slots that are needed, and which free slots are taken.
#include <algorithm>
#include <utility>

#include "tier/session.hpp"
#include "tier/tier.hpp"

namespace fdcache {

void Tier::evict(Slot slot) {
    remove_entry(slot);
    free_.add(slot);
}

// Evicts a leaf that a copy reads. Its slot is free once the copy ends.
void Tier::evict_held(Slot slot) {
    const Slot parent = entries_[slot].parent;
    publish_event(TierEvent::Kind::kRemoved, slot);
    order_remove(slot);
    index_.erase(slot);
    tenants_.leave(slot);
    if (learns_) order_->leave(slot, digests_[slot], true);
    if (parent != kRoot) unlink_child(parent, entries_[slot]);
    make_anonymous(slot);
    ++evictions_;
    if (parent != kRoot) refresh(parent);
}

bool Tier::evict_copied(std::uint32_t count, BlockList *evicted) {
    std::lock_guard lock(mutex_);
    return make_way(count, evicted);
}

bool Tier::make_way(std::uint32_t count, BlockList *evicted) {
    if (count > above_copies_) return false;
    if (learns_) order_->set_time(now_ms());
    const std::uint32_t enough = free_or_evictable() + count, most = order_->size() + above_copies_;
    victims_.reserve(most);
    vacated_.reserve(most);
    if (evicted) evicted->make_room(ready_);
    // Once for each copied part of a path, from its end on. The caller reserves all that is evicted here.
    do {
        evict_coldest(order_->size(), evicted);
        for (const FreeRuns::Run &run : vacated_) free_.add(run.first, run.count);
        evict_held_leaves(enough, evicted);
    } while (free_or_evictable() < enough);
    return true;
}

// Until there is enough room.
void Tier::evict_held_leaves(std::uint32_t enough, BlockList *evicted) {
    const auto is_held_leaf = [this](Slot slot) {
        const Entry &entry = entries_[slot];
        return entry.findable && !entry.used && entry.holds && !entry.children;
    };
    for (Slot slot = 0; slot < entries_.size() && free_or_evictable() < enough; ++slot) {
        for (Slot leaf = slot; free_or_evictable() < enough && leaf != kRoot && is_held_leaf(leaf);) {
            const Slot parent = entries_[leaf].parent;
            if (evicted) append(*evicted, leaf);
            evict_held(leaf);
            leaf = parent;
        }
    }
}

std::uint32_t Tier::missing(std::size_t count) const {
    return static_cast<std::uint32_t>(count > free_or_evictable() ? count - free_or_evictable() : 0);
}

// Evicts up to `count` of the coldest entries. Leaves their slots in `vacated_`, as runs.
void Tier::evict_coldest(std::size_t count, BlockList *evicted) {
    victims_.clear();
    vacated_.clear();
    if (learns_ && count) order_->set_time(now_ms());
    order_->take(static_cast<std::uint32_t>(std::min<std::size_t>(count, order_->size())), victims_);
    // In three stages, each of which prefetches the data of the next: in a large tier, cache misses dominate.
    const auto prefetch = [&](Slot slot) {
        if (evicted) append(*evicted, slot);
        index_.prefetch(digests_[slot]);
        if (learns_) order_->prefetch(slot, digests_[slot]);
    };
    const auto remove = [&](Slot slot) {
        tenants_.remove(slot);
        remove_entry(slot);
        // A path is evicted from its end.
        if (!vacated_.empty() && vacated_.back().first == slot + 1)
            vacated_.back() = {slot, vacated_.back().count + 1};
        else
            vacated_.push_back({slot, 1});
    };
    const std::size_t taken = victims_.size(), ahead = std::min(kAhead, taken);
    for (std::size_t i = 0; i < taken + 2 * ahead; ++i) {
        if (i < taken) prefetch_entry(victims_[i]);
        if (i >= ahead && i - ahead < taken) prefetch(victims_[i - ahead]);
        if (i >= 2 * ahead) remove(victims_[i - 2 * ahead]);
    }
    prefetch_entry(order_->next());
}

// Takes `count` slots into `taken_`, as runs, ascending, and evicts entries for them if it must. While the
// slots form short runs, evicts ahead of need, in growing batches, up to the spare share: with more free
// slots, runs are longer.
void Tier::take_runs(std::uint32_t count, BlockList *evicted) {
    if (count > free_.size()) evict_orphans(count - free_.size());
    const std::size_t short_of = count > free_.size() ? count - free_.size() : 0;
    const std::size_t left = free_.size() + short_of - count;
    const auto spare = static_cast<std::size_t>(spare_ * static_cast<double>(entries_.size()));
    std::size_t ahead = std::min(spare > left ? spare - left : 0, kMostAhead);
    const std::size_t most_runs = free_.count() + short_of + ahead;
    taken_.clear();
    taken_.reserve(std::min<std::size_t>(count, most_runs));
    victims_.reserve(std::max(short_of, ahead));
    vacated_.reserve(std::max(short_of, ahead));
    if (evicted) evicted->make_room(short_of + ahead);
    evict_coldest(short_of, evicted);
    if (short_of && !ahead) {
        free_.take_all(taken_);
        taken_.insert(taken_.end(), vacated_.begin(), vacated_.end());
        std::sort(taken_.begin(), taken_.end(), FreeRuns::before);
        return;
    }
    for (const FreeRuns::Run &run : vacated_) free_.add(run.first, run.count);
    free_.take(count, taken_);
    for (std::size_t batch = kFirstBatch; ahead && taken_.size() > count / kGoodRun + 1; batch *= 2) {
        evict_coldest(std::min(batch, ahead), evicted);
        if (victims_.empty()) break;
        ahead -= victims_.size();
        for (const FreeRuns::Run &run : vacated_) free_.add(run.first, run.count);
        for (const FreeRuns::Run &run : taken_) free_.add(run.first, run.count);
        taken_.clear();
        free_.take(count, taken_);
    }
}

// Appends `count` slots to `table`, in the order in which the blocks of a path will use them, and gives them
// the content of `fresh`. `table` has room.
void Tier::take_slots(std::uint32_t count, const Entry &fresh, std::vector<Slot> &table, BlockList *evicted) {
    take_runs(count, evicted);
    std::size_t next = table.size();
    table.resize(next + count);
    for (const FreeRuns::Run &run : taken_) {
        for (Slot slot = run.first; slot < run.first + run.count; ++slot) {
            table[next++] = slot;
            Entry &entry = entries_[slot];
            const std::uint32_t generation = std::max(entry.generation, least_generation_) + 1;
            entry = fresh;
            entry.generation = generation;
        }
    }
    writing_ += count;
}

}  // namespace fdcache
