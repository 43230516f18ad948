#include "tier/slru_order.hpp"

#include <algorithm>

namespace fdcache {

void SlruOrder::arrive(std::span<const Slot> path, std::span<const Digest> digests, std::uint32_t) {
    for (std::size_t i = 0; i < path.size(); ++i) {
        blocks_[path[i]] = Block{};
        blocks_[path[i]].is_known = ghosts_.take(digests[i]).has_value();
    }
}

void SlruOrder::leave(Slot slot, const Digest &digest, bool evicted) {
    if (blocks_[slot].is_protected) unprotect(slot);
    if (evicted && blocks_[slot].is_known) ghosts_.add(digest, {});
    blocks_[slot] = Block{};
}

void SlruOrder::use(std::span<const Slot> path, const RequestEnd *) {
    for (const Slot slot : path) touch(slot);
    demote();
}

void SlruOrder::before_add(Slot slot) {
    if (blocks_[slot].ticket) return;
    touch(slot);
    demote();
}

void SlruOrder::touch(Slot slot) {
    Block &block = blocks_[slot];
    if (block.is_protected) unprotect(slot);
    block.ticket = ++ticket_;
    if (block.is_known) protect(slot);
    block.is_known = true;
    rank_again(slot);
}

void SlruOrder::protect(Slot slot) {
    Block &block = blocks_[slot];
    block.is_protected = true;
    block.previous = newest_;
    block.next = kNoSlot;
    (newest_ == kNoSlot ? oldest_ : blocks_[newest_].next) = slot;
    newest_ = slot;
    ++protected_;
}

void SlruOrder::unprotect(Slot slot) {
    Block &block = blocks_[slot];
    block.is_protected = false;
    (block.previous == kNoSlot ? oldest_ : blocks_[block.previous].next) = block.next;
    (block.next == kNoSlot ? newest_ : blocks_[block.next].previous) = block.previous;
    --protected_;
}

void SlruOrder::demote() {
    while (protected_ > kShare * slots()) {
        const Slot slot = oldest_;
        unprotect(slot);
        blocks_[slot].ticket = ++ticket_;
        rank_again(slot);
    }
}

void SlruOrder::rank(std::span<const Slot> slots, std::span<double> ranks) const {
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const Block &block = blocks_[slots[i]];
        ranks[i] = static_cast<double>(block.ticket) + (block.is_protected ? kFirst : 0);
    }
}

void SlruOrder::resize(std::uint32_t slots) {
    blocks_.reserve(slots);
    LeafOrder::resize(slots);
    blocks_.resize(slots);
    ghosts_.resize(slots);
    demote();
}

void SlruOrder::clear() {
    LeafOrder::clear();
    std::fill(blocks_.begin(), blocks_.end(), Block{});
    ghosts_.clear();
    protected_ = 0;
    oldest_ = newest_ = kNoSlot;
}

std::size_t SlruOrder::bytes() const {
    return LeafOrder::bytes() + blocks_.capacity() * sizeof(Block) + ghosts_.bytes();
}

}  // namespace fdcache
