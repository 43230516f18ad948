// The order in which a full tier evicts entries: what a tier tells its policy, and asks of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "hash/digest.hpp"

namespace fdcache {

using Slot = std::uint32_t;
inline constexpr Slot kNoSlot = 0xFFFFFFFFu;

// How a request that ended used the blocks of its path.
struct RequestEnd {
    std::uint64_t prompt_tokens = 0;
    std::uint64_t output_tokens = 0;
    std::uint32_t block_tokens = 0;
};

class ReuseTables;
struct Hint;

// What becomes of an entry that is evicted: the tier below loads a block that it holds, instead of computing
// it again. With a block it has all those above, but for the time in which a copy fails or a path is removed.
struct Demotion {
    std::function<std::uint64_t(std::span<const Slot>)> below;  // `HostIndex::holds` of entries
    std::function<std::size_t()> blocks;                        // `HostIndex::blocks`
    bool is_always_copied = false;  // every evicted entry is copied there, as far as it has room
};

// What an entry with nothing below it is worth where prefixes end at states alone: the records of the pages
// that need not be computed because of a state, in all and for each slot that is free without it. 0 for other
// entries.
struct EndValue {
    float saved = 0;
    float density = 0;
};

// What became of a hint. `kReplaced`: later hints of the call are about all its blocks.
enum class HintAnswer : std::uint8_t { kTaken, kNotLearning, kOverBudget, kNoBlock, kReplaced };

// Where a block is that a hint was taken for: waiting in the tier, used since then, evicted to make room, or
// gone without a trace: removed, or evicted long ago.
enum class HintFate : std::uint8_t { kWaiting, kUsed, kEvicted, kGone };

// The entries that are not used. The tier adds a child before its parent, and removes a parent when one of
// its children is used again. A *busy* entry (a copy reads it, or an entry below it) keeps its place but is
// skipped; the parent of a busy entry is busy.
class EvictionOrder {
  public:
    virtual ~EvictionOrder() = default;
    // `parent`: kNoSlot below the root.
    virtual void add(Slot slot, Slot parent, bool busy) = 0;
    virtual void remove(Slot slot) = 0;
    // Entries of one path, each the parent of the next one, the first one below `above`: as `add` of each
    // from the end on, none of them busy, and as `remove` of each from the beginning on.
    virtual void add_path(Slot above, std::span<const Slot> path) = 0;
    virtual void remove_path(std::span<const Slot> path) = 0;
    virtual void set_busy(Slot slot, bool busy) = 0;
    // Removes the first `count` entries that are not busy and appends them to `taken`. The caller checks that
    // there are as many. Changes nothing if it throws std::bad_alloc.
    virtual void take(std::uint32_t count, std::vector<Slot> &taken) = 0;
    // The entry that `take` will probably take next, or kNoSlot: a hint.
    virtual Slot next() const = 0;
    // Up to `count` entries that are not busy, in order.
    virtual std::vector<Slot> first(std::uint32_t count) const = 0;
    // All entries in order, including busy ones, whose place may be after the others. Walks all slots.
    virtual std::vector<Slot> all() const = 0;
    virtual bool holds(Slot slot) const = 0;
    // Number of entries that are not busy.
    virtual std::uint32_t size() const = 0;
    virtual void resize(std::uint32_t slots) = 0;
    virtual void clear() = 0;
    virtual std::size_t bytes() const = 0;

    // --- for policies that learn from every use ------------------------------------------------------------

    // False: the order depends on the calls above alone, and the tier makes none of those below.
    virtual bool learns() const { return false; }
    // The time of the calls that follow, in milliseconds: never an earlier one than before.
    virtual void set_time(std::uint64_t /* milliseconds */) {}
    virtual void set_demotion(Demotion) {}
    // There is a tier above, which lets through what it does not find.
    virtual void set_above() {}
    // Prefixes end at states: `value_of` tells what they save now.
    virtual void set_values(std::function<EndValue(Slot)>) {}
    // Blocks of one path, each the parent of the next one, became entries.
    virtual void arrive(std::span<const Slot>, std::span<const Digest>) {}
    // A block is no entry any more: evicted, or removed for another reason.
    virtual void leave(Slot, const Digest &, bool /* evicted */) {}
    // A use of these entries, which were not used, begins.
    virtual void begin(std::span<const Slot>) {}
    // A use of entries of one path ended, given from the end of the path on; `end` is null if no more is
    // known.
    virtual void use(std::span<const Slot>, const RequestEnd *) {}
    // What a client says of entries of one path, given from its beginning on.
    virtual HintAnswer hint(std::span<const Slot>, const Hint &) { return HintAnswer::kNotLearning; }
    // `slot`: kNoSlot if the block is no entry.
    virtual HintFate fate(Slot, const Digest &) { return HintFate::kGone; }
    // What was learned of reuse; null for policies that keep no such tables.
    virtual ReuseTables *tables() { return nullptr; }
    // Prefetches what `leave` reads for a block.
    virtual void prefetch(Slot, const Digest &) const {}
};

std::unique_ptr<EvictionOrder> make_eviction_order(std::string_view name);

}  // namespace fdcache
