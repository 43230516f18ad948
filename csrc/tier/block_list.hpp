// Lists of blocks, and what a tier answers about them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hash/digest.hpp"
#include "tier/eviction.hpp"

namespace fdcache {

// Reserves memory to append `count` elements, with room to spare, so that many small calls allocate rarely.
template <typename T>
void make_room(std::vector<T> &list, std::size_t count) {
    if (list.capacity() - list.size() < count)
        list.reserve(std::max(list.size() + count, 2 * list.capacity()));
}

// Parallel arrays that describe blocks. A zero parent digest is the root.
struct BlockList {
    std::vector<Slot> slots;
    std::vector<std::uint32_t> generations;
    std::vector<Digest> hashes;
    std::vector<Digest> parents;
    std::vector<std::uint32_t> hits;

    void make_room(std::size_t count) {
        fdcache::make_room(slots, count);
        fdcache::make_room(generations, count);
        fdcache::make_room(hashes, count);
        fdcache::make_room(parents, count);
        fdcache::make_room(hits, count);
    }

    void append(const BlockList &more) {
        const auto add = [](auto &column, const auto &values) {
            column.insert(column.end(), values.begin(), values.end());
        };
        add(slots, more.slots);
        add(generations, more.generations);
        add(hashes, more.hashes);
        add(parents, more.parents);
        add(hits, more.hits);
    }

    // Keeps the memory.
    void clear() {
        slots.clear();
        generations.clear();
        hashes.clear();
        parents.clear();
        hits.clear();
    }
};

struct Reservation {
    std::vector<Slot> slots;
    std::vector<std::uint32_t> generations;
    BlockList evicted;          // evicted entries, perhaps ahead of need, children before parents
    std::uint32_t missing = 0;  // slots that are not available; if not 0, none is reserved
};

enum class Presence : std::uint8_t { kAbsent, kReady, kPending };

enum class ReserveStatus : std::uint8_t { kReserved, kReady, kPending, kNoParent };

struct CopyReservation : Reservation {
    std::vector<ReserveStatus> status;  // per hash; `slots` has the reserved ones, in order

    // Keeps the memory.
    void clear() {
        slots.clear();
        generations.clear();
        evicted.clear();
        missing = 0;
        status.clear();
    }
};

struct MatchRun {
    std::vector<Slot> slots;
    std::vector<std::uint32_t> generations;
    std::vector<std::uint32_t> hits;
    bool pending = false;  // the block after the run is being copied into this tier
};

enum class CommitStatus : std::uint8_t { kStored, kDuplicate };

enum class PublishStatus : std::uint8_t { kStored, kDuplicate, kNoParent, kDropped, kOverLimit };

}  // namespace fdcache
