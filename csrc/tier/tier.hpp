// A tier: fixed-size slots, a prefix-closed hash table over them, an eviction order, and leases.
//
// A slot is FREE, WRITING or READY. A READY slot is an entry: findable by its block hash, below a READY
// parent or the root. A WRITING slot is either pending (findable, a copy into it is in flight) or anonymous
// (not findable: it is being computed, it duplicates an entry, or a reset removed it).
//
// Two reference counts protect a slot: pins, owned by leases, and holds, owned by copies from plan to report.
// An *orphan* is a former entry whose parent is missing: its slot is WRITING and cannot be found, and it
// becomes an entry again when its parent does. Orphans are evicted before entries.
//
// An entry is *used* while it is pinned or pending, or has a used child. Entries that are not used are in the
// eviction order, by the end of their last use. An entry is *busy*, and is not evicted, while it is used or
// held, or has a busy child: a copy from an entry protects it without counting as a use.
//
// One structure serves three questions that cost a cache miss each when they are asked of a million blocks:
// what a path finds (the hash table, walked along the parents' neighbours), what may be evicted (the order,
// which has idle entries only, so that a busy one costs nothing there), and who needs a slot (the counts, in
// the entry itself). Entries form a tree by their parents. Only leaves of it are evicted, so that what a
// match finds is whole, and a parent counts its children instead of listing them.
//
// Every operation is all or nothing: it changes nothing before everything that can fail (bad arguments,
// memory) has succeeded.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "hash/digest.hpp"
#include "tier/device_index.hpp"
#include "tier/eviction.hpp"
#include "tier/free_runs.hpp"
#include "tier/hash_index.hpp"
#include "tier/hints.hpp"
#include "tier/host_index.hpp"
#include "tier/large_vector.hpp"
#include "tier/orphans.hpp"
#include "tier/presence.hpp"
#include "tier/reuse_tables.hpp"
#include "tier/tenants.hpp"

namespace fdcache {

enum class SlotState : std::uint8_t { kFree, kWriting, kReady };

struct StaleLease : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A mutex that calls `wait` if it is taken, so that a thread does not hold the interpreter lock while another
// thread walks the whole tier.
class TierMutex {
  public:
    void lock() {
        if (!mutex_.try_lock()) wait(mutex_);
        ++turn_;
    }
    void unlock() { mutex_.unlock(); }
    // Changes each time it is locked.
    std::uint64_t turn() const { return turn_; }

    static inline void (*wait)(std::mutex &) = [](std::mutex &mutex) { mutex.lock(); };

  private:
    std::mutex mutex_;
    std::uint64_t turn_ = 0;
};

// Blocks that a scan found in slots, in any order.
struct FoundEntries {
    std::span<const Slot> slots;
    std::span<const std::uint32_t> generations;
    std::span<const Digest> hashes;
    std::span<const Digest> parents;
    std::span<const std::uint64_t> checksums;
    std::span<const std::uint64_t> times;  // write time of each; empty if unknown
    std::span<const Tenant> tenants = {};  // of blocks below the root; empty: tenant 0

    std::uint64_t time(std::size_t i) const { return times.empty() ? 0 : times[i]; }
};

struct TierEvent {
    enum class Kind : std::uint8_t { kStored, kRemoved, kCleared, kLost };
    Kind kind;
    Digest hash;
    Digest parent;
};

struct TierStats {
    std::uint32_t slots, free, writing, ready, pending, evictable, quarantined, withheld, orphans, unjoined;
    std::uint64_t pins, holds, leases, epoch, evictions, lookups, contradictions, memory_bytes;
};

struct NodeView {
    Slot slot, parent;
    Tenant tenant;
    std::uint32_t generation, children, pins, holds, hits, depth;
    SlotState state;
    bool findable;
    Digest hash;
    std::uint64_t checksum;
    double idle_seconds;   // since it was last matched, or stored
    double ready_seconds;  // since it was stored
};

class Tier : public HostIndex, public DeviceIndex {
  public:
    // Several operations under one lock: tier/session.hpp.
    class Session;

