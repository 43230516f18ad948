// A tier: fixed-size slots, a prefix-closed hash table over them, an eviction order, and leases.
//
// A slot is FREE, WRITING or READY. A READY slot is an entry: findable by its block hash, below a READY
// parent (or the root). A WRITING slot is pending (findable, a copy into it is under way) or anonymous
// (nobody can find it: it is being computed, it duplicates an entry, or a reset cut it off).
//
// Two counts keep a slot in place: pins belong to leases, holds belong to copies from plan to report. An
// entry is *used* while it is pinned or pending, or has a used child. What is not used stands in the eviction
// order, by the end of its last use. It is *busy*, and not evicted, while it is used or held, or has a busy
// child: a copy out of an entry keeps it there, but is no use of it.
//
// Every operation is all or nothing: what can fail (bad input, memory) comes before the first change.
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
#include <unordered_set>
#include <vector>

#include "hash/digest.hpp"
#include "tier/eviction.hpp"
#include "tier/free_runs.hpp"
#include "tier/hash_index.hpp"
#include "tier/presence.hpp"
#include "tier/tenants.hpp"

namespace fdcache {

using LeaseId = std::uint64_t;

enum class SlotState : std::uint8_t { kFree, kWriting, kReady };

struct StaleLease : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Who waits for a tier while another thread walks all of it does so by `wait`, which keeps no interpreter
// lock.
class TierMutex {
  public:
    void lock() {
        if (!mutex_.try_lock()) wait(mutex_);
    }
    void unlock() { mutex_.unlock(); }

    static inline void (*wait)(std::mutex &) = [](std::mutex &mutex) { mutex.lock(); };

  private:
    std::mutex mutex_;
};

// Parallel arrays that describe blocks; a zero parent digest stands for the root.
struct BlockList {
    std::vector<Slot> slots;
    std::vector<std::uint32_t> generations;
    std::vector<Digest> hashes;
    std::vector<Digest> parents;
    std::vector<std::uint32_t> hits;

    void reserve(std::size_t count) {
        slots.reserve(count);
        generations.reserve(count);
        hashes.reserve(count);
        parents.reserve(count);
        hits.reserve(count);
    }
};

struct MatchRun {
    std::vector<Slot> slots;
    std::vector<std::uint32_t> generations;
    std::vector<std::uint32_t> hits;
    bool pending = false;  // the block after the run is being copied into this tier
};

struct Reservation {
    std::vector<Slot> slots;
    std::vector<std::uint32_t> generations;
    BlockList evicted;          // what was dropped, some perhaps ahead of need, children before parents
    std::uint32_t missing = 0;  // slots that could not be had; nothing is reserved then
};

enum class Presence : std::uint8_t { kAbsent, kReady, kPending };

enum class ReserveStatus : std::uint8_t { kReserved, kReady, kPending, kNoParent };

struct CopyReservation : Reservation {
    std::vector<ReserveStatus> status;  // per hash; `slots` holds the reserved ones, in order
};

enum class CommitStatus : std::uint8_t { kStored, kDuplicate };

enum class PublishStatus : std::uint8_t { kStored, kDuplicate, kNoParent, kDropped, kOverLimit };

// Blocks whose bytes are there already, as a scan found them, in any order.
struct FoundEntries {
    std::span<const Slot> slots;
    std::span<const std::uint32_t> generations;
    std::span<const Digest> hashes;
    std::span<const Digest> parents;
    std::span<const std::uint64_t> checksums;
    std::span<const std::uint64_t> times;  // when each was written; empty where nobody knows
    std::span<const Tenant> tenants = {};  // of blocks below the root; empty: all are tenant 0's

    std::uint64_t time(std::size_t i) const { return times.empty() ? 0 : times[i]; }
};

struct TierEvent {
    enum class Kind : std::uint8_t { kStored, kRemoved, kCleared, kLost };
    Kind kind;
    Digest hash;
    Digest parent;
};

struct TierStats {
    std::uint32_t slots, free, writing, ready, pending, evictable, quarantined, withheld;
    std::uint64_t pins, holds, leases, epoch, evictions, lookups, memory_bytes;
};

struct NodeView {
    Slot slot, parent;
    Tenant tenant;
    std::uint32_t generation, children, pins, holds, hits, depth;
    SlotState state;
    bool findable;
    Digest hash;
    std::uint64_t checksum;
    double idle_seconds;   // since it was last found, or stored
    double ready_seconds;  // since it was stored
};

class Tier {
  public:
    // `extent`: no run of slots crosses a multiple of it; 0: there is one extent. `spare`: the share of the
    // slots up to which reservations may evict ahead of need, so that they find longer runs.
    explicit Tier(std::uint32_t slots, std::string_view eviction = "lru", std::uint32_t extent = 0,
                  double spare = 0);

    LeaseId open_lease();
    // False when the lease is unknown or was released before.
    bool release(LeaseId lease);

