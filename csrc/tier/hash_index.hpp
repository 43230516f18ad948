// Block hash -> slot: open addressing, linear probing, deletion by shifting back (no tombstones).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "hash/digest.hpp"
#include "tier/eviction.hpp"

namespace fdcache {

// The tier stores the digests, one per slot. A cell has the slot and 32 bits of its digest, which give the
// cell's place, so that a probe rarely reads the digest of another block. At most half full: 16 bytes per
// slot.
class HashIndex {
  public:
    explicit HashIndex(const std::vector<Digest> &digests) : digests_(digests) {}

    Slot find(const Digest &digest) const {
        const std::uint32_t tag = tag_of(digest);
        for (std::size_t i = tag & mask_;; i = next(i)) {
            const Cell &cell = cells_[i];
            if (cell.slot == kNoSlot) return kNoSlot;
            if (cell.tag == tag && digests_[cell.slot] == digest) return cell.slot;
        }
    }

    void insert(Slot slot) {
        place({slot, tag_of(digests_[slot])});
        ++size_;
    }

    // Prefetches the cells that a look-up of `digest` will read.
    void prefetch(const Digest &digest) const { __builtin_prefetch(&cells_[tag_of(digest) & mask_], 1); }

    void erase(Slot slot) {
        std::size_t hole = tag_of(digests_[slot]) & mask_;
        while (cells_[hole].slot != slot) hole = next(hole);
        for (std::size_t i = next(hole); cells_[i].slot != kNoSlot; i = next(i)) {
            if (((i - cells_[i].tag) & mask_) >= ((i - hole) & mask_)) {
                cells_[hole] = cells_[i];
                hole = i;
            }
        }
        cells_[hole] = {};
        --size_;
    }

    void clear() {
        std::fill(cells_.begin(), cells_.end(), Cell{});
        size_ = 0;
    }

    // Grows to `slots` entries and keeps those in the index.
    void rebuild(std::uint32_t slots) {
        std::vector<Cell> old(std::bit_ceil(std::max<std::size_t>(2 * std::size_t{slots}, 8)));
        old.swap(cells_);
        mask_ = cells_.size() - 1;
        for (const Cell &cell : old)
            if (cell.slot != kNoSlot) place(cell);
    }

    std::uint32_t size() const { return size_; }
    std::size_t bytes() const { return cells_.size() * sizeof(Cell); }

  private:
    struct Cell {
        Slot slot = kNoSlot;
        std::uint32_t tag = 0;
    };

    void place(const Cell &cell) {
        std::size_t i = cell.tag & mask_;
        while (cells_[i].slot != kNoSlot) i = next(i);
        cells_[i] = cell;
    }

    std::size_t next(std::size_t i) const { return (i + 1) & mask_; }
    static std::uint32_t tag_of(const Digest &digest) { return static_cast<std::uint32_t>(digest.word(0)); }

    const std::vector<Digest> &digests_;
    std::vector<Cell> cells_;
    std::size_t mask_ = 0;
    std::uint32_t size_ = 0;
};

}  // namespace fdcache
