// Block hash -> slot.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "hash/digest.hpp"
#include "tier/eviction.hpp"
#include "tier/large_vector.hpp"

namespace fdcache {

// The tier stores the digests, one per slot. A bucket is one cache line with the slots of ten blocks and
// sixteen bits of each digest, so that a look-up reads one line, and hardly ever the digest of another block.
// A block whose bucket is full goes to the next one that is not; each full bucket on its way counts it, so
// that a search goes on only where there is something to find. At most 60% full: 11 bytes per slot.
class HashIndex {
  public:
    explicit HashIndex(const LargeVector<Digest> &digests) : digests_(digests) {}

    Slot find(const Digest &digest) const {
        const Place place = place_of(digest);
        for (std::size_t at = place.bucket;; at = next(at)) {
            const Bucket &bucket = buckets_[at];
            for (std::uint32_t found = bucket.with_tag(place.tag); found; found &= found - 1) {
                const Slot slot = bucket.slots[first_of(found)];
                if (digests_[slot] == digest) return slot;
            }
            if (!bucket.passed) return kNoSlot;
        }
    }

    // A bit for each of up to 64 digests that is in the index. In stages, each of which prefetches what the
    // next one reads.
    std::uint64_t holds(std::span<const Digest *const> digests) const {
        for (const Digest *const digest : digests) prefetch(*digest);
        for (const Digest *const digest : digests)
            if (const Slot slot = guess(*digest); slot != kNoSlot) __builtin_prefetch(&digests_[slot]);
        std::uint64_t found = 0;
        for (std::size_t i = 0; i < digests.size(); ++i)
            found |= std::uint64_t{find(*digests[i]) != kNoSlot} << i;
        return found;
    }

    // The digest of the slot is not in the index.
    void insert(Slot slot) {
        const Place place = place_of(digests_[slot]);
        std::size_t at = place.bucket;
        std::uint32_t empty = buckets_[at].with_tag(kEmpty);
        for (; !empty; empty = buckets_[at].with_tag(kEmpty)) {
            ++buckets_[at].passed;
            at = next(at);
        }
        buckets_[at].tags[first_of(empty)] = place.tag;
        buckets_[at].slots[first_of(empty)] = slot;
        ++size_;
    }

    void erase(Slot slot) {
        const Place place = place_of(digests_[slot]);
        std::size_t at = place.bucket;
        for (; !buckets_[at].clear(place.tag, slot); at = next(at)) --buckets_[at].passed;
        --size_;
    }

    // Prefetches what a look-up of `digest` will read first.
    void prefetch(const Digest &digest) const { __builtin_prefetch(&buckets_[place_of(digest).bucket], 1); }

    // The slot at which a look-up of `digest` will look first, if any.
    Slot guess(const Digest &digest) const {
        const Place place = place_of(digest);
        const std::uint32_t found = buckets_[place.bucket].with_tag(place.tag);
        return found ? buckets_[place.bucket].slots[first_of(found)] : kNoSlot;
    }

    void clear() {
        std::fill(buckets_.begin(), buckets_.end(), Bucket{});
        size_ = 0;
    }

    // Makes room for `slots` entries and keeps those in the index.
    void rebuild(std::uint32_t slots) {
        LargeVector<Bucket> old(slots / kMostInBucket + 2);
        old.swap(buckets_);
        size_ = 0;
        for (const Bucket &bucket : old)
            for (std::size_t i = 0; i < kCells; ++i)
                if (bucket.tags[i] != kEmpty) insert(bucket.slots[i]);
    }

    std::uint32_t size() const { return size_; }
    std::size_t bytes() const { return buckets_.capacity() * sizeof(Bucket); }

  private:
    static constexpr std::size_t kCells = 10;
    static constexpr std::uint32_t kMostInBucket = 6;  // on average
    static constexpr std::uint16_t kEmpty = 0;

    struct alignas(64) Bucket {
        std::array<std::uint16_t, kCells> tags{};
        std::uint32_t passed = 0;  // blocks that went on from here because it was full
        std::array<Slot, kCells> slots{};

        // A bit for each cell with this tag.
        std::uint32_t with_tag(std::uint16_t tag) const {
#ifdef __SSE2__
            constexpr std::uint32_t all = (1u << kCells) - 1;
            const __m128i wanted = _mm_set1_epi16(static_cast<short>(tag));
            const auto *const eight = reinterpret_cast<const __m128i *>(tags.data());
            const __m128i first = _mm_cmpeq_epi16(_mm_load_si128(eight), wanted);
            const __m128i last = _mm_cmpeq_epi16(_mm_loadl_epi64(eight + 1), wanted);
            return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(first, last))) & all;
#else
            std::uint32_t found = 0;
            for (std::size_t i = 0; i < kCells; ++i) found |= std::uint32_t{tags[i] == tag} << i;
            return found;
#endif
        }

        // Empties the cell of this slot. Returns false if it is not here.
        bool clear(std::uint16_t tag, Slot slot) {
            for (std::uint32_t found = with_tag(tag); found; found &= found - 1) {
                if (slots[first_of(found)] != slot) continue;
                tags[first_of(found)] = kEmpty;
                return true;
            }
            return false;
        }
    };
    static_assert(sizeof(Bucket) == 64, "one cache line");

    struct Place {
        std::size_t bucket;
        std::uint16_t tag;
    };

    Place place_of(const Digest &digest) const {
        const std::uint64_t mixed = digest.word(0) * 0x9E3779B97F4A7C15u;
        return {static_cast<std::size_t>((mixed >> 32) * buckets_.size() >> 32),
                std::max<std::uint16_t>(1, static_cast<std::uint16_t>(mixed))};
    }

    static std::size_t first_of(std::uint32_t found) {
        return static_cast<std::size_t>(std::countr_zero(found));
    }
    std::size_t next(std::size_t at) const { return at + 1 == buckets_.size() ? 0 : at + 1; }

    const LargeVector<Digest> &digests_;
    LargeVector<Bucket> buckets_;
    std::uint32_t size_ = 0;
};

}  // namespace fdcache