    // `extent`: runs of slots cross no multiple of it; 0: there is one extent. `spare`: reservations evict
    // ahead of need, for longer runs, while less than this share of the slots is free.
    explicit Tier(std::uint32_t slots, std::string_view eviction = "lru", std::uint32_t extent = 0,
                  double spare = 0);

    // Tells the eviction order of the tier below, which must outlive this one. `is_always_copied`: every
    // evicted entry is copied there.
    void set_below(const HostIndex &below, bool is_always_copied);
    // Tells it that there is a tier above.
    void set_above();
    // Tells it that prefixes of pages with `page_records` records each end where a page has `states` of them
    // below it.
    void set_states(std::uint8_t page_records, std::uint8_t states);
    std::uint64_t holds(std::span<const Digest *const> digests) const override;
    std::size_t blocks() const override;

    // The rest of a host tier, of which `reserve` is `reserve_copies` without a lease.
    Found find_and_pin(std::span<const Digest> path, std::size_t start, StorageUse storage) override;
    void begin_load(LeaseId lease, std::span<const Slot> slots) override;
    void end_load(const EndedLoad &ended) override;
    void cancel_load(std::span<const Slot> slots) override { unhold(slots); }
    std::size_t room() const override { return stats().slots; }
    std::size_t capacity() const override { return stats().slots; }
    std::size_t longest_path() const override { return stats().slots; }
    CopyReservation reserve(std::span<const Digest> parents, std::span<const Digest> hashes,
                            bool below_pending) override {
        return reserve_copies(0, parents, hashes, below_pending);
    }

    // From now on the time is what the caller says last, in milliseconds. Time does not go back: it stands
    // still until the caller's has come as far again.
    void set_clock(std::uint64_t milliseconds);

    // Joins the entries with an unknown parent among these to the parents that are there.
    void join(std::span<const Digest> hashes, std::span<const Digest> parents) override;

    LeaseId open_lease();
    // Releases everything the lease owns. Returns false if it is unknown or was released before. The eviction
    // order learns that the entries of a run were used if some were loaded.
    bool release(LeaseId lease) override;
    // As `release`, and the eviction order learns that the lease's entries were used. `end`: null if no more
    // is known of the request.
    bool finish(LeaseId lease, const RequestEnd *end = nullptr);

    // What a client says of the READY ones of these blocks of one path, in path order. Each block takes the
    // last hint about it.
    std::vector<HintTaken> hint(std::span<const Digest> hashes, std::span<const HintRange> hints);
    // What became of blocks that a hint was taken for.
    std::vector<HintFate> hint_fates(std::span<const Digest> hashes) const;

    // Pins, for `lease`, the leading run of READY blocks from index `start` on. Adds a hit to each block
    // except the first `known`, which the same request has matched before. Runs whose parent was unknown are
    // joined to those that the hashes show above them. Hashes that contradict the paths of this tier find
    // nothing, and are counted.
    MatchRun match(LeaseId lease, std::span<const Digest> hashes, std::size_t start, std::size_t known = 0);
    std::vector<Presence> contains(std::span<const Digest> hashes) const override;

    // Reserves `count` anonymous slots to compute into.
    Reservation reserve(LeaseId lease, std::uint32_t count);
    // Reserves a pending slot, held by one copy, for each hash that is absent and whose parent is READY or
    // reserved earlier in this call. Lease 0: no lease owns the slots. Evicts no block that the result calls
    // READY, and no parent of one. `below_pending`: the copy of a parent may be in flight as well; unless
    // that one has become READY before it, the block is dropped in the end. The blocks are of one tenant:
    // `tenant`, unless the first one is below a block of another. Beyond its limit its own blocks are
    // evicted, and what there is still no room for is missing.
    CopyReservation reserve_copies(LeaseId lease, std::span<const Digest> parents,
                                   std::span<const Digest> hashes, bool below_pending = false,
                                   Tenant tenant = 0);
    // Makes `count` more entries evictable than are, by evicting those that nothing but copies keep: the
    // slots that copies read are free once they end. Evicts all that can be evicted first. Returns false, and
    // changes nothing, if there are not as many above the copies.
    bool evict_copied(std::uint32_t count, BlockList *evicted = nullptr);
    // Turns anonymous slots of this lease into entries, in path order below `parent`. Stops at the first
    // block whose parent is not READY, whose hash is pending or below another parent, or whose slot a copy
    // still uses. Returns one status per committed block.
    std::vector<CommitStatus> commit(LeaseId lease, const Digest &parent, std::span<const Digest> hashes,
                                     std::span<const Slot> slots);

