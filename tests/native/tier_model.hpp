// A model of the tier: simple, slow, and nothing kept that can be recomputed.
//
// The tier chooses free slots, their generations, and how many entries it evicts ahead of need. The model
// takes its choice, checks that it was allowed, and continues from there. What a block cannot do throws
// Refused, with nothing changed.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "tier/tier.hpp"

namespace fdcache::tests {

struct Refused {};

class TierModel {
  public:
    static constexpr Slot kRoot = kNoSlot - 1;

    // A slot in use. Anonymous without a hash; pending with one until it is ready.
    struct Block {
        std::uint32_t generation = 0;
        LeaseId owner = 0;
        Digest hash{};  // zero: none
        Slot parent = kRoot;
        Digest parent_hash{};
        bool ready = false;
        bool withheld = false;
        bool quarantined = false;
        std::uint32_t hits = 0;
        std::uint64_t checksum = 0;
        std::uint32_t copies = 0;  // that read or write it
        Tenant tenant = 0;
        std::uint64_t idle_since = 0;  // a tick; 0: used
        std::uint32_t guards = 0;      // of an operation in progress

        bool findable() const { return !hash.is_zero(); }
        std::uint32_t holds() const { return copies + withheld + quarantined; }
    };

    // Unless `by_last_use`, any entry without children may be evicted.
    TierModel(std::uint32_t slots, double spare, bool by_last_use)
        : slots_(slots), spare_(spare), by_last_use_(by_last_use) {}

    LeaseId open_lease();
    bool release(LeaseId lease);
    // The blocks of one path. `exact` is false where the answer for hashes that are no path is the tier's
    // choice; `run` is its choice then.
    std::vector<Slot> match(LeaseId lease, std::span<const Digest> hashes, std::size_t start,
                            std::size_t known);
    void adopt_match(LeaseId lease, std::span<const Slot> run, std::size_t start, std::size_t known);
    bool is_exact(std::span<const Digest> hashes, std::size_t start) const;
    Presence presence(const Digest &hash) const;
    std::vector<Slot> ancestry(std::span<const Slot> slots, std::uint32_t levels) const;

    std::uint32_t reserve(LeaseId lease, std::uint32_t count, const Reservation &taken);
    std::uint32_t reserve_copies(LeaseId lease, std::span<const Digest> parents,
                                 std::span<const Digest> hashes, const CopyReservation &taken,
                                 std::vector<ReserveStatus> &status);
    // `gone`: the tier's choice of what copies read, after all that could be evicted.
    bool evict_copied(std::uint32_t count, const BlockList &gone);
    std::vector<CommitStatus> commit(LeaseId lease, const Digest &parent, std::span<const Digest> hashes,
                                     std::span<const Slot> slots);
    std::vector<PublishStatus> publish(LeaseId lease, std::span<const Digest> parents,
                                       std::span<const Digest> hashes, std::span<const Slot> slots,
                                       std::span<const std::uint8_t> copied,
                                       std::span<const std::uint64_t> checksums,
                                       std::span<const Tenant> tenants);
    void set_tenant_limit(Tenant tenant, std::uint32_t most);

    std::vector<std::uint8_t> complete(std::span<const Slot> slots, std::span<const std::uint8_t> copied,
                                       std::span<const std::uint64_t> checksums);
    void hold(std::span<const Slot> slots);
    void unhold(std::span<const Slot> slots);

    std::uint32_t drop(std::span<const Digest> hashes);
    std::vector<Slot> discard(std::span<const Slot> slots, bool quarantine);
    void quarantine(std::span<const Slot> slots);
    void withhold(std::span<const Slot> slots);
    void give_back(std::span<const Slot> slots);
    std::vector<std::uint8_t> restore(const FoundEntries &found, std::uint32_t generation);
    void reset();
    std::uint32_t resize(std::uint32_t slots);

    void record_events(std::size_t capacity);
    std::vector<TierEvent> take_events() { return std::exchange(events_, {}); }

    // --- what can be read off the state

    const std::map<Slot, Block> &used() const { return used_; }
    const std::vector<LeaseId> leases() const;
    std::uint32_t slots() const { return slots_; }
    std::uint32_t free() const { return slots_ - static_cast<std::uint32_t>(used_.size()); }
    std::uint64_t epoch() const { return epoch_; }
    std::uint64_t evictions() const { return evictions_; }
    const std::map<Tenant, std::uint32_t> &limits() const { return limits_; }
    Slot find(const Digest &hash) const;
    Slot find_ready(const Digest &hash) const;
    std::uint32_t pins(Slot slot) const;
    std::uint32_t children(Slot slot) const;
    std::uint32_t entries(Tenant tenant) const;
    // Number of entries that nothing but copies out of entries below them keeps from eviction.
    std::uint32_t above_copies() const;
    // The entries from the root down to `slot`.
    std::vector<Slot> path(Slot slot) const;
    // The evictable entries, the next one first; `kept` and their ancestors are left out.
    std::vector<Slot> eviction_order(const std::set<Slot> &kept = {}) const;

  private:
    struct Lease {
        std::uint64_t epoch;
        std::vector<Slot> pins;
    };

    Lease &lease_of(LeaseId lease);
    Lease &current_lease(LeaseId lease);
    Block &in_use(Slot slot);
    void check_computed(LeaseId lease, std::span<const Slot> slots);
    void check_copies(std::span<const Slot> slots, bool arriving);
    std::set<Slot> used_entries() const;
    void settle();
    void settle_path(Slot slot);
    void pin(LeaseId lease, Slot slot);
    void note(TierEvent::Kind kind, Slot slot);
    void link(Slot slot, const Digest &hash, Slot parent, Tenant tenant);
    void become_ready(Slot slot, std::uint64_t checksum = 0);
    void evict(Slot slot);
    void take(LeaseId owner, std::uint32_t count, const Reservation &taken, const std::set<Slot> &kept);
    bool has_tenant_room(Tenant tenant, Slot parent);
    std::vector<Slot> subtree(const std::set<Slot> &named) const;
    void remove_subtrees(std::vector<Slot> doomed);

    std::uint32_t slots_;
    double spare_;
    bool by_last_use_;
    std::map<Slot, Block> used_;
    std::map<LeaseId, Lease> leases_;
    std::map<Tenant, std::uint32_t> limits_;  // empty: tenants are off
    std::map<Slot, std::uint32_t> last_generation_;
    std::vector<TierEvent> events_;
    std::size_t event_capacity_ = 0;
    LeaseId opened_ = 0;
    std::uint64_t epoch_ = 0;
    std::uint64_t evictions_ = 0;
    std::uint64_t ticks_ = 0;
};

}  // namespace fdcache::tests
