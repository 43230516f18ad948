// Write policies for a device cache that an engine owns: which of its blocks are copied to the host, and
// when.
//
// No device block is held. A backup is part of a later plan, so that the order of the compute stream puts it
// behind the step that computed the block. A block that is given away before is copied by the plan of that
// very step, which its compute waits for. The host tier is closed under prefixes: a block is copied after its
// uncovered ancestors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "plan/backup_planner.hpp"
#include "plan/block_copies.hpp"
#include "plan/device_contents.hpp"

namespace fdcache {

// `after`: plans in flight that read device blocks which are given away.
struct PlannedCopies : PlannedBackups {
    std::vector<std::uint64_t> after;
};

class CopyOut {
  public:
    // Without `writes_back` blocks are wanted below as soon as they have `least_hits`; with it, once they are
    // given away or among the next `clean_reserve` to be.
    CopyOut(bool writes_back, std::uint32_t least_hits, std::size_t clean_reserve)
        : writes_back_(writes_back), least_hits_(least_hits), clean_reserve_(clean_reserve) {}

    const DeviceContents &contents() const { return contents_; }

    // Takes an offer of the blocks of a path from `start` on. Offers are looked at together, once they
    // matter.
    void offered(const std::shared_ptr<const DevicePath> &path, std::size_t start, std::size_t counted);
    // Copies wanted blocks before their device blocks are overwritten, and forgets them.
    PlannedCopies given_away(std::span<const DeviceBlock> ids, HostIndex &target, BlockCopies &copies,
                             const std::function<bool(std::uint64_t)> &is_in_flight);
    void forget_blocks(std::span<const DeviceBlock> ids, const HostIndex &target);
    // Forgets every block and what is queued.
    void forget();
    // Which blocks the engine gives away next, for the clean reserve of write_back.
    void next_evicted(std::span<const DeviceBlock> ids);

    // Number of blocks that wait for a plan.
    std::size_t queued(const HostIndex &target);
    // True if the next plan may copy blocks, or offers have not been looked at.
    bool has_queue() const {
        return !offers_.empty() || !queue_.empty() || !coldest_.empty() || (may_retry_ && !waiting_.empty());
    }
    // True if the next plan may copy queued blocks.
    bool has_work(const HostIndex &target);
    // Plans backups of queued blocks, while `in_flight` blocks are being backed up.
    PlannedCopies plan(HostIndex &target, std::size_t in_flight, bool is_patient, double now,
                       BlockCopies &copies);
    // Notes which device blocks a plan reads.
    void sent(std::uint64_t plan, std::span<const std::span<const DeviceBlock>> read);
    // Lets blocks go on whose parents were being copied.
    void copies_ended() { may_retry_ = true; }

  private:
    using Ids = std::vector<DeviceBlock>;

    // A call that plans copies.
    struct Call {
        HostIndex &target;
        BlockCopies &copies;
        PlannedCopies &out;
        std::optional<double> now;  // of backups; the blocks are given away without
    };

    void take_offers(const HostIndex &target);
    void keep_wanted(Ids &ids, const HostIndex &target) const;
    // A patient plan leaves a few blocks to a later one: each plan has a cost of its own.
    bool waits_for_more(bool is_patient);
    void back_up(std::size_t most, Call &call);
    void clean(std::size_t most, Call &call);
    Ids with_ancestors(Ids ids, const HostIndex &target, std::size_t most = SIZE_MAX) const;
    Ids uncovered_ancestors(DeviceBlock id, const HostIndex &target) const;
    // Plans copies of blocks, parents first; returns those that wait for copies of their parents.
    Ids copy(Ids ids, Call &call);
    void no_room(std::span<const DeviceBlock> ids, Call &call);
    Ids waiting_of(Ids ids, Call &call);
    void drop(std::span<const DeviceBlock> ids, Call &call);
    void set_queued(std::span<const DeviceBlock> ids, bool is_queued);
    std::vector<Digest> hashes_of(std::span<const DeviceBlock> ids) const;
    std::vector<Digest> parents_of(std::span<const DeviceBlock> ids) const;

    bool writes_back_;
    std::uint32_t least_hits_;
    std::size_t clean_reserve_;
    DeviceContents contents_;
    std::vector<Offer> offers_;
    std::deque<Ids> queue_;
    std::deque<Ids> waiting_;  // for copies of their parents
    Ids coldest_;
    std::vector<std::uint64_t> reading_;  // plans that read the device and may be in flight
    bool may_retry_ = false;
    std::uint32_t waits_ = 0;
    std::optional<double> starved_since_;  // the service has had no slot
};

}  // namespace fdcache