    // Turns anonymous slots of this lease that another process has filled into entries if they were `copied`,
    // parents first. The lease gives up all of them. Frees slots that were not copied, of a lease from before
    // a reset, of a hash that is present, without a READY parent, or with pending children.
    //
    // `tenants`: of the blocks below the root (empty: tenant 0), inherited by the blocks below them. A tenant
    // at its limit evicts its own coldest leaf for each new block, or the block's slot is freed.
    std::vector<PublishStatus> publish(LeaseId lease, std::span<const Digest> parents,
                                       std::span<const Digest> hashes, std::span<const Slot> slots,
                                       std::span<const std::uint8_t> copied,
                                       std::span<const std::uint64_t> checksums,
                                       std::span<const Tenant> tenants = {});
    // Limits the entries of a tenant, from its next block on. The first call, on an empty tier, enables
    // tenants; all numbers up to the largest one are tenants.
    void set_tenant_limit(Tenant tenant, std::uint32_t most);
    // Number of entries by tenant.
    std::vector<std::uint32_t> tenant_entries() const;
    // Removes entries and pending blocks, and everything below them, and returns their slots. Slots that are
    // pinned or held are freed once they are not.
    std::vector<Slot> drop(std::span<const Digest> hashes);
    // Those of these slots that are free.
    std::vector<Slot> free_among(std::span<const Slot> slots) const;
    // The slots that `drop` would remove.
    std::vector<Slot> below(std::span<const Digest> hashes) const;

    // Reports copies into pending slots, parents first. Returns 1 for each that became READY.
    std::vector<std::uint8_t> complete(std::span<const Slot> slots, std::span<const std::uint8_t> copied,
                                       std::span<const std::uint64_t> checksums) override;
    // Starts and ends a copy out of these slots. The copy into a pending slot ends with `complete` only.
    void hold(std::span<const Slot> slots) override;
    void unhold(std::span<const Slot> slots) override;

    // As `hold`, of the READY ones of these blocks, which are returned, at most `most`.
    BlockList hold_ready(std::span<const Digest> hashes, std::size_t most);

    // The READY blocks, in the order of `hashes`.
    BlockList find(std::span<const Digest> hashes) const;
    // The entries in `slots` and their ancestors, each once, parents first. A walk up ends `levels` above the
    // last of `slots` that it met, or at an entry listed before.
    BlockList ancestry(std::span<const Slot> slots, std::uint32_t levels = UINT32_MAX) const;
    // The next `count` entries to be evicted, in order.
    BlockList coldest(std::uint32_t count) const override;
    // The READY entries with the most hits; of equal ones, those nearer to the root first.
    BlockList hottest(std::uint32_t count) const;
    // The READY entries not matched for this long, of one tenant or all.
    BlockList idle(std::uint64_t milliseconds, const Tenant *tenant) const;
    // The READY entries whose hash starts with these bytes.
    BlockList starting_with(std::span<const std::uint8_t> prefix) const;

    // Creates entries from a scan, in free slots, and returns 1 for each one created. Skips blocks without a
    // parent and hashes that are present. The entries join the eviction order as the warmest, ordered by the
    // newest block of their subtree. Later content of any slot gets a generation above `generation` and all
    // those found. `keep_orphans`: blocks without a parent become orphans.
    std::vector<std::uint8_t> restore(const FoundEntries &found, std::uint32_t generation = 0,
                                      bool keep_orphans = false);
    // Removes bad READY entries and everything below them, in use or not, and returns them. `quarantine`
    // takes the slots themselves (not those below) out of use for good. `keep_orphans`: the READY entries
    // below become orphans. Bad orphans are removed alone.
    BlockList discard(std::span<const Slot> slots, bool quarantine, bool keep_orphans = false);
    // The missing blocks that orphans wait for, at most `count`; the call goes on where the last one ended.
    std::vector<Digest> awaited(std::size_t count);
    std::uint32_t num_orphans() const;
    // Evicts every orphan, and returns the slots.
    std::vector<Slot> drop_orphans();
    // Takes slots in use out of use for good, once nothing uses them.
    void quarantine(std::span<const Slot> slots);
    // Takes slots in use out of use until `give_back`, once nothing uses them.
    void withhold(std::span<const Slot> slots);
    void give_back(std::span<const Slot> slots);

