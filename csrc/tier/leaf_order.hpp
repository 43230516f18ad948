// The order of policies that rank entries: always the leaf of the lowest rank first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tier/eviction.hpp"
#include "tier/large_vector.hpp"

namespace fdcache {

// A heap of the leaves: entries without a child in the order. An entry that was used again or evicted since
// it was pushed is left in the heap until it is met. Ranks may drift with time: each `take` ranks some
// entries again, all of them in a small tier, and always the one that it takes.
class LeafOrder : public EvictionOrder {
  public:
    void add(Slot slot, Slot parent, bool busy) override;
    void remove(Slot slot) override;
    void add_path(Slot above, std::span<const Slot> path) override;
    void remove_path(std::span<const Slot> path) override;
    void set_busy(Slot slot, bool busy) override;
    void take(std::uint32_t count, std::vector<Slot> &taken) override;
    Slot next() const override { return heap_.empty() ? kNoSlot : heap_.front().slot; }
    std::vector<Slot> first(std::uint32_t count) const override;
    std::vector<Slot> all() const override;
    bool holds(Slot slot) const override { return nodes_[slot].is_listed; }
    std::uint32_t size() const override { return idle_; }
    void resize(std::uint32_t slots) override;
    void clear() override;
    std::size_t bytes() const override;

  protected:
    static constexpr std::size_t kMostAtOnce = 64;  // entries

    // The ranks of up to `kMostAtOnce` entries. The lowest is evicted first.
    virtual void rank(std::span<const Slot> slots, std::span<double> ranks) const = 0;
    // The same for entries of one path, each the child of the next one.
    virtual void rank_path(std::span<const Slot> path, std::span<double> ranks) const { rank(path, ranks); }
    // Called before an entry is added.
    virtual void before_add(Slot) {}
    // Called before a leaf is ranked to be taken.
    virtual void before_take(Slot) {}

    // Entries in the order right below this one.
    std::uint32_t children(Slot slot) const { return nodes_[slot].children; }
    Slot parent(Slot slot) const { return nodes_[slot].parent; }
    std::uint32_t slots() const { return static_cast<std::uint32_t>(nodes_.size()); }
    void owe(double share);
    std::size_t leaves() const { return heap_.size(); }
    // The rank of an entry has changed by other than time.
    void rank_again(Slot slot);

  private:
    static constexpr std::size_t kPasses = 8;  // over the heap while as many blocks are evicted as there are
    static constexpr std::size_t kMostRanked = 1024;  // in one call
    static constexpr std::size_t kFirstAbove = 16;    // ancestors of a leaf that are ranked at once; doubles
    static constexpr std::size_t kAhead = 16;         // slots between a prefetch and its use

    struct Node {
        Slot parent = kNoSlot;
        std::uint32_t children : 30 = 0;  // in the order
        std::uint32_t is_listed : 1 = false;
        std::uint32_t is_busy : 1 = false;
        std::uint32_t stamp = 0;  // increases with each change of place
    };

    struct Leaf {
        double rank;
        Slot slot;
        std::uint32_t stamp;

        bool operator<(const Leaf &other) const {
            return rank != other.rank ? rank < other.rank : slot < other.slot;
        }
    };

    bool is_current(const Leaf &leaf) const { return nodes_[leaf.slot].stamp == leaf.stamp; }
    bool is_leaf(Slot slot) const {
        const Node &node = nodes_[slot];
        return node.is_listed && !node.is_busy && !node.children;
    }
    void lose_child(Slot parent);
    double rank_of(Slot slot) const {
        double rank_now;
        rank({&slot, 1}, {&rank_now, 1});
        return rank_now;
    }
    Leaf leaf_of(Slot slot) const { return {rank_of(slot), slot, nodes_[slot].stamp}; }
    void take_path(Slot slot, std::uint32_t &count, std::vector<Slot> &taken);
    std::size_t path_above(Slot leaf, std::span<Slot> path) const;
    void push(const Leaf &leaf);
    void pop();
    void sift_up(std::size_t place, Leaf leaf) const;
    void sift_down(std::size_t place, Leaf leaf) const;
    void erase_at(std::size_t place) const;
    void rank_some(std::size_t count) const;
    void rank_before_cursor(std::size_t count) const;
    void rank_leaves(std::span<Leaf> leaves) const;
    void rank_all() const;
    std::size_t pay() const;

    LargeVector<Node> nodes_;
    // A listing ranks again, too.
    mutable std::vector<Leaf> heap_;
    mutable std::size_t cursor_ = 0;  // place of the entry to rank again next
    mutable double owed_ = 0;         // share of the heap to rank again
    std::uint32_t idle_ = 0;
};

}  // namespace fdcache
