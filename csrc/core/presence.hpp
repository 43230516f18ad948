// Which blocks a tier holds, in memory that other processes read: one writer, any number of readers, no
// locks.
//
// Buckets of eight 64-bit tags, one cache line each. A block's digest names two buckets and a tag, which
// stands in the emptier of the two. A reader may see a change late, or the tag of another block (once in 2^60
// look-ups): what it learns is a hint, and whoever acts on it asks the writer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/digest.hpp"

namespace fdcache {

class PresenceTable {
  public:
    static constexpr std::size_t kBucketTags = 8;
    static constexpr std::size_t kBucketBytes = kBucketTags * sizeof(std::uint64_t);

    // `memory`: `buckets` x kBucketBytes, zero when empty, aligned to 8.
    PresenceTable(std::uint64_t *memory, std::size_t buckets);

    // A block more. One that finds both its buckets full (half full in all, that is once in many lifetimes)
    // is left out, and nobody finds it.
    void add(const Digest &digest);
    void remove(const Digest &digest);
    void clear();

    // How many blocks are there; reads all of it.
    std::size_t size() const;
    bool holds(const Digest &digest) const;
    // How many blocks of a path are there from `start` on, when all ancestors of what is there are.
    std::size_t run(std::span<const Digest> path, std::size_t start) const;

  private:
    std::uint64_t *bucket(std::uint64_t word) const { return memory_ + kBucketTags * (word % buckets_); }

    std::uint64_t *memory_;
    std::size_t buckets_;
};

}  // namespace fdcache