    // Removes every entry. Slots in use stay with their leases and copies until those end.
    void reset();
    // What the eviction order has learned: nothing, if it does not learn. `load_reuse` returns false, and
    // changes nothing, for what another version has saved.
    std::optional<ReuseTables> reuse() const;
    std::vector<std::uint8_t> save_reuse() const;
    bool load_reuse(std::span<const std::uint8_t> saved);
    // Changes the number of slots. If slots to remove are in use, returns how many and changes nothing.
    std::uint32_t resize(std::uint32_t slots);

    // Keeps the READY blocks in `table` from now on. Its memory must outlive the tier.
    void mirror(PresenceTable table);
    void record_events(std::size_t capacity);
    std::vector<TierEvent> take_events();

    TierStats stats() const;
    NodeView node(Slot slot) const;
    std::uint32_t available() const;
    // Number of entries that `evict_copied` makes evictable.
    std::uint32_t above_copies() const;
    BlockList entries_in(std::span<const Slot> slots) const override;
    BlockList above(const BlockList &blocks, std::span<const std::size_t> which,
                    std::uint32_t levels) const override;
    std::uint32_t depth(Slot slot) const override;
    std::uint32_t num_slots() const override;
    std::size_t most_held() const override { return std::max<std::uint32_t>(num_slots() / 2, 1); }
    // The invariants that do not hold, in words.
    std::vector<std::string> check_integrity() const;

  private:
    static constexpr Slot kRoot = kNoSlot - 1;
    static constexpr std::uint32_t kGoodRun = 16;   // slots; a copy of this many records runs at full speed
    static constexpr std::size_t kFirstBatch = 32;  // entries in the first batch evicted ahead of need
    static constexpr std::size_t kMostKeptPins = 4096;  // that a released lease keeps memory for
    static constexpr std::size_t kAhead = 16;           // blocks between a prefetch and its use
    static constexpr std::uint32_t kMostSaved = 64;  // pages above states that are looked at for their value
    static constexpr std::size_t kMostAhead = 512;   // entries that one reservation evicts ahead of need

    struct alignas(64) Entry {
        std::uint64_t checksum = 0;
        union {
            LeaseId owner = 0;       // WRITING: the lease that may commit the slot
            std::uint64_t ready_ms;  // READY
        };
        std::uint64_t touched_ms = 0;
        std::uint32_t generation = 0;
        Slot parent = kNoSlot;
        std::uint32_t children = 0;
        std::uint32_t used_children = 0;
        std::uint32_t busy_children = 0;
        std::uint32_t pins = 0;
        std::uint32_t holds = 0;
        std::uint32_t hits = 0;
        std::uint32_t depth = 0;  // below the beginning of the run that it came with
        SlotState state = SlotState::kFree;
        bool findable : 1 = false;
        bool used : 1 = false;
        bool busy : 1 = false;
        bool withheld : 1 = false;
        bool quarantined : 1 = false;
        bool orphan : 1 = false;
        bool unjoined : 1 = false;  // below the root because its parent is unknown

        // Holds that no copy ends.
        std::uint32_t kept() const { return std::uint32_t{withheld} + std::uint32_t{quarantined}; }
        // True if nothing but copies out of entries below it keeps it from eviction.
        bool is_above_copies() const { return busy && !used && !holds; }
    };
    static_assert(sizeof(Entry) == 64, "one cache line");

