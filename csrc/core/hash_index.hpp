// Block hash -> slot: open addressing, linear probing, deletion by shifting back (no tombstones).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "core/digest.hpp"
#include "core/eviction.hpp"

namespace fdcache {

// The digests themselves stay with the tier (one per slot); a cell keeps the slot and 32 bits of its digest,
// so that a probe rarely touches a digest that is not the one looked for. At most half full: 16 bytes per
// slot.
class HashIndex {
  public:
    explicit HashIndex(const std::vector<Digest> &digests) : digests_(digests) {}

    Slot find(const Digest &digest) const {
        const std::uint32_t tag = tag_of(digest);
        for (std::size_t i = home(digest);; i = next(i)) {
            const Cell &cell = cells_[i];
            if (cell.slot == kNoSlot) return kNoSlot;
            if (cell.tag == tag && digests_[cell.slot] == digest) return cell.slot;
        }
    }

    void insert(Slot slot) {
        std::size_t i = home(digests_[slot]);
        while (cells_[i].slot != kNoSlot) i = next(i);
        cells_[i] = {slot, tag_of(digests_[slot])};
        ++size_;
    }

    void erase(Slot slot) {
        std::size_t hole = home(digests_[slot]);
        while (cells_[hole].slot != slot) hole = next(hole);
        for (std::size_t i = next(hole); cells_[i].slot != kNoSlot; i = next(i)) {
            const std::size_t wanted = home(digests_[cells_[i].slot]);
            if (((i - wanted) & mask_) >= ((i - hole) & mask_)) {
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

    // Room for `slots` entries; what was in the index stays in it.
    void rebuild(std::uint32_t slots) {
        std::vector<Cell> old = std::move(cells_);
        cells_.assign(std::bit_ceil(std::max<std::size_t>(2 * std::size_t{slots}, 8)), Cell{});
        mask_ = cells_.size() - 1;
        size_ = 0;
        for (const Cell &cell : old)
            if (cell.slot != kNoSlot) insert(cell.slot);
    }

    std::uint32_t size() const { return size_; }
    std::size_t bytes() const { return cells_.size() * sizeof(Cell); }

  private:
    struct Cell {
        Slot slot = kNoSlot;
        std::uint32_t tag = 0;
    };

    std::size_t home(const Digest &digest) const { return digest.word(0) & mask_; }
    std::size_t next(std::size_t i) const { return (i + 1) & mask_; }
    static std::uint32_t tag_of(const Digest &digest) { return static_cast<std::uint32_t>(digest.word(1)); }

    const std::vector<Digest> &digests_;
    std::vector<Cell> cells_;
    std::size_t mask_ = 0;
    std::uint32_t size_ = 0;
};

}  // namespace fdcache
