// What changes a tier as a whole: reset, resize; its mirror and its record of events.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/tier.hpp"

namespace fdcache {

void Tier::reset() {
    std::lock_guard lock(mutex_);
    index_.clear();
    order_->clear();
    tenants_.clear();
    ++epoch_;
    for (Slot slot = 0; slot < entries_.size(); ++slot) {
        if (entries_[slot].state == SlotState::kFree) continue;
        cut_off(slot);
        free_if_unused(slot);
    }
    if (mirror_) mirror_->clear();
    if (event_capacity_) {
        events_.clear();
        events_.push_back({TierEvent::Kind::kCleared, {}, {}});
    }
}

std::uint32_t Tier::resize(std::uint32_t slots) {
    std::lock_guard lock(mutex_);
    if (slots == 0 || slots > INT32_MAX)
        throw std::invalid_argument("a tier has between 1 and 2^31 - 1 slots");
    const auto old = static_cast<std::uint32_t>(entries_.size());
    std::uint32_t in_use = 0;
    for (Slot slot = slots; slot < old; ++slot)
        in_use += entries_[slot].state == SlotState::kWriting || entries_[slot].busy;
    if (in_use) return in_use;
    if (slots < old)
        evict_above(slots);
    else
        make_room(slots);
    entries_.resize(slots);
    digests_.resize(slots);
    order_->resize(slots);
    tenants_.resize(slots);
    for (Slot slot = old; slot < slots; ++slot) entries_[slot].generation = first_generation_;
    free_.resize(slots);
    if (slots > old) free_.add(old, slots - old);
    return 0;
}

// Everything that growing allocates, before anything changes.
void Tier::make_room(std::uint32_t slots) {
    entries_.reserve(slots);
    digests_.reserve(slots);
    free_.reserve(slots);
    order_->resize(slots);
    tenants_.resize(slots);
    index_.rebuild(slots);
}

// Drops what lies in slots that go, none of it in use, and with each block what hangs below it.
void Tier::evict_above(std::uint32_t slots) {
    const std::vector<Slot> idle = order_->first(order_->size());  // children before parents
    std::vector<bool> doomed(entries_.size(), false);
    for (auto slot = idle.rbegin(); slot != idle.rend(); ++slot) {
        const Slot parent = entries_[*slot].parent;
        doomed[*slot] = *slot >= slots || (parent != kRoot && doomed[parent]);
    }
    for (const Slot slot : idle) {
        if (!doomed[slot]) continue;
        order_remove(slot);
        evict(slot);
    }
    for (std::size_t slot = slots; slot < entries_.size(); ++slot)
        first_generation_ = std::max(first_generation_, entries_[slot].generation);
}

void Tier::mirror(PresenceTable table) {
    std::lock_guard lock(mutex_);
    table.clear();
    for (Slot slot = 0; slot < entries_.size(); ++slot)
        if (entries_[slot].findable && entries_[slot].state == SlotState::kReady) table.add(digests_[slot]);
    mirror_ = table;
}

void Tier::record_events(std::size_t capacity) {
    std::lock_guard lock(mutex_);
    std::vector<TierEvent> events;
    events.reserve(std::max<std::size_t>(capacity, 2));
    events_ = std::move(events);
    event_capacity_ = capacity;
}

void Tier::note(TierEvent::Kind kind, Slot slot) {
    if (mirror_ && kind == TierEvent::Kind::kStored) mirror_->add(digests_[slot]);
    if (mirror_ && kind == TierEvent::Kind::kRemoved) mirror_->remove(digests_[slot]);
    if (!event_capacity_) return;
    if (events_.size() >= event_capacity_) {
        // Whoever reads too late learns that events are missing and has to start over from a snapshot.
        events_.clear();
        events_.push_back({TierEvent::Kind::kLost, {}, {}});
    }
    const Slot parent = entries_[slot].parent;
    events_.push_back({kind, digests_[slot], parent == kRoot ? Digest{} : digests_[parent]});
}

std::vector<TierEvent> Tier::take_events() {
    std::lock_guard lock(mutex_);
    std::vector<TierEvent> taken = events_;  // a copy: the room for the next ones stays
    events_.clear();
    return taken;
}

}  // namespace fdcache
