// Blocks that were evicted, and what a policy remembers of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "hash/digest.hpp"
#include "tier/large_vector.hpp"

namespace fdcache {

// A policy looks here at each block that arrives and adds each that leaves, so both have to cost about one
// cache miss, with several times as many ghosts as slots.
//
// The last evictions in a ring, and a table of their places: a block's bucket is one cache line, on average
// half full. A full bucket forgets its oldest ghost. The ring forgets its oldest ghost without a look at the
// table: a cell says in which pass over the ring its place was written. A block is known by 48 bits of its
// digest: of a million ghosts, one in 10^8 look-ups finds the wrong one, which only blurs what is learned.
class Ghosts {
  public:
    struct Memory {
        std::uint32_t last_ms;
        std::uint8_t kind;
        std::uint8_t hits : 7;
        bool was_below : 1;  // the tier below held it when it was evicted
    };

    // Remembers the last `capacity` evictions from now on. Keeps the newest of the present ones.
    void resize(std::size_t capacity);
    void clear();

    // Returns what had to be forgotten for it.
    std::optional<Memory> add(const Digest &digest, const Memory &memory);
    // Removes a block that is an entry again.
    std::optional<Memory> take(const Digest &digest);
    std::optional<Memory> peek(const Digest &digest);
    void prefetch(const Digest &digest) const;

    std::size_t size() const { return size_; }
    std::size_t bytes() const {
        return ring_.capacity() * sizeof(Ghost) + table_.capacity() * sizeof(Bucket);
    }
    // Places of the ring in use, from 0; `at` returns nothing for a ghost that was taken.
    std::size_t places() const { return ring_.size(); }
    std::optional<Memory> at(std::size_t place) const {
        const Ghost &ghost = ring_[place];
        if (!ghost.key()) return std::nullopt;
        return ghost.memory();
    }
    // Calls `change` with a reference to the time of each.
    void for_each_time(auto change) {
        for (Ghost &ghost : ring_) change(ghost.last_ms);
    }
    void prefetch(std::size_t place) const {
        if (place < ring_.size()) __builtin_prefetch(&ring_[place]);
    }

  private:
    static constexpr std::size_t kMost = std::size_t{1} << 24;  // leaves bits of a cell for a tag
    static constexpr std::size_t kCells = 16;
    static constexpr std::size_t kLeastBuckets = 64;
    static constexpr std::uint32_t kPasses = 4;  // told apart

    struct alignas(64) Bucket {
        std::uint32_t cells[kCells] = {};  // tag, pass, and place + 1; 0: empty

        // A bit for each cell that is `tag` but for the bits of `mask`.
        std::uint32_t with_tag(std::uint32_t tag, std::uint32_t mask) const;
        // A bit for each cell of the present pass over the ring, up to the `oldest` place, or of the last
        // one.
        std::uint32_t current(std::uint32_t place_mask, std::uint32_t pass, std::uint32_t before,
                              std::size_t oldest) const;
    };

    struct Ghost {
        std::uint32_t low = 0;  // of the key; a key of 0: taken
        std::uint16_t high = 0;
        std::uint8_t kind = 0;
        std::uint8_t hits : 7 = 0;
        bool was_below : 1 = false;
        std::uint32_t last_ms = 0;

        std::uint64_t key() const { return std::uint64_t{high} << 32 | low; }
        Memory memory() const { return {last_ms, kind, hits, was_below}; }
    };

    static std::uint64_t key_of(const Digest &digest);
    std::size_t home(std::uint64_t key) const;
    std::uint32_t tag_of(std::uint64_t key) const {
        return static_cast<std::uint32_t>(key >> 16) & ~(kPasses * (place_mask_ + 1) - 1);
    }
    std::size_t place_of(std::uint32_t cell) const { return (cell & place_mask_) - 1; }
    // Pass and place of the ghost at this place, as a cell has them.
    std::uint32_t position(std::size_t place) const {
        const std::uint32_t pass = (place < oldest_ ? pass_ : pass_ - 1) % kPasses;
        return pass * (place_mask_ + 1) + static_cast<std::uint32_t>(place + 1);
    }
    std::uint32_t pass_bits(std::uint32_t pass) const { return pass % kPasses * (place_mask_ + 1); }
    bool is_current(std::uint32_t cell) const {
        return (cell & (kPasses * (place_mask_ + 1) - 1)) == position(place_of(cell));
    }
    std::uint32_t *find(std::uint64_t key);
    std::optional<Memory> insert(std::uint64_t key, std::size_t place);
    // True if the cell's ghost is in the ring.
    bool holds(std::uint32_t cell) const {
        if (!cell || !is_current(cell)) return false;
        const std::uint64_t key = ring_[place_of(cell)].key();
        return key && (tag_of(key) | position(place_of(cell))) == cell;
    }
    std::uint32_t &cell_for_another(Bucket &bucket, std::size_t first) const;
    Memory forget(Ghost &ghost);

    LargeVector<Ghost> ring_;
    LargeVector<Bucket> table_;
    std::size_t capacity_ = 0;
    std::size_t oldest_ = 0;  // place of the next one, once the ring is full
    std::size_t size_ = 0;
    std::uint32_t pass_ = 0;  // over the ring, once it is full
    std::uint32_t place_mask_ = 0;
};

}  // namespace fdcache
