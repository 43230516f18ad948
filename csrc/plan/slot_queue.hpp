// Slots of a tier that wait for something to happen to their blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <span>
#include <vector>

#include "tier/eviction.hpp"

namespace fdcache {

// First in, first out. A slot is queued once, whatever it holds by now, so a queue is no longer than its tier
// and drops nothing.
class SlotQueue {
  public:
    void add(std::span<const Slot> slots) {
        for (const Slot slot : slots)
            if (enter(slot)) slots_.push_back(slot);
    }

    // Puts slots that have to wait in front of the others.
    void put_back(std::span<const Slot> slots) {
        for (std::size_t i = slots.size(); i-- > 0;)
            if (enter(slots[i])) slots_.push_front(slots[i]);
    }

    // Removes and returns the first `count` slots, or as many as there are.
    std::vector<Slot> take(std::size_t count) {
        const auto stop = slots_.begin() + static_cast<std::ptrdiff_t>(std::min(count, slots_.size()));
        std::vector<Slot> taken(slots_.begin(), stop);
        slots_.erase(slots_.begin(), stop);
        for (const Slot slot : taken) is_queued_[slot] = false;
        return taken;
    }

    void clear() {
        slots_.clear();
        is_queued_.clear();
    }

    std::size_t size() const { return slots_.size(); }
    bool contains(Slot slot) const { return slot < is_queued_.size() && is_queued_[slot]; }

  private:
    bool enter(Slot slot) {
        if (slot >= is_queued_.size()) is_queued_.resize(std::size_t{slot} + 1);
        if (is_queued_[slot]) return false;
        is_queued_[slot] = true;
        return true;
    }

    std::deque<Slot> slots_;
    std::vector<bool> is_queued_;
};

}  // namespace fdcache
