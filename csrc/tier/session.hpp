// Several operations on a tier under one lock, into memory of the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "tier/tier.hpp"

namespace fdcache {

// Holds the tier's lock while it exists; its operations are those of `Tier`. They append to vectors of the
// caller, which keep their capacity from call to call, and tell only what is asked for. All operations of a
// session happen at one time, that of the first one which needs it.
//
// Keep it short, and call no method of the tier itself meanwhile: that would wait for ever.
class Tier::Session {
  public:
    explicit Session(Tier &tier) : tier_(tier), lock_(tier.mutex_) {}

    LeaseId open_lease() { return tier_.add_lease(); }
    bool release(LeaseId lease) {
        if (!tier_.learns_) return tier_.end_lease(lease);
        if (tier_.is_loaded(lease)) return tier_.end_use(lease, nullptr);
        tier_.order_->set_time(tier_.now_ms());
        return tier_.end_lease(lease);
    }
    bool finish(LeaseId lease, const RequestEnd *end) { return tier_.end_use(lease, end); }

    // Appends the slots of the pinned run to `table`. Returns true if the block after the run is pending.
    bool match(LeaseId lease, std::span<const Digest> hashes, std::size_t start, std::size_t known,
               std::vector<Slot> &table) {
        return tier_.pin_run(lease, hashes, start, known, table);
    }

    // Appends reserved slots to `table`, and the entries evicted for them to `evicted` unless it is null.
    // Returns how many slots are missing; if not 0, none is reserved.
    std::uint32_t reserve(LeaseId lease, std::uint32_t count, std::vector<Slot> &table,
                          BlockList *evicted = nullptr) {
        return tier_.take_anonymous(lease, count, table, evicted);
    }

    // As `Tier::evict_copied`.
    bool evict_copied(std::uint32_t count, BlockList *evicted) { return tier_.make_way(count, evicted); }

    // Replaces the content of `out`.
    void reserve_copies(LeaseId lease, std::span<const Digest> parents, std::span<const Digest> hashes,
                        CopyReservation &out, bool below_pending = false) {
        tier_.take_pending(lease, parents, hashes, out, below_pending);
    }

    // Returns how many blocks were committed, and appends the status of each to `status` unless it is null.
    std::size_t commit(LeaseId lease, const Digest &parent, std::span<const Digest> hashes,
                       std::span<const Slot> slots, std::vector<CommitStatus> *status = nullptr) {
        return tier_.make_entries(lease, parent, hashes, slots, status);
    }

    Presence presence(const Digest &hash) const { return tier_.presence_of(hash); }
    std::uint32_t available() const { return tier_.free_or_evictable(); }
    // Of a slot that is in use.
    std::uint32_t generation(Slot slot) const { return tier_.entries_[slot].generation; }
    std::uint32_t hits(Slot slot) const { return tier_.entries_[slot].hits; }

  private:
    Tier &tier_;
    std::lock_guard<TierMutex> lock_;
};

}  // namespace fdcache
