#include "tier/ghosts.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace fdcache {

std::uint32_t Ghosts::Bucket::with_tag(std::uint32_t tag, std::uint32_t mask) const {
    std::uint32_t found = 0;
#ifdef __SSE2__
    const __m128i wanted = _mm_set1_epi32(static_cast<int>(tag));
    const __m128i ignored = _mm_set1_epi32(static_cast<int>(mask));
    for (std::size_t i = 0; i < kCells; i += 4) {
        const __m128i four = _mm_load_si128(reinterpret_cast<const __m128i *>(cells + i));
        const __m128i equal = _mm_cmpeq_epi32(_mm_andnot_si128(ignored, four), wanted);
        found |= static_cast<std::uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(equal))) << i;
    }
#else
    for (std::size_t i = 0; i < kCells; ++i) found |= std::uint32_t{(cells[i] & ~mask) == tag} << i;
#endif
    return found;
}

std::uint32_t Ghosts::Bucket::current(std::uint32_t place_mask, std::uint32_t pass, std::uint32_t before,
                                      std::size_t oldest) const {
    std::uint32_t found = 0;
#ifdef __SSE2__
    const __m128i places = _mm_set1_epi32(static_cast<int>(place_mask));
    const __m128i both = _mm_set1_epi32(static_cast<int>(kPasses * (place_mask + 1) - 1));
    const __m128i begin = _mm_set1_epi32(static_cast<int>(oldest + 1));
    const __m128i now = _mm_set1_epi32(static_cast<int>(pass)),
                  last = _mm_set1_epi32(static_cast<int>(before));
    for (std::size_t i = 0; i < kCells; i += 4) {
        const __m128i four = _mm_load_si128(reinterpret_cast<const __m128i *>(cells + i));
        const __m128i place = _mm_and_si128(four, places);
        const __m128i is_new = _mm_cmplt_epi32(place, begin);
        const __m128i is_empty = _mm_cmpeq_epi32(four, _mm_setzero_si128());
        const __m128i expected =
            _mm_or_si128(place, _mm_or_si128(_mm_and_si128(is_new, now), _mm_andnot_si128(is_new, last)));
        const __m128i equal =
            _mm_andnot_si128(is_empty, _mm_cmpeq_epi32(_mm_and_si128(four, both), expected));
        found |= static_cast<std::uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(equal))) << i;
    }
#else
    for (std::size_t i = 0; i < kCells; ++i) {
        const std::uint32_t place = cells[i] & place_mask;
        const std::uint32_t expected = place | (place < oldest + 1 ? pass : before);
        const bool is_current = cells[i] && (cells[i] & (kPasses * (place_mask + 1) - 1)) == expected;
        found |= std::uint32_t{is_current} << i;
    }
#endif
    return found;
}

std::uint64_t Ghosts::key_of(const Digest &digest) {
    const std::uint64_t key = digest.word(1) & ((std::uint64_t{1} << 48) - 1);
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
    oldest_ = pass_ = 0;
    size_ = ring_.size();
    place_mask_ = std::bit_ceil(static_cast<std::uint32_t>(capacity + 2)) - 1;
    for (std::size_t place = 0; place < ring_.size(); ++place) insert(ring_[place].key(), place);
}

void Ghosts::clear() {
    std::fill(table_.begin(), table_.end(), Bucket{});
    ring_.clear();
    oldest_ = size_ = pass_ = 0;
}

std::optional<Ghosts::Memory> Ghosts::add(const Digest &digest, const Memory &memory) {
    if (!capacity_) return memory;
    const std::uint64_t key = key_of(digest);
    std::optional<Memory> forgotten;
    std::size_t place = ring_.size();
    if (place < capacity_) {
        ring_.emplace_back();
    } else {
        place = oldest_++;
        if (ring_[place].key()) forgotten = forget(ring_[place]);
        if (oldest_ == capacity_) {
            oldest_ = 0;
            ++pass_;
        }
    }
    ring_[place] = {static_cast<std::uint32_t>(key),
                    static_cast<std::uint16_t>(key >> 32),
                    memory.kind,
                    memory.hits,
                    memory.was_below,
                    memory.last_ms};
    ++size_;
    const std::optional<Memory> displaced = insert(key, place);
    return forgotten ? forgotten : displaced;
}

std::optional<Ghosts::Memory> Ghosts::take(const Digest &digest) {
    if (!size_) return std::nullopt;
    std::uint32_t *const cell = find(key_of(digest));
    if (!cell) return std::nullopt;
    Ghost &ghost = ring_[place_of(std::exchange(*cell, 0))];
    return forget(ghost);
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
    std::uint32_t found = bucket.with_tag(tag_of(key), kPasses * (place_mask_ + 1) - 1);
    for (; found; found &= found - 1) {
        std::uint32_t &cell = bucket.cells[std::countr_zero(found)];
        if (holds(cell) && ring_[place_of(cell)].key() == key) return &cell;
    }
    return nullptr;
}

// Returns the ghost that had to make room, if any.
std::optional<Ghosts::Memory> Ghosts::insert(std::uint64_t key, std::size_t place) {
    std::uint32_t &cell = cell_for_another(table_[home(key)], place);
    std::optional<Memory> displaced;
    if (holds(cell)) displaced = forget(ring_[place_of(cell)]);
    cell = tag_of(key) | position(place);
    return displaced;
}

// A cell whose ghost is gone, or that of the oldest one. Each insertion looks from another cell on, so that
// no cell stays until its pass seems to be the present one.
std::uint32_t &Ghosts::cell_for_another(Bucket &bucket, std::size_t first) const {
    const std::uint32_t free = ~bucket.current(place_mask_, pass_bits(pass_), pass_bits(pass_ - 1), oldest_);
    const auto from_first = static_cast<std::uint16_t>((free << 16 | (free & 0xFFFF)) >> first % kCells);
    if (from_first) return bucket.cells[(first + std::countr_zero(from_first)) % kCells];
    const auto age = [this](std::uint32_t cell) {
        const std::size_t at = place_of(cell);
        return at >= oldest_ ? at - oldest_ : at + ring_.size() - oldest_;
    };
    return *std::min_element(bucket.cells, bucket.cells + kCells,
                             [&](auto a, auto b) { return age(a) < age(b); });
}

Ghosts::Memory Ghosts::forget(Ghost &ghost) {
    const Memory memory = ghost.memory();
    ghost.low = ghost.high = 0;
    --size_;
    return memory;
}

}  // namespace fdcache
