// The blocks of a tier, in memory shared with other processes: one writer, any number of readers, no locks.
//
// Buckets of eight 64-bit tags, one cache line each. A block's digest selects two buckets and a tag, which is
// stored in the emptier one. A reader may see a change late, or the tag of another block (once in 2^60
// look-ups), so its answers are hints to confirm with the writer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hash/digest.hpp"

namespace fdcache {

class PresenceTable {
  public:
    static constexpr std::size_t kBucketTags = 8;
    static constexpr std::size_t kBucketBytes = kBucketTags * sizeof(std::uint64_t);

    // `memory`: whole buckets, zero when empty, aligned to 8. Throws std::invalid_argument. Readers never
    // write.
    PresenceTable(void *memory, std::size_t nbytes);

    // Adds a block, unless both its buckets are full, which almost never happens in a half full table.
    void add(const Digest &digest);
    void remove(const Digest &digest);
    void clear();

    // Number of blocks; reads the whole table.
    std::size_t size() const;
    bool holds(const Digest &digest) const;
    // Number of consecutive blocks of a path that are present from `start` on. Assumes that all ancestors of
    // a present block are present.
    std::size_t run(std::span<const Digest> path, std::size_t start) const;

  private:
    std::uint64_t *bucket(std::uint64_t word) const { return memory_ + kBucketTags * (word % buckets_); }

    std::uint64_t *memory_;
    std::size_t buckets_;
};

}  // namespace fdcache
