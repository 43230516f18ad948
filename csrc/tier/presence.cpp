#include "tier/presence.hpp"

#include <atomic>
#include <stdexcept>

namespace fdcache {
namespace {

constexpr std::uint32_t kUnverified = 1u << 31;  // slots are smaller

std::uint64_t load(std::uint64_t &word, std::memory_order order = std::memory_order_acquire) {
    return std::atomic_ref(word).load(order);
}

void store(std::uint64_t &word, std::uint64_t value, std::memory_order order = std::memory_order_release) {
    std::atomic_ref(word).store(value, order);
}

// Zero marks an empty position.
std::uint64_t tag_of(const Digest &digest) {
    const std::uint64_t word = digest.word(2);
    return word ? word : 1;
}

std::uint64_t *find_tag(std::uint64_t *bucket, std::uint64_t tag) {
    for (std::size_t i = 0; i < PresenceTable::kBucketTags; ++i)
        if (load(bucket[i], std::memory_order_relaxed) == tag) return bucket + i;
    return nullptr;
}

std::size_t used(std::uint64_t *bucket) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < PresenceTable::kBucketTags; ++i)
        count += load(bucket[i], std::memory_order_relaxed) != 0;
    return count;
}

std::uint64_t &place_of(std::uint64_t *tag) {
    return tag[PresenceTable::kBucketTags];
}

std::uint64_t packed(const Place &place) {
    return std::uint64_t{place.generation} << 32 | place.slot | (place.unverified ? kUnverified : 0);
}

}  // namespace

PresenceTable::PresenceTable(void *memory, std::size_t nbytes) {
    if (reinterpret_cast<std::uintptr_t>(memory) % alignof(std::uint64_t) || nbytes % kBucketBytes)
        throw std::invalid_argument("a presence table is whole buckets of 128 bytes");
    if (!memory || nbytes < kControlBytes + kBucketBytes)
        throw std::invalid_argument("a presence table is a control line and at least one bucket");
    buckets_ = static_cast<std::uint64_t *>(memory) + kControlBytes / sizeof(std::uint64_t);
    count_ = (nbytes - kControlBytes) / kBucketBytes;
}

std::uint64_t PresenceTable::version() const {
    return load(version_word(), std::memory_order_seq_cst);
}

void PresenceTable::close() {
    if (const std::uint64_t now = version(); !(now & 1))
        store(version_word(), now + 1, std::memory_order_seq_cst);
}

void PresenceTable::open() {
    if (const std::uint64_t now = version(); now & 1)
        store(version_word(), now + 1, std::memory_order_seq_cst);
}

void PresenceTable::add(const Digest &digest, const Place &place) {
    std::uint64_t *const first = bucket(digest.word(0)), *const second = bucket(digest.word(1));
    std::uint64_t *const tag = find_tag(used(first) <= used(second) ? first : second, 0);
    if (!tag) return;
    store(place_of(tag), packed(place));
    store(*tag, tag_of(digest));
}

void PresenceTable::remove(const Digest &digest) {
    store(version_word(), version() + 2);
    if (std::uint64_t *const tag = find(digest)) store(*tag, 0);
}

void PresenceTable::clear() {
    store(version_word(), version() + 2);
    for (std::size_t i = 0; i < 2 * kBucketTags * count_; ++i) store(buckets_[i], 0);
}

void PresenceTable::set_unverified(const Digest &digest, bool unverified) {
    if (std::uint64_t *const tag = find(digest)) {
        std::uint64_t &place = place_of(tag);
        const std::uint64_t value = load(place) & ~std::uint64_t{kUnverified};
        store(place, value | (unverified ? kUnverified : 0));
    }
}

std::size_t PresenceTable::size() const {
    std::size_t total = 0;
    for (std::size_t i = 0; i < count_; ++i) total += used(buckets_ + 2 * kBucketTags * i);
    return total;
}

std::size_t PresenceTable::estimated_size() const {
    constexpr std::size_t kSample = 128;
    const std::size_t step = count_ / kSample + 1;
    std::size_t total = 0, seen = 0;
    for (std::size_t i = 0; i < count_; i += step, ++seen) total += used(buckets_ + 2 * kBucketTags * i);
    return seen ? total * count_ / seen : 0;
}

std::uint64_t *PresenceTable::find(const Digest &digest) const {
    const std::uint64_t tag = tag_of(digest);
    std::uint64_t *const found = find_tag(bucket(digest.word(0)), tag);
    return found ? found : find_tag(bucket(digest.word(1)), tag);
}

std::optional<Place> PresenceTable::place(const Digest &digest) const {
    std::uint64_t *const tag = find(digest);
    if (!tag) return std::nullopt;
    std::atomic_thread_fence(std::memory_order_acquire);  // the tag was read before its place
    const std::uint64_t value = load(place_of(tag));
    const auto slot = static_cast<std::uint32_t>(value);
    return Place{slot & ~kUnverified, static_cast<std::uint32_t>(value >> 32), (slot & kUnverified) != 0};
}

void PresenceTable::prefetch(const Digest &digest) const {
    for (const std::uint64_t *const each : {bucket(digest.word(0)), bucket(digest.word(1))}) {
        __builtin_prefetch(each);
        __builtin_prefetch(each + kBucketTags);
    }
}

void PresenceTable::prefetch_tags(const Digest &digest) const {
    __builtin_prefetch(bucket(digest.word(0)));
    __builtin_prefetch(bucket(digest.word(1)));
}

std::size_t PresenceTable::run(std::span<const Digest> path, std::size_t start) const {
    std::size_t low = start, high = path.size();
    if (low >= high || !holds(path[low])) return 0;
    for (++low; low < high;) {
        const std::size_t middle = low + (high - low) / 2;
        if (holds(path[middle]))
            low = middle + 1;
        else
            high = middle;
    }
    return low - start;
}

}  // namespace fdcache