    struct Lease {
        std::uint64_t epoch;
        std::vector<Slot> slots;  // one pin each, in the order taken
        bool is_loaded = false;   // blocks of it were loaded
    };
    // Holds entries for a scope, so that making room does not evict them.
    class ScopedHolds {
      public:
        explicit ScopedHolds(Tier &tier) : tier_(tier) {}
        ScopedHolds(const ScopedHolds &) = delete;
        ScopedHolds &operator=(const ScopedHolds &) = delete;
        ~ScopedHolds() {
            for (const Slot slot : slots_) tier_.end_hold(slot);
        }
        void reserve(std::size_t count) { slots_.reserve(count); }
        void add(Slot slot) {
            slots_.push_back(slot);
            tier_.begin_hold(slot);
        }

      private:
        Tier &tier_;
        std::vector<Slot> slots_;
    };

    LeaseId add_lease();
    bool end_lease(LeaseId lease);
    bool is_loaded(LeaseId lease) const;
    bool end_use(LeaseId lease, const RequestEnd *end);
    void path_of(const Lease &lease);
    bool pin_run(LeaseId lease, std::span<const Digest> hashes, std::size_t start, std::size_t known,
                 std::vector<Slot> &table);
    bool make_way(std::uint32_t count, BlockList *evicted);
    void evict_held(Slot slot);
    void evict_held_leaves(std::uint32_t enough, BlockList *evicted);
    Slot end_by_halves(std::span<const Digest> hashes, std::size_t start, std::size_t &stop) const;
    Slot end_one_by_one(std::span<const Digest> hashes, std::size_t start, std::size_t &stop) const;
    bool fill_run(Slot last, std::span<const Digest> hashes, std::span<Slot> run);
    bool fill_ancestors(Slot last, std::span<const Digest> hashes, std::span<Slot> run) const;
    std::size_t first_own(std::span<const Digest> hashes, std::span<const Slot> run) const;
    std::uint32_t take_anonymous(LeaseId lease, std::uint32_t count, std::vector<Slot> &table,
                                 BlockList *evicted);
    void take_pending(LeaseId lease, std::span<const Digest> parents, std::span<const Digest> hashes,
                      CopyReservation &out, bool below_pending, Tenant tenant = 0);
    std::size_t make_entries(LeaseId lease, const Digest &parent, std::span<const Digest> hashes,
                             std::span<const Slot> slots, std::vector<CommitStatus> *status);
    Presence presence_of(const Digest &hash) const;
    std::uint32_t free_or_evictable() const { return free_.size() + orphans_.idle() + order_->size(); }

    Lease &lease_of(LeaseId lease);
    Lease &current_lease(LeaseId lease);
    void check_slot(Slot slot) const;
    static void check_hashes(std::span<const Digest> hashes);
    void check_tenants(std::span<const Tenant> tenants) const;
    void check_computed(LeaseId lease, std::span<const Slot> slots) const;
    void check_held(std::span<const Slot> slots, bool arriving);
    std::uint64_t now_ms() const;

