// Blocks whose parent is missing, in slots that are kept until it is there again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "hash/digest.hpp"
#include "tier/eviction.hpp"

namespace fdcache {

class Orphans {
  public:
    struct Orphan {
        Slot slot;
        Digest hash, parent;
    };

    bool empty() const { return orphans_.empty(); }
    std::uint32_t size() const { return static_cast<std::uint32_t>(orphans_.size()); }
    // Number of orphans whose slots nothing uses.
    std::uint32_t idle() const { return idle_; }
    bool is_idle(Slot slot) const;
    std::vector<Slot> slots() const;
    std::vector<Digest> parents() const;
    // kNoSlot if the block is no orphan.
    Slot find(const Digest &hash) const;
    // The orphans whose parent this is.
    std::vector<Slot> below(const Digest &parent) const;

    // Adds all or none, in eviction order, children before parents. They are not idle.
    void add(std::span<const Orphan> orphans);
    void remove(Slot slot);
    void set_idle(Slot slot, bool idle);
    // The next one to be evicted, or kNoSlot if none is idle.
    Slot first() const;
    void clear();

    // The missing blocks that orphans wait for; the call goes on where the last one ended, and returns at
    // most `count`, each once.
    std::vector<Digest> awaited(std::size_t count);

  private:
    struct Entry {
        Digest hash, parent;
        std::uint64_t turn;  // in the eviction order
        bool idle;
    };
    struct Before {
        bool operator()(const Digest &a, const Digest &b) const { return a.bytes < b.bytes; }
    };

    void insert(const Orphan &orphan);

    std::unordered_map<Slot, Entry> orphans_;
    std::unordered_map<Digest, Slot, DigestHash> by_hash_;
    std::unordered_multimap<Digest, Slot, DigestHash> by_parent_;
    std::map<std::uint64_t, Slot> turns_;
    std::set<Digest, Before> awaited_;  // parents that are no orphans themselves
    Digest last_;                       // of `awaited`
    std::uint64_t next_turn_ = 0;
    std::uint32_t idle_ = 0;
};

}  // namespace fdcache
