// The order by the end of the last use, and the lists that keep it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tier/eviction.hpp"
#include "tier/large_vector.hpp"

namespace fdcache {

struct LruLink {
    enum class Place : std::uint8_t { kOutside, kListed, kParked, kWaiting };
    struct Neighbours {
        Slot previous;
        Slot next;
    };

    union {
        Neighbours beside;     // while listed
        std::uint64_t ticket;  // while parked or waiting: increases with each parking
    };
    Place place = Place::kOutside;
    bool busy = false;

    LruLink() : ticket(0) {}
};

using LruLinks = LargeVector<LruLink>;

// A list of entries by the end of their last use. A busy entry that reaches the front is parked: it leaves
// the list, at most once between two uses. Parked entries are colder than the whole list. Parked entries that
// are not busy any more wait in a small heap, which is evicted before the list.
class LruLine {
  public:
    void add(LruLinks &links, Slot slot, bool busy) {
        LruLink &link = links[slot];
        link.beside = {tail_, kNoSlot};
        link.place = LruLink::Place::kListed;
        link.busy = busy;
        (tail_ == kNoSlot ? head_ : links[tail_].beside.next) = slot;
        tail_ = slot;
        ++(busy ? busy_ : idle_);
    }

    void remove(LruLinks &links, Slot slot) {
        LruLink &link = links[slot];
        if (link.place == LruLink::Place::kListed) unlink(links, slot);
        link.place = LruLink::Place::kOutside;
        --(link.busy ? busy_ : idle_);
    }

    // Entries that are not busy, from the last one on.
    void add_path(LruLinks &links, std::span<const Slot> path) {
        Slot before = tail_;
        for (std::size_t i = path.size(); i-- > 0; before = path[i]) {
            LruLink &link = links[path[i]];
            link.beside = {before, i ? path[i - 1] : kNoSlot};
            link.place = LruLink::Place::kListed;
            link.busy = false;
        }
        (tail_ == kNoSlot ? head_ : links[tail_].beside.next) = path.back();
        tail_ = path.front();
        idle_ += static_cast<std::uint32_t>(path.size());
    }

    void remove_path(LruLinks &links, std::span<const Slot> path) {
        for (std::size_t i = 0; i < path.size(); ++i) {
            LruLink &last = links[path[i]];
            --(last.busy ? busy_ : idle_);
            if (last.place == LruLink::Place::kListed) {
                // Neighbours in the list, as a path that was released as one, are unlinked as one.
                const Slot next = last.beside.next;
                while (i + 1 < path.size() && links[path[i]].beside.previous == path[i + 1]) {
                    links[path[i++]].place = LruLink::Place::kOutside;
                    --(links[path[i]].busy ? busy_ : idle_);
                }
                close_gap(links, links[path[i]].beside.previous, next);
            }
            links[path[i]].place = LruLink::Place::kOutside;
        }
    }

    void set_busy(LruLinks &links, Slot slot, bool busy) {
        LruLink &link = links[slot];
        if (link.busy == busy) return;
        --(link.busy ? busy_ : idle_);
        ++(busy ? busy_ : idle_);
        link.busy = busy;
        if (busy || link.place != LruLink::Place::kParked) return;
        link.place = LruLink::Place::kWaiting;
        waiting_.push_back({link.ticket, slot});
        std::push_heap(waiting_.begin(), waiting_.end(), std::greater<>());
    }

    void take(LruLinks &links, std::uint32_t count, std::vector<Slot> &taken) {
        // Only busy entries are parked, and only while the heap is empty, so it never exceeds busy_.
        if (waiting_.capacity() < busy_)
            waiting_.reserve(std::max<std::size_t>(busy_, 2 * waiting_.capacity()));
        taken.reserve(taken.size() + count);
        idle_ -= count;
        while (count) {
            const Slot slot = coldest(links);
            if (links[slot].place != LruLink::Place::kListed) {
                links[slot].place = LruLink::Place::kOutside;
                taken.push_back(slot);
                --count;
            } else {
                count -= take_listed(links, count, taken);
            }
        }
    }

    std::vector<Slot> first(const LruLinks &links, std::uint32_t count) const {
        std::vector<Waiting> waiting;
        for (const Waiting &each : waiting_)
            if (is_current(links, each) && !links[each.slot].busy) waiting.push_back(each);
        std::sort(waiting.begin(), waiting.end());
        std::vector<Slot> listed;
        listed.reserve(std::min(count, idle_));
        for (const Waiting &each : waiting)
            if (listed.size() < count) listed.push_back(each.slot);
        for (Slot slot = head_; slot != kNoSlot && listed.size() < count; slot = links[slot].beside.next)
            if (!links[slot].busy) listed.push_back(slot);
        return listed;
    }