    // Pins under `lease` the leading run of `hashes` that is READY, from index `start` on. The first `known`
    // hashes were hit by the same request before, which counts once.
    MatchRun match(LeaseId lease, std::span<const Digest> hashes, std::size_t start, std::size_t known = 0);
    std::vector<Presence> contains(std::span<const Digest> hashes) const;

    // `count` anonymous slots for computing, all or nothing.
    Reservation reserve(LeaseId lease, std::uint32_t count);
    // Pending slots, each held by one copy, for those hashes that are absent and whose parent is READY or
    // reserved before them in the same call; all of these or nothing. Lease 0: they belong to nobody. No
    // block that the answer calls READY, and no parent, is evicted to make the room.
    CopyReservation reserve_copies(LeaseId lease, std::span<const Digest> parents,
                                   std::span<const Digest> hashes);
    // Anonymous slots of this lease become entries, in path order below `parent`. Stops at the first block
    // whose parent is not READY, whose hash is pending or stands below another parent, or whose slot a copy
    // still uses; the result has one status per block done.
    std::vector<CommitStatus> commit(LeaseId lease, const Digest &parent, std::span<const Digest> hashes,
                                     std::span<const Slot> slots);

    // Anonymous slots of this lease, filled elsewhere, become entries where they were `copied`, parents
    // first; whatever becomes of them the lease gives them up. Those not copied, of a lease from before a
    // reset, of a hash that is there already, or without a READY parent are freed.
    //
    // A block below the root is its tenant's, as `tenants` says (empty: tenant 0's), all below it too. One of
    // a tenant that has all it may have takes the place of the tenant's own coldest; where none can go, it is
    // freed.
    std::vector<PublishStatus> publish(LeaseId lease, std::span<const Digest> parents,
                                       std::span<const Digest> hashes, std::span<const Slot> slots,
                                       std::span<const std::uint8_t> copied,
                                       std::span<const std::uint64_t> checksums,
                                       std::span<const Tenant> tenants = {});
    // The most entries that a tenant may have from its next block on. The first call, on an empty tier, turns
    // tenants on; every number up to the largest named is one.
    void set_tenant_limit(Tenant tenant, std::uint32_t most);
    // Entries by tenant.
    std::vector<std::uint32_t> tenant_entries() const;
    // Takes entries, and all that hangs below them, out of the table; what is pinned or held stays until it
    // is not. Returns how many entries went.
    std::uint32_t drop(std::span<const Digest> hashes);

    // The report of a copy into pending slots, parents first. Returns which became READY.
    std::vector<std::uint8_t> complete(std::span<const Slot> slots, std::span<const std::uint8_t> copied,
                                       std::span<const std::uint64_t> checksums);
    // A copy out of these slots begins, ends. What pending slots wait for ends with `complete` alone.
    void hold(std::span<const Slot> slots);
    void unhold(std::span<const Slot> slots);

    // Those of `hashes` that are READY, in the order given.
    BlockList find(std::span<const Digest> hashes) const;
    // The entries `slots` and those above them, each once, parents first. A walk up ends `levels` above the
    // last of `slots` that it met, or at what is listed already.
    BlockList ancestry(std::span<const Slot> slots, std::uint32_t levels = UINT32_MAX) const;
    // The next `count` entries to be evicted, in that order.
    BlockList coldest(std::uint32_t count) const;
    // The READY entries with the most hits, those nearer to the root first.
    BlockList hottest(std::uint32_t count) const;
    // The READY entries that nobody has used for so long, if need be of one tenant.
    BlockList idle(std::uint32_t milliseconds, const Tenant *tenant) const;
    // The READY entries whose hash begins with these bytes.
    BlockList starting_with(std::span<const std::uint8_t> prefix) const;

    // Entries from a scan, in free slots; says which they became. Not those without a parent, nor a hash
    // that is there already. They join the eviction order as the warmest, by the newest block of a subtree.
    // New content of any slot gets a generation above `generation` and all those found.
    std::vector<std::uint8_t> restore(const FoundEntries &found, std::uint32_t generation = 0);
    // READY entries turned out bad: they and all below them leave, in use or not, and are listed. With
    // `quarantine` the slots themselves (not those below) are never given to anything again until a resize
    // or the end of the tier.
    BlockList discard(std::span<const Slot> slots, bool quarantine);
    // The same for slots that something uses, which fail: nothing gets them once that has ended.
    void quarantine(std::span<const Slot> slots);
    // Slots in use that nothing gets once that has ended, until they are given back.
    void withhold(std::span<const Slot> slots);
    void give_back(std::span<const Slot> slots);

    // Forgets every entry. Slots in use stay with their leases and copies until those end.
    void reset();
    // The number of slots from `slots` on that are in use and stand against the change; 0 when done.
    std::uint32_t resize(std::uint32_t slots);

    // From now on `table`, whose memory outlives the tier, says of every block whether it is READY here.
    void mirror(PresenceTable table);
    void record_events(std::size_t capacity);
    std::vector<TierEvent> take_events();

    TierStats stats() const;
    NodeView node(Slot slot) const;
    std::uint32_t available() const;
    // Every invariant that does not hold, in words; empty when all do.
    std::vector<std::string> check_integrity() const;

