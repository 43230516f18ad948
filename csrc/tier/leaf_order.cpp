#include "tier/leaf_order.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <queue>
#include <unordered_map>

namespace fdcache {

// --- entries -----------------------------------------------------------------------------------------------

void LeafOrder::add(Slot slot, Slot parent, bool busy) {
    before_add(slot);
    Node &node = nodes_[slot];
    node.parent = parent;
    node.is_listed = true;
    node.is_busy = busy;
    ++node.stamp;
    if (parent != kNoSlot) ++nodes_[parent].children;
    idle_ += !busy;
    if (is_leaf(slot)) push(leaf_of(slot));
}

void LeafOrder::remove(Slot slot) {
    Node &node = nodes_[slot];
    node.is_listed = false;
    ++node.stamp;
    idle_ -= !node.is_busy;
    lose_child(node.parent);
}

void LeafOrder::add_path(Slot above, std::span<const Slot> path) {
    for (std::size_t i = path.size(); i-- > 0;) {
        before_add(path[i]);
        Node &node = nodes_[path[i]];
        node.parent = i ? path[i - 1] : above;
        node.children += i + 1 < path.size();
        node.is_listed = true;
        node.is_busy = false;
        ++node.stamp;
    }
    if (above != kNoSlot) ++nodes_[above].children;
    idle_ += static_cast<std::uint32_t>(path.size());
    if (is_leaf(path.back())) push(leaf_of(path.back()));
}

void LeafOrder::remove_path(std::span<const Slot> path) {
    for (std::size_t i = 0; i < path.size(); ++i) {
        Node &node = nodes_[path[i]];
        node.children -= i + 1 < path.size();
        node.is_listed = false;
        ++node.stamp;
        idle_ -= !node.is_busy;
    }
    lose_child(nodes_[path.front()].parent);
}

void LeafOrder::set_busy(Slot slot, bool busy) {
    Node &node = nodes_[slot];
    if (node.is_busy == busy) return;
    node.is_busy = busy;
    ++node.stamp;
    busy ? --idle_ : ++idle_;
    if (is_leaf(slot)) push(leaf_of(slot));
}

void LeafOrder::lose_child(Slot parent) {
    if (parent == kNoSlot) return;
    --nodes_[parent].children;
    if (is_leaf(parent)) push(leaf_of(parent));
}

void LeafOrder::rank_again(Slot slot) {
    if (!is_leaf(slot)) return;
    ++nodes_[slot].stamp;
    push(leaf_of(slot));
}

// --- the order ---------------------------------------------------------------------------------------------

void LeafOrder::take(std::uint32_t count, std::vector<Slot> &taken) {
    taken.reserve(taken.size() + count);
    owe(static_cast<double>(kPasses * count) / static_cast<double>(nodes_.size()));
    rank_some(pay());
    while (count) {
        const Leaf leaf = heap_.front();
        if (!is_current(leaf)) {
            pop();
            continue;
        }
        before_take(leaf.slot);
        const Leaf now = leaf_of(leaf.slot);
        if (leaf < now) {
            sift_down(0, now);
            if (heap_.front().slot != leaf.slot) continue;
        }
        pop();
        take_path(leaf.slot, count, taken);
    }
}

// Takes a leaf, and those above it that are the next ones, as for most blocks of a path. Ranks them together,
// which is faster than one by one.
void LeafOrder::take_path(Slot slot, std::uint32_t &count, std::vector<Slot> &taken) {
    std::array<Slot, kMostAtOnce> above;
    std::array<double, kMostAtOnce> ranks;
    std::size_t ranked = 0, next = 0, most = kFirstAbove;
    for (;;) {
        Node &node = nodes_[slot];
        node.is_listed = false;
        ++node.stamp;
        --idle_;
        taken.push_back(slot);
        --count;
        const Slot parent = node.parent;
        if (parent == kNoSlot) return;
        --nodes_[parent].children;
        if (!is_leaf(parent)) return;
        if (next == ranked) {
            next = 0;
            ranked = path_above(parent, std::span(above).first(std::min<std::size_t>(most, count + 1)));
            rank_path(std::span(above).first(ranked), ranks);
            most = std::min(2 * most, kMostAtOnce);
        }
        const Leaf leaf{ranks[next++], parent, nodes_[parent].stamp};
        if (!count || !(heap_.empty() || leaf < heap_.front())) return push(leaf);
        slot = parent;
    }
}

// Sets `path` to a leaf and the entries above it that become leaves when those below them are taken. Returns
// how many that are.
std::size_t LeafOrder::path_above(Slot leaf, std::span<Slot> path) const {
    path[0] = leaf;
    std::size_t length = 1;
    for (; length < path.size(); ++length) {
        const Slot slot = nodes_[path[length - 1]].parent;
        if (slot == kNoSlot) break;
        const Node &node = nodes_[slot];
        if (!node.is_listed || node.is_busy || node.children != 1) break;
        if (slot >= kAhead) __builtin_prefetch(&nodes_[slot - kAhead]);  // paths are mostly runs of slots
        path[length] = slot;
    }
    return length;
}

// Walks down the heap from its top, best first, without a change to it.
std::vector<Slot> LeafOrder::first(std::uint32_t count) const {
    struct Candidate {
        Leaf leaf;
        std::size_t place;  // in the heap; kNowhere: a parent whose children come before it
        bool operator>(const Candidate &other) const { return other.leaf < leaf; }
    };
    constexpr std::size_t kNowhere = SIZE_MAX;
    rank_some(pay());
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
    const auto offer = [&](std::size_t place) {
        if (place < heap_.size()) candidates.push({heap_[place], place});
    };
    std::unordered_map<Slot, std::uint32_t> listed_children;
    std::vector<Slot> listed;
    count = std::min(count, idle_);
    listed.reserve(count);
    offer(0);
    while (listed.size() < count) {
        const Candidate next = candidates.top();
        candidates.pop();
        if (next.place != kNowhere) {
            offer(2 * next.place + 1);
            offer(2 * next.place + 2);
            if (!is_current(next.leaf)) continue;
        }
        const Node &node = nodes_[next.leaf.slot];
        listed.push_back(next.leaf.slot);
        if (node.parent == kNoSlot) continue;
        const Node &parent = nodes_[node.parent];
        const bool is_last = ++listed_children[node.parent] == parent.children;
        if (is_last && parent.is_listed && !parent.is_busy) candidates.push({leaf_of(node.parent), kNowhere});
    }
    return listed;
}

std::vector<Slot> LeafOrder::all() const {
    // Rank all that is owed, so that the next listing is the same.
    while (const std::size_t count = pay()) rank_some(count);
    std::vector<Slot> listed = first(idle_);
    // Busy entries after them, each below its parent first.
    std::unordered_map<Slot, std::uint32_t> busy_children;
    std::vector<Slot> busy, ends;
    for (Slot slot = 0; slot < nodes_.size(); ++slot) {
        if (!nodes_[slot].is_listed || !nodes_[slot].is_busy) continue;
        busy.push_back(slot);
        if (nodes_[slot].parent != kNoSlot) ++busy_children[nodes_[slot].parent];
    }
    for (const Slot slot : busy)
        if (!busy_children.contains(slot)) ends.push_back(slot);
    for (Slot slot : ends) {
        while (slot != kNoSlot && nodes_[slot].is_listed) {
            listed.push_back(slot);
            slot = nodes_[slot].parent;
            if (slot == kNoSlot || --busy_children[slot]) break;
        }
    }
    return listed;
}

void LeafOrder::resize(std::uint32_t slots) {
    const std::size_t room = slots + slots / 2 + 16;
    heap_.reserve(room);
    nodes_.reserve(slots);
    std::erase_if(heap_, [&](const Leaf &leaf) { return leaf.slot >= slots || !is_current(leaf); });
    std::make_heap(heap_.begin(), heap_.end(), [](const Leaf &a, const Leaf &b) { return b < a; });
    nodes_.resize(slots);
}

void LeafOrder::clear() {
    std::fill(nodes_.begin(), nodes_.end(), Node{});
    heap_.clear();
    idle_ = 0;
}

std::size_t LeafOrder::bytes() const {
    return nodes_.capacity() * sizeof(Node) + heap_.capacity() * sizeof(Leaf);
}

// --- the heap ----------------------------------------------------------------------------------------------

void LeafOrder::push(const Leaf &leaf) {
    // From three quarters on, each push meets others, so that those that are not current do not fill it.
    if (heap_.size() > heap_.capacity() / 4 * 3) rank_some(4);
    if (heap_.size() == heap_.capacity()) rank_some(heap_.size());
    heap_.push_back(leaf);
    sift_up(heap_.size() - 1, leaf);
}

// Time has passed, or blocks were evicted: this share of the heap is to be ranked again.
void LeafOrder::owe(double share) {
    owed_ = std::min(owed_ + share, 1.0);
}

// How many entries to rank now. What is not ranked stays owed.
std::size_t LeafOrder::pay() const {
    const auto size = static_cast<double>(heap_.size());
    const double number = std::min(std::floor(owed_ * size), double{kMostRanked});
    if (size) owed_ -= number / size;
    return static_cast<std::size_t>(number);
}

void LeafOrder::pop() {
    erase_at(0);
}

void LeafOrder::sift_up(std::size_t place, Leaf leaf) const {
    while (place) {
        const std::size_t above = (place - 1) / 2;
        if (!(leaf < heap_[above])) break;
        heap_[place] = heap_[above];
        place = above;
    }
    heap_[place] = leaf;
}

void LeafOrder::sift_down(std::size_t place, Leaf leaf) const {
    for (std::size_t below = 2 * place + 1; below < heap_.size(); below = 2 * place + 1) {
        if (below + 1 < heap_.size() && heap_[below + 1] < heap_[below]) ++below;
        if (!(heap_[below] < leaf)) break;
        heap_[place] = heap_[below];
        place = below;
    }
    heap_[place] = leaf;
}

void LeafOrder::erase_at(std::size_t place) const {
    const Leaf last = heap_.back();
    heap_.pop_back();
    if (place == heap_.size()) return;
    if (place && last < heap_[(place - 1) / 2])
        sift_up(place, last);
    else
        sift_down(place, last);
}

void LeafOrder::rank_all() const {
    std::erase_if(heap_, [this](const Leaf &leaf) { return !is_current(leaf); });
    const std::span<Leaf> all(heap_);
    for (std::size_t first = 0; first < all.size(); first += kMostAtOnce)
        rank_leaves(all.subspan(first, std::min(kMostAtOnce, all.size() - first)));
    std::make_heap(heap_.begin(), heap_.end(), [](const Leaf &a, const Leaf &b) { return b < a; });
}

// Ranks the next entries of the heap again, and drops those that are not current. Now and then one moves past
// the cursor, and has to wait for the next round.
void LeafOrder::rank_some(std::size_t count) const {
    if (count >= heap_.size()) return rank_all();
    while (count) {
        if (cursor_ == 0 || cursor_ > heap_.size()) cursor_ = heap_.size();
        const std::size_t some = std::min({count, cursor_, kMostAtOnce});
        rank_before_cursor(some);
        count -= some;
    }
}

// At most `kMostAtOnce`, whose ranks are asked for together.
void LeafOrder::rank_before_cursor(std::size_t count) const {
    const std::size_t first = cursor_ - count;
    std::array<Leaf, kMostAtOnce> known;
    std::copy_n(heap_.begin() + static_cast<std::ptrdiff_t>(first), count, known.begin());
    const std::span<Leaf> next = std::span(known).first(count);
    for (const Leaf &leaf : next) __builtin_prefetch(&nodes_[leaf.slot]);
    rank_leaves(next);
    while (cursor_ > first) {
        const std::size_t place = --cursor_;
        Leaf leaf = heap_[place];
        if (!is_current(leaf)) {
            erase_at(place);
            continue;
        }
        const Leaf &ranked = next[place - first];
        const bool has_moved = leaf.slot != ranked.slot;  // here, just now
        const double before = leaf.rank;
        leaf.rank = has_moved ? rank_of(leaf.slot) : ranked.rank;
        if (leaf.rank < before)
            sift_up(place, leaf);
        else if (leaf.rank > before)
            sift_down(place, leaf);
    }
}

// Sets the ranks of those that are current, of up to `kMostAtOnce`.
void LeafOrder::rank_leaves(std::span<Leaf> leaves) const {
    std::array<Slot, kMostAtOnce> slots;
    std::array<double, kMostAtOnce> ranks;
    std::size_t count = 0;
    for (const Leaf &leaf : leaves)
        if (is_current(leaf)) slots[count++] = leaf.slot;
    rank(std::span(slots).first(count), ranks);
    for (std::size_t i = leaves.size(); i-- > 0;)
        if (is_current(leaves[i])) leaves[i].rank = ranks[--count];
}

}  // namespace fdcache
