#include "tier/ghosts.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace fdcache {

std::uint64_t Ghosts::key_of(const Digest &digest) {
    std::uint64_t key = 0;
    std::memcpy(&key, digest.bytes.data() + 8, 6);
    return key ? key : 1;
}

std::size_t Ghosts::home(std::uint64_t key) const {
    const std::uint64_t mixed = key * 0x9FB21C651E98DF25u >> 32;
    return mixed * table_.size() >> 32;
}

void Ghosts::resize(std::size_t capacity) {
    capacity = std::min(capacity, kMost);
    if (capacity == capacity_) return;
    LargeVector<Ghost> kept;
    LargeVector<Bucket> table(std::max(2 * capacity / kCells, kLeastBuckets));
    kept.reserve(capacity);
    // Everything is allocated: from here on nothing fails.
    const std::size_t skipped = size_ > capacity ? size_ - capacity : 0;
    std::size_t seen = 0;
    for (std::size_t i = 0; i < ring_.size(); ++i) {
        const Ghost &ghost = ring_[(oldest_ + i) % ring_.size()];
        if (ghost.key() && seen++ >= skipped) kept.push_back(ghost);
    }
    ring_ = std::move(kept);
    table_ = std::move(table);
    capacity_ = capacity;
    oldest_ = 0;
    size_ = ring_.size();
    place_mask_ = std::bit_ceil(static_cast<std::uint32_t>(capacity + 2)) - 1;
    for (std::size_t place = 0; place < ring_.size(); ++place) insert(ring_[place].key(), place);
}

void Ghosts::clear() {
    std::fill(table_.begin(), table_.end(), Bucket{});
    ring_.clear();
    oldest_ = size_ = 0;
}

std::optional<Ghosts::Memory> Ghosts::add(const Digest &digest, const Memory &memory) {
    if (!capacity_) return memory;
    const std::uint64_t key = key_of(digest);
    std::optional<Memory> forgotten;
    std::size_t place = ring_.size();
    if (place < capacity_) {
        ring_.emplace_back();
    } else {
        place = oldest_;
        oldest_ = oldest_ + 1 < capacity_ ? oldest_ + 1 : 0;
        if (oldest_ + kAhead < capacity_) __builtin_prefetch(&table_[home(ring_[oldest_ + kAhead].key())], 1);
        if (const std::uint64_t oldest = ring_[place].key()) forgotten = forget(*find(oldest));
    }
    ring_[place] = {static_cast<std::uint32_t>(key), static_cast<std::uint16_t>(key >> 32), memory.kind,
                    memory.hits, memory.last_ms};
    ++size_;
    const std::optional<Memory> displaced = insert(key, place);
    return forgotten ? forgotten : displaced;
}

std::optional<Ghosts::Memory> Ghosts::take(const Digest &digest) {
    if (!size_) return std::nullopt;
    std::uint32_t *const cell = find(key_of(digest));
    if (!cell) return std::nullopt;
    return forget(*cell);
}

std::optional<Ghosts::Memory> Ghosts::peek(const Digest &digest) {
    if (!size_) return std::nullopt;
    const std::uint32_t *const cell = find(key_of(digest));
    if (!cell) return std::nullopt;
    return ring_[place_of(*cell)].memory();
}

void Ghosts::prefetch(const Digest &digest) const {
    if (size_) __builtin_prefetch(&table_[home(key_of(digest))], 1);
}

std::uint32_t *Ghosts::find(std::uint64_t key) {
    Bucket &bucket = table_[home(key)];
    const std::uint32_t tag = tag_of(key);
    std::uint32_t found = 0;
    for (std::size_t i = 0; i < kCells; ++i)
        found |= std::uint32_t{(bucket.cells[i] & ~place_mask_) == tag} << i;
    for (; found; found &= found - 1) {
        std::uint32_t &cell = bucket.cells[std::countr_zero(found)];
        if (cell && ring_[place_of(cell)].key() == key) return &cell;
    }
    return nullptr;
}

// Returns the ghost that had to make room, if any.
std::optional<Ghosts::Memory> Ghosts::insert(std::uint64_t key, std::size_t place) {
    Bucket &bucket = table_[home(key)];
    const auto age = [&](std::uint32_t cell) {
        const std::size_t at = place_of(cell);
        return at >= oldest_ ? at - oldest_ : at + ring_.size() - oldest_;
    };
    std::uint32_t *chosen = std::find(bucket.cells, bucket.cells + kCells, 0u);
    std::optional<Memory> displaced;
    if (chosen == bucket.cells + kCells) {
        chosen = std::min_element(bucket.cells, chosen, [&](auto a, auto b) { return age(a) < age(b); });
        displaced = forget(*chosen);
    }
    *chosen = tag_of(key) | static_cast<std::uint32_t>(place + 1);
    return displaced;
}

Ghosts::Memory Ghosts::forget(std::uint32_t &cell) {
    Ghost &ghost = ring_[place_of(cell)];
    const Memory memory = ghost.memory();
    ghost.low = ghost.high = 0;
    cell = 0;
    --size_;
    return memory;
}

}  // namespace fdcache
