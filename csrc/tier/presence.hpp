// The blocks of a tier and their slots, in memory shared with other processes: one writer, any number of
// readers, no locks.
//
// A control line, then buckets of eight 64-bit tags and the eight places that belong to them, one cache line
// each. A block's digest selects two buckets and a tag, which is stored in the emptier one. A reader may see
// a change late, or the tag of another block (once in 2^60 look-ups), so its answers are hints.
//
// The version in the control line changes with every removal, and is odd while the writer removes blocks or
// lets no reader pin any. What was read under one even version was there together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "hash/digest.hpp"
#include "tier/eviction.hpp"

namespace fdcache {

// Where a block of the tier is. `unverified`: nothing has verified the bytes of the record.
struct Place {
    Slot slot;
    std::uint32_t generation;
    bool unverified = false;
};

class PresenceTable {
  public:
    static constexpr std::size_t kBucketTags = 8;
    static constexpr std::size_t kBucketBytes = 2 * kBucketTags * sizeof(std::uint64_t);
    static constexpr std::size_t kControlBytes = kBucketBytes;

    // `memory`: the control line and whole buckets, zero when empty, aligned to 8. Throws
    // std::invalid_argument. Readers never write.
    PresenceTable(void *memory, std::size_t nbytes);

    // Adds a block, unless both its buckets are full, which almost never happens in a half full table.
    void add(const Digest &digest, const Place &place);
    void remove(const Digest &digest);
    void clear();
    void set_unverified(const Digest &digest, bool unverified);
    // Makes the version odd, and even again. Both do nothing if it is.
    void close();
    void open();

    // Number of blocks; reads the whole table.
    std::size_t size() const;
    // The size as a sample of the buckets tells it, in a time that does not grow with the table.
    std::size_t estimated_size() const;
    std::uint64_t version() const;
    bool holds(const Digest &digest) const { return find(digest) != nullptr; }
    std::optional<Place> place(const Digest &digest) const;
    // Number of consecutive blocks of a path that are present from `start` on. Assumes that all ancestors of
    // a present block are present.
    std::size_t run(std::span<const Digest> path, std::size_t start) const;
    void prefetch(const Digest &digest) const;
    // What `holds` reads.
    void prefetch_tags(const Digest &digest) const;

  private:
    std::uint64_t *bucket(std::uint64_t word) const { return buckets_ + 2 * kBucketTags * (word % count_); }
    std::uint64_t *find(const Digest &digest) const;
    std::uint64_t &version_word() const { return *(buckets_ - kControlBytes / sizeof(std::uint64_t)); }

    std::uint64_t *buckets_ = nullptr;
    std::size_t count_ = 0;
};

}  // namespace fdcache
