#include "tier/presence.hpp"

#include <atomic>
#include <stdexcept>

namespace fdcache {
namespace {

std::uint64_t load(std::uint64_t &tag) {
    return std::atomic_ref(tag).load(std::memory_order_relaxed);
}

void store(std::uint64_t &tag, std::uint64_t value) {
    std::atomic_ref(tag).store(value, std::memory_order_relaxed);
}

// Zero marks an empty place.
std::uint64_t tag_of(const Digest &digest) {
    const std::uint64_t word = digest.word(2);
    return word ? word : 1;
}

std::size_t count(std::uint64_t *bucket) {
    std::size_t used = 0;
    for (std::size_t i = 0; i < PresenceTable::kBucketTags; ++i) used += load(bucket[i]) != 0;
    return used;
}

bool replace(std::uint64_t *bucket, std::uint64_t from, std::uint64_t to) {
    for (std::size_t i = 0; i < PresenceTable::kBucketTags; ++i) {
        if (load(bucket[i]) == from) {
            store(bucket[i], to);
            return true;
        }
    }
    return false;
}

bool has(std::uint64_t *bucket, std::uint64_t tag) {
    for (std::size_t i = 0; i < PresenceTable::kBucketTags; ++i)
        if (load(bucket[i]) == tag) return true;
    return false;
}

}  // namespace

PresenceTable::PresenceTable(void *memory, std::size_t nbytes)
    : memory_(static_cast<std::uint64_t *>(memory)), buckets_(nbytes / kBucketBytes) {
    if (reinterpret_cast<std::uintptr_t>(memory) % alignof(std::uint64_t) || nbytes % kBucketBytes)
        throw std::invalid_argument("a presence table is whole buckets of 64 bytes");
    if (!memory || !buckets_) throw std::invalid_argument("a presence table has at least one bucket");
}

void PresenceTable::add(const Digest &digest) {
    std::uint64_t *const first = bucket(digest.word(0)), *const second = bucket(digest.word(1));
    replace(count(first) <= count(second) ? first : second, 0, tag_of(digest));
}

void PresenceTable::remove(const Digest &digest) {
    const std::uint64_t tag = tag_of(digest);
    if (!replace(bucket(digest.word(0)), tag, 0)) replace(bucket(digest.word(1)), tag, 0);
}

void PresenceTable::clear() {
    for (std::size_t i = 0; i < buckets_ * kBucketTags; ++i) store(memory_[i], 0);
}

std::size_t PresenceTable::size() const {
    std::size_t used = 0;
    for (std::size_t i = 0; i < buckets_; ++i) used += count(memory_ + kBucketTags * i);
    return used;
}

bool PresenceTable::holds(const Digest &digest) const {
    const std::uint64_t tag = tag_of(digest);
    return has(bucket(digest.word(0)), tag) || has(bucket(digest.word(1)), tag);
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