    // Prefetches what a match or an eviction reads of an entry; of none, nothing.
    void prefetch_entry(Slot slot) const {
        if (slot == kNoSlot) return;
        __builtin_prefetch(&entries_[slot], 1);
        __builtin_prefetch(&digests_[slot]);
    }
    Slot find_ready(const Digest &digest) const;
    Slot resolve_parent(const Digest &parent) const;
    void refresh(Slot slot);
    void unlink_child(Slot parent, const Entry &child);
    void make_anonymous(Slot slot);
    std::vector<Slot> subtree(const std::vector<Slot> &named) const;
    std::vector<Slot> subtrees_of(std::span<const Digest> hashes) const;
    void remove_subtrees(const std::vector<Slot> &doomed);
    void pin(Lease &lease, Slot slot);
    void pin_path(Lease &lease, std::span<const Slot> path, std::size_t known);
    void unpin(Slot slot);
    std::size_t unpin_path(std::span<const Slot> pinned);
    void free_slot(Slot slot);
    void free_if_unused(Slot slot);
    void link(Slot slot, const Digest &digest, Slot parent, Tenant tenant = 0, bool is_unjoined = false);
    void set_unjoined(Slot slot, bool is_unjoined);
    bool join(Slot slot, Slot parent);
    void join_to(Slot slot, const Digest &parent);
    Digest parent_of(const Entry &entry) const {
        if (entry.parent != kRoot) return digests_[entry.parent];
        return entry.unjoined ? Digest::unknown() : Digest{};
    }
    void make_ready(Slot slot);
    void arrive(std::span<const Slot> path, std::span<const Digest> hashes);
    void arrive(std::span<const Slot> path);
    void add_entry(Slot slot);
    void remove_entry(Slot slot);
    void order_add(Slot slot, bool busy);
    void order_remove(Slot slot);
    void order_set_busy(Slot slot, bool busy);
    bool make_tenant_room(Tenant tenant, Slot parent);
    void evict_of_tenant(Tenant tenant, std::uint32_t count, BlockList *evicted = nullptr);
    void keep_below(const std::vector<Slot> &named, const std::vector<Slot> &doomed);
    void adopt_orphans(Slot slot);
    void end_orphan(Slot slot);
    void evict_orphans(std::uint32_t count);
    void begin_hold(Slot slot);
    void end_hold(Slot slot);
    bool may_be_ready(Slot slot) const;
    void drop_pending(Slot slot);
    void evict(Slot slot);
    EndValue value_of(Slot slot) const;
    Slot page_of_states(Slot slot) const;
    bool has_states(Slot page) const { return find_ready(digests_[page].marked(page_records_)) != kNoSlot; }
    void reserve_memory(std::uint32_t slots);
    void evict_above(std::uint32_t slots);
    std::uint32_t missing(std::size_t count) const;
    void evict_coldest(std::size_t count, BlockList *evicted);
    void take_runs(std::uint32_t count, BlockList *evicted);
    void take_slots(std::uint32_t count, const Entry &fresh, std::vector<Slot> &table, BlockList *evicted);
    void append(BlockList &list, Slot slot) const;
    void publish_event(TierEvent::Kind kind, Slot slot) {
        if (mirror_ || event_capacity_) tell(kind, slot);
    }
    void tell(TierEvent::Kind kind, Slot slot);

    mutable TierMutex mutex_;
    LargeVector<Entry> entries_;
    LargeVector<Digest> digests_;
    HashIndex index_{digests_};
    std::unique_ptr<EvictionOrder> order_;
    const bool learns_;  // the eviction order is told of arrivals and uses
    Tenants tenants_;
    Orphans orphans_;
    FreeRuns free_;
    const double spare_;
    // Of one reservation; kept for their memory.
    std::vector<Slot> victims_, path_;
    std::vector<FreeRuns::Run> vacated_, taken_;
    std::unordered_map<LeaseId, Lease> leases_;
    std::vector<std::unordered_map<LeaseId, Lease>::node_type> spare_leases_;  // for their memory
    std::optional<PresenceTable> mirror_;
    std::vector<TierEvent> events_;
    std::size_t event_capacity_ = 0;
    std::uint64_t next_lease_ = 1;
    std::uint64_t epoch_ = 0;
    std::uint64_t evictions_ = 0;
    std::uint64_t pins_ = 0;
    std::uint64_t holds_ = 0;
    std::uint32_t writing_ = 0;
    std::uint32_t quarantined_ = 0;  // slots out of use for good, each with a hold
    std::uint32_t withheld_ = 0;     // slots out of use for now, each with a hold
    std::uint32_t ready_ = 0;
    std::uint32_t above_copies_ = 0;
    std::uint32_t unjoined_ = 0;        // entries and pending slots whose parent is unknown
    std::uint64_t contradictions_ = 0;  // look-ups of hashes that are no path here
    std::uint8_t page_records_ = 0, states_ = 0;
    std::uint32_t least_generation_ = 0;  // later content of any slot has one above it
    mutable std::uint64_t lookups_ = 0;
    std::optional<std::uint64_t> clock_ms_;  // of the caller
    mutable std::uint64_t now_ms_ = 0;       // as it was read last,
    mutable std::uint64_t timed_turn_ = 0;   // in this turn of the mutex
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace fdcache
