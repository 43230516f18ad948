// Positions in an array of digests, and sets of slots, for the time of one call.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "hash/digest.hpp"
#include "tier/eviction.hpp"

namespace fdcache {

// Positions by digest: open addressing, at most half full.
class Positions {
  public:
    static constexpr std::uint32_t kNone = UINT32_MAX;

    explicit Positions(std::span<const Digest> digests)
        : digests_(digests), cells_(std::bit_ceil(2 * digests.size() + 2), kNone) {}

    // The position entered for the digest, or kNone; assign it the position of an equal digest.
    std::uint32_t &operator[](const Digest &digest) { return cells_[cell_of(digest)]; }
    std::uint32_t find(const Digest &digest) const { return cells_[cell_of(digest)]; }

  private:
    std::size_t cell_of(const Digest &digest) const {
        const std::size_t mask = cells_.size() - 1;
        std::size_t cell = digest.word(0) & mask;
        while (cells_[cell] != kNone && !(digests_[cells_[cell]] == digest)) cell = (cell + 1) & mask;
        return cell;
    }

    std::span<const Digest> digests_;
    std::vector<std::uint32_t> cells_;
};

// A set of slots that grows: open addressing, at most half full.
class SlotSet {
  public:
    explicit SlotSet(std::size_t expected) : cells_(std::bit_ceil(2 * expected + 2), kNoSlot) {}
    explicit SlotSet(std::span<const Slot> slots) : SlotSet(slots.size()) {
        for (const Slot slot : slots) insert(slot);
    }

    bool contains(Slot slot) const { return cells_[cell_of(slot)] == slot; }

    // Returns false if the slot is in the set already.
    bool insert(Slot slot) {
        if (2 * (size_ + 1) > cells_.size()) grow();
        Slot &cell = cells_[cell_of(slot)];
        if (cell == slot) return false;
        cell = slot;
        ++size_;
        return true;
    }

  private:
    std::size_t cell_of(Slot slot) const {
        const std::size_t mask = cells_.size() - 1;
        std::size_t cell = slot * std::uint64_t{0x9E3779B97F4A7C15} >> 32 & mask;
        while (cells_[cell] != kNoSlot && cells_[cell] != slot) cell = (cell + 1) & mask;
        return cell;
    }

    void grow() {
        std::vector<Slot> old(2 * cells_.size(), kNoSlot);
        old.swap(cells_);
        for (const Slot slot : old)
            if (slot != kNoSlot) cells_[cell_of(slot)] = slot;
    }

    std::vector<Slot> cells_;
    std::size_t size_ = 0;
};

}  // namespace fdcache