    std::vector<Slot> all(const LruLinks &links) const {
        std::vector<Waiting> parked;
        for (Slot slot = 0; slot < links.size(); ++slot) {
            const LruLink::Place place = links[slot].place;
            if (place == LruLink::Place::kParked || place == LruLink::Place::kWaiting)
                parked.push_back({links[slot].ticket, slot});
        }
        std::sort(parked.begin(), parked.end());
        std::vector<Slot> listed;
        for (const Waiting &each : parked) listed.push_back(each.slot);
        for (Slot slot = head_; slot != kNoSlot && listed.size() <= links.size();
             slot = links[slot].beside.next)
            listed.push_back(slot);
        return listed;
    }

    // Call before links are removed: forgets removed entries.
    void forget_removed(const LruLinks &links) {
        std::erase_if(waiting_, [&](const Waiting &each) { return !is_current(links, each); });
        std::make_heap(waiting_.begin(), waiting_.end(), std::greater<>());
    }

    Slot next() const { return head_; }
    std::uint32_t size() const { return idle_; }
    std::size_t bytes() const { return waiting_.capacity() * sizeof(Waiting); }

    void clear() {
        head_ = tail_ = kNoSlot;
        idle_ = busy_ = 0;
        waiting_.clear();
    }

  private:
    struct Waiting {
        std::uint64_t ticket;
        Slot slot;
        auto operator<=>(const Waiting &) const = default;
    };

    // True if the entry was not used since it was parked.
    static bool is_current(const LruLinks &links, const Waiting &each) {
        const LruLink &link = links[each.slot];
        return link.place == LruLink::Place::kWaiting && link.ticket == each.ticket;
    }

    void unlink(LruLinks &links, Slot slot) {
        close_gap(links, links[slot].beside.previous, links[slot].beside.next);
    }

    void close_gap(LruLinks &links, Slot previous, Slot next) {
        (previous == kNoSlot ? head_ : links[previous].beside.next) = next;
        (next == kNoSlot ? tail_ : links[next].beside.previous) = previous;
    }

    // Takes entries from the front, which is not busy, to the next one that is.
    std::uint32_t take_listed(LruLinks &links, std::uint32_t count, std::vector<Slot> &taken) {
        std::uint32_t number = 0;
        for (; number < count && head_ != kNoSlot && !links[head_].busy; ++number) {
            LruLink &link = links[head_];
            link.place = LruLink::Place::kOutside;
            taken.push_back(head_);
            head_ = link.beside.next;
        }
        (head_ == kNoSlot ? tail_ : links[head_].beside.previous) = kNoSlot;
        return number;
    }

    // The first entry that is not busy. Parks the busy entries before it.
    Slot coldest(LruLinks &links) {
        while (!waiting_.empty()) {
            const Waiting first = waiting_.front();
            const bool current = is_current(links, first);
            if (current && !links[first.slot].busy) return first.slot;
            std::pop_heap(waiting_.begin(), waiting_.end(), std::greater<>());
            waiting_.pop_back();
            if (current) links[first.slot].place = LruLink::Place::kParked;
        }
        while (links[head_].busy) {
            const Slot slot = head_;
            unlink(links, slot);
            links[slot].place = LruLink::Place::kParked;
            links[slot].ticket = next_ticket_++;
        }
        return head_;
    }

    std::vector<Waiting> waiting_;
    std::uint64_t next_ticket_ = 0;
    Slot head_ = kNoSlot;
    Slot tail_ = kNoSlot;
    std::uint32_t idle_ = 0;
    std::uint32_t busy_ = 0;
};

// Least recently used first.
class LruOrder final : public EvictionOrder {
  public:
    void add(Slot slot, Slot, bool busy) override { line_.add(links_, slot, busy); }
    void remove(Slot slot) override { line_.remove(links_, slot); }
    void add_path(Slot, std::span<const Slot> path) override { line_.add_path(links_, path); }
    void remove_path(std::span<const Slot> path) override { line_.remove_path(links_, path); }
    void set_busy(Slot slot, bool busy) override { line_.set_busy(links_, slot, busy); }
    void take(std::uint32_t count, std::vector<Slot> &taken) override { line_.take(links_, count, taken); }
    Slot next() const override { return line_.next(); }
    std::vector<Slot> first(std::uint32_t count) const override { return line_.first(links_, count); }
    std::vector<Slot> all() const override { return line_.all(links_); }
    bool holds(Slot slot) const override { return links_[slot].place != LruLink::Place::kOutside; }
    std::uint32_t size() const override { return line_.size(); }
    std::size_t bytes() const override { return links_.capacity() * sizeof(LruLink) + line_.bytes(); }

    void resize(std::uint32_t slots) override {
        line_.forget_removed(links_);
        links_.resize(slots);
    }

    void clear() override {
        std::fill(links_.begin(), links_.end(), LruLink{});
        line_.clear();
    }

  private:
    LruLinks links_;
    LruLine line_;
};

}  // namespace fdcache
