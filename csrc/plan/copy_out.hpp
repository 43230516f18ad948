// The way out: which blocks of a device cache are copied to the host, when, and in which order.
//
// The host tier is closed under prefixes, so a block is copied after its ancestors that the host lacks; the
// copies of those may still be in flight. Copies are ordered by plan. A backup is part of a later plan, so
// that the order of the compute stream puts it behind the step that computed the block. A block that is
// overwritten before is copied by the plan of that very step, which its compute waits for. Nothing is
// withheld but the slots that copies read, and only where the device cache is the scheduler's.
//
// Callers hold the manager's lock. A plan's copies end with `copies_that_may_end`, in any order of reports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_set>
#include <vector>

#include "hash/digest.hpp"
#include "plan/block_copies.hpp"
#include "plan/device_contents.hpp"
#include "plan/slot_queue.hpp"
#include "tier/device_index.hpp"
#include "tier/host_index.hpp"

namespace fdcache {

struct PlannedCopies {
    std::uint32_t planned = 0;
    std::uint32_t dropped = 0;         // blocks that found no room, for the first time
    std::uint32_t asked = 0;           // host slots asked for at once
    BlockList displaced;               // blocks that left the host to make room
    std::vector<std::uint64_t> after;  // plans in flight that read what is overwritten
};

class CopyOut {
  public:
    // Without `writes_back` blocks are wanted on the host as soon as they have `least_hits`; with it, once
    // they are evicted or among the next `clean_reserve` to be. The device outlives this.
    CopyOut(DeviceIndex &device, bool writes_back, std::uint32_t least_hits, std::size_t clean_reserve)
        : device_(device),
          writes_back_(writes_back),
          least_hits_(least_hits),
          clean_reserve_(clean_reserve) {}

    // Slots whose blocks are to be copied.
    SlotQueue &queue() { return queue_; }
    // The same, ahead of all and whatever the policy.
    SlotQueue &awaited() { return awaited_; }
    // Forgets what is queued, and what an engine has told of its device.
    void clear();
    // Copies out of these slots have ended.
    void ended(std::span<const Slot> sources);
    bool has_queue() const { return queue_.size() || awaited_.size(); }
    // True if the next plan may copy queued blocks: a service that is away has no capacity.
    bool has_work(HostIndex &target) { return queued(target) && target.capacity(); }
    // How many blocks of an offered path from `start` on, up to the first that waits for a plan or is being
    // copied, and how many of these the target has: the others were dropped.
    struct Ended {
        std::size_t count = 0, there = 0;
    };
    Ended ended(const DevicePath &path, std::size_t start, std::size_t stop, HostIndex &target);
    // Number of slots that wait for a plan.
    std::size_t queued(HostIndex &target);

    // Plans copies of wanted blocks whose slots are about to be overwritten.
    PlannedCopies evict(const BlockList &evicted, HostIndex &target, BlockCopies &copies);
    // The same, of blocks that are still on the device.
    PlannedCopies give_away(std::span<const Slot> slots, HostIndex &target, BlockCopies &copies);
    // Plans copies of queued blocks, while `in_flight` blocks are being copied. `is_patient`: a few blocks
    // may wait for more, since each plan has a cost of its own.
    PlannedCopies plan(HostIndex &target, std::size_t in_flight, bool is_patient, double now,
                       BlockCopies &copies);

  private:
    // A call that plans copies.
    struct Call {
        HostIndex &target;
        BlockCopies &copies;
        PlannedCopies &out;
        std::optional<double> now = {};  // blocks may wait for room; nothing: they are being overwritten
        std::unordered_set<Digest, DigestHash> dropped = {};
        BlockList late = {};  // blocks that wait for room
    };

    void take_offered(HostIndex &target);
    bool waits_for_more(bool is_patient);
    void back_up(SlotQueue &queue, std::uint32_t least_hits, std::size_t most, Call &call);
    void clean(std::size_t in_flight, std::size_t most, Call &call);
    BlockList wanted_from(SlotQueue &queue, std::uint32_t least_hits, std::size_t most, Call &call);
    BlockList copy_first(BlockList blocks, std::size_t most, Call &call);
    BlockList with_ancestors(BlockList blocks, const HostIndex &target, std::uint32_t most_levels) const;
    BlockList absent_above(const BlockList &blocks, std::span<const std::size_t> heads,
                           const HostIndex &target, std::uint32_t most_levels) const;
    BlockList with_few_ancestors(const BlockList &evicted, Call &call);
    BlockList that_fit(BlockList blocks, Call &call);
    void copy(const BlockList &blocks, Call &call);
    bool may_wait_for_room(const Call &call);
    void drop(const BlockList &blocks, std::size_t i, Call &call);

    DeviceIndex &device_;
    bool writes_back_;
    std::uint32_t least_hits_;
    std::size_t clean_reserve_;
    SlotQueue queue_, awaited_;
    std::uint32_t waits_ = 0;              // patient plans in a row that left blocks to later ones
    std::optional<double> starved_since_;  // the service has had no slot
    // write_back: evictions pay for copies ahead of need, so that a host tier smaller than the device cache
    // is not filled with the same blocks over and over.
    std::size_t evicted_ = 0, cleaned_ = 0;
    std::vector<std::uint32_t> dropped_;  // by slot: the generation whose block was counted as dropped
};

// 1 for each block of a transfer to the host that is not below a copy in flight of another transfer. The
// others end once those above them have: a tier takes a block below a parent that it has.
std::vector<std::uint8_t> copies_that_may_end(std::span<const Digest> hashes, std::span<const Digest> parents,
                                              const HostIndex &target);

}  // namespace fdcache