  private:
    static constexpr Slot kRoot = kNoSlot - 1;
    static constexpr std::uint32_t kGoodRun = 16;   // slots: a copy of so many records runs at full speed
    static constexpr std::size_t kFirstBatch = 32;  // of what is evicted ahead of need
    static constexpr std::size_t kMostAhead = 512;  // entries that one reservation evicts ahead of need

    struct Entry {
        std::uint64_t checksum = 0;
        LeaseId owner = 0;  // who took the slot; it alone may commit it
        std::uint32_t generation = 0;
        Slot parent = kNoSlot;
        std::uint32_t children = 0;
        std::uint32_t used_children = 0;
        std::uint32_t busy_children = 0;
        std::uint32_t pins = 0;
        std::uint32_t holds = 0;
        std::uint32_t hits = 0;
        std::uint32_t depth = 0;
        std::uint32_t touched_ms = 0;
        std::uint32_t ready_ms = 0;
        SlotState state = SlotState::kFree;
        bool findable : 1 = false;
        bool used : 1 = false;
        bool busy : 1 = false;
        bool withheld : 1 = false;
    };
    static_assert(sizeof(Entry) == 64, "one cache line");

    struct Lease {
        std::uint64_t epoch;
        std::vector<Slot> slots;  // one pin each, in the order taken

        void make_room(std::size_t pins) {
            if (slots.capacity() - slots.size() < pins)
                slots.reserve(std::max(slots.size() + pins, 2 * slots.capacity()));
        }
    };
    // Holds entries while a call makes room, so that they stay.
    class Kept {
      public:
        explicit Kept(Tier &tier) : tier_(tier) {}
        Kept(const Kept &) = delete;
        Kept &operator=(const Kept &) = delete;
        ~Kept() {
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

    Lease &lease_of(LeaseId lease);
    Lease &current_lease(LeaseId lease);
    void check_slot(Slot slot) const;
    static void check_hashes(std::span<const Digest> hashes);
    void check_tenants(std::span<const Tenant> tenants) const;
    void check_computed(LeaseId lease, std::span<const Slot> slots) const;
    void check_held(std::span<const Slot> slots, bool arriving);
    std::uint32_t now_ms() const;

    Slot find_ready(const Digest &digest) const;
    Slot resolve_parent(const Digest &parent) const;
    void refresh(Slot slot);
    void unlink_child(Slot parent, const Entry &child);
    void cut_off(Slot slot);
    std::vector<Slot> subtree(const std::vector<Slot> &named) const;
    void cut_out(const std::vector<Slot> &doomed);
    void pin(Lease &lease, Slot slot);
    void unpin(Slot slot);
    void free_slot(Slot slot);
    void free_if_unused(Slot slot);
    void link(Slot slot, const Digest &digest, Slot parent, Tenant tenant = 0);
    void make_ready(Slot slot);
    void forget(Slot slot);
    void order_add(Slot slot, bool busy);
    void order_remove(Slot slot);
    void order_set_busy(Slot slot, bool busy);
    bool make_tenant_room(Tenant tenant, Slot parent);
    void begin_hold(Slot slot);
    void end_hold(Slot slot);
    bool settle(Slot slot, bool copied, std::uint64_t checksum);
    void drop_pending(Slot slot);
    void evict(Slot slot);
    void make_room(std::uint32_t slots);
    void evict_above(std::uint32_t slots);
    std::uint32_t missing(std::size_t count) const;
    void evict_coldest(std::size_t count, std::vector<Slot> &victims, BlockList &evicted);
    std::vector<FreeRuns::Run> take_runs(std::uint32_t count, BlockList &evicted);
    void take_slots(std::uint32_t count, Reservation &out);
    void append(BlockList &list, Slot slot) const;
    void note(TierEvent::Kind kind, Slot slot);

    mutable TierMutex mutex_;
    std::vector<Entry> entries_;
    std::vector<Digest> digests_;
    HashIndex index_{digests_};
    std::unique_ptr<EvictionOrder> order_;
    Tenants tenants_;
    FreeRuns free_;
    const double spare_;
    std::unordered_map<LeaseId, Lease> leases_;
    std::optional<PresenceTable> mirror_;
    std::vector<TierEvent> events_;
    std::size_t event_capacity_ = 0;
    std::uint64_t next_lease_ = 1;
    std::uint64_t epoch_ = 0;
    std::uint64_t evictions_ = 0;
    std::uint64_t pins_ = 0;
    std::uint64_t holds_ = 0;
    std::uint32_t writing_ = 0;
    std::uint32_t quarantined_ = 0;  // slots that are out of use for good, each by a hold
    std::uint32_t withheld_ = 0;     // slots that are out of use for now, each by a hold
    std::uint32_t ready_ = 0;
    std::uint32_t first_generation_ = 0;  // of slots added by a resize: above any that was taken away
    mutable std::uint64_t lookups_ = 0;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace fdcache
