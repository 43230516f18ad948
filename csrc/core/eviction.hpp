// The order in which a full tier gives up blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace fdcache {

using Slot = std::uint32_t;
inline constexpr Slot kNoSlot = 0xFFFFFFFFu;

// Holds exactly the entries that may be evicted: ready, and neither they nor anything below them in use.
// The tier adds a child before its parent and removes a parent when a child of it is used again.
class EvictionOrder {
  public:
    virtual ~EvictionOrder() = default;
    virtual void add(Slot slot) = 0;
    virtual void remove(Slot slot) = 0;
    virtual Slot coldest() const = 0;
    // The next entry to leave after `slot`, or kNoSlot.
    virtual Slot after(Slot slot) const = 0;
    virtual bool holds(Slot slot) const = 0;
    virtual std::uint32_t size() const = 0;
    virtual void resize(std::uint32_t slots) = 0;
    virtual void clear() = 0;
    virtual std::size_t bytes() const = 0;
};

// Least recently used first. An entry joins when its use ends, and its parent's use cannot end before its
// own: so every child stands before its parent, the front is always a leaf, and every step is O(1).
class LruOrder final : public EvictionOrder {
  public:
    void add(Slot slot) override {
        links_[slot] = {tail_, kNoSlot, true};
        (tail_ == kNoSlot ? head_ : links_[tail_].next) = slot;
        tail_ = slot;
        ++size_;
    }

    void remove(Slot slot) override {
        const Link link = links_[slot];
        (link.previous == kNoSlot ? head_ : links_[link.previous].next) = link.next;
        (link.next == kNoSlot ? tail_ : links_[link.next].previous) = link.previous;
        links_[slot].member = false;
        --size_;
    }

    Slot coldest() const override { return head_; }
    Slot after(Slot slot) const override { return links_[slot].next; }
    bool holds(Slot slot) const override { return links_[slot].member; }
    std::uint32_t size() const override { return size_; }
    void resize(std::uint32_t slots) override { links_.resize(slots); }
    std::size_t bytes() const override { return links_.capacity() * sizeof(Link); }

    void clear() override {
        for (Link &link : links_) link = {};
        head_ = tail_ = kNoSlot;
        size_ = 0;
    }

  private:
    struct Link {
        Slot previous = kNoSlot;
        Slot next = kNoSlot;
        bool member = false;
    };

    std::vector<Link> links_;
    Slot head_ = kNoSlot;
    Slot tail_ = kNoSlot;
    std::uint32_t size_ = 0;
};

inline std::unique_ptr<EvictionOrder> make_eviction_order(std::string_view name) {
    if (name == "lru") return std::make_unique<LruOrder>();
    throw std::invalid_argument("no eviction order is called " + std::string(name) + "; there is lru");
}

}  // namespace fdcache
