// The device blocks of the requests of one scheduler: match, allocate, advance, commit, finish.
//
// A step is one call for all its requests. Policy (which blocks are copied down, who waits for whom) belongs
// to the caller: with `Follow` the manager keeps what the policy needs to know until it is taken.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "plan/block_copies.hpp"
#include "plan/slot_queue.hpp"
#include "scheduler/loads.hpp"
#include "scheduler/request_state.hpp"
#include "tier/session.hpp"

namespace fdcache {

// What the caller's policy wants to know of matches, allocations and commits.
struct Follow {
    bool stored = false;     // slots of blocks that became entries
    bool evicted = false;    // blocks evicted for allocations
    bool owners = false;     // first blocks of tenants' requests
    std::uint32_t hits = 0;  // slots of blocks that reach this many hits; 0: none
};

struct Followed {
    std::vector<Slot> stored;
    std::vector<Slot> hit;
    BlockList evicted;
    std::vector<std::pair<Digest, std::string>> owners;

    bool empty() const { return stored.empty() && hit.empty() && evicted.slots.empty() && owners.empty(); }
};

struct BlockManagerStats {
    std::uint64_t lookups = 0, lookup_tokens = 0, device_hit_tokens = 0, host_hit_tokens = 0,
                  storage_hit_tokens = 0, deferred = 0, allocation_failures = 0;
};

// A tier did not do what it had promised.
struct BrokenPromise : std::logic_error {
    using std::logic_error::logic_error;
};

// How matches end.
struct MatchTerms {
    std::size_t cell = 1;           // blocks of one cell of the reuse grid
    double defer_timeout = 0;       // seconds that a request waits for another's copy
    std::function<double()> clock;  // seconds
    // True for a block that is pending because it is being read from storage: no request waits for it.
    std::function<bool(const Digest &)> is_reading;
    // How many of the blocks found on the host are worth loading, given those on the device; none: all.
    std::function<std::size_t(const RequestState &, std::size_t on_device, std::size_t on_host)>
        worth_loading;
};

enum class MatchEnd : std::uint8_t { kMatched, kDeferred, kUnanswered };

struct Matched {
    MatchEnd end = MatchEnd::kMatched;
    std::size_t on_device = 0, on_host = 0;  // blocks
    std::size_t ask_for = 0;                 // kUnanswered: leading blocks to ask the service for
};

enum class AllocationEnd : std::uint8_t { kDone, kDeferred, kNoBlocks };

struct Allocated {
    AllocationEnd end = AllocationEnd::kDone;
    std::uint32_t missing = 0;
};

// Device blocks reserved for what one request fetches from a peer: the last part of its load.
struct PlannedFetch {
    LoadPart part;
    std::vector<Slot> slots;
    std::vector<std::uint32_t> generations;
};

// The blocks that a step added to its requests, ascending by request.
struct AdvanceResult {
    std::vector<std::uint32_t> positions;  // of the request in the call, per block
    std::vector<Slot> blocks;
    std::vector<std::uint32_t> failed;  // positions of requests that got none
    std::uint32_t shortfall = 0;        // blocks that the first of them lacks

    bool operator==(const AdvanceResult &) const = default;
};

class BlockManager {
  public:
    // The tiers outlive the manager. `caches_prefixes`: false: nothing is found or published.
    BlockManager(Tier &tier, const BlockKeys &keys, bool caches_prefixes, const Follow &follow,
                 HostIndex *host = nullptr);

    const BlockKeys &keys() const { return keys_; }
    std::size_t block_size() const { return block_size_; }

    // --- keys --------------------------------------------------------------------------------------------

    // Returns true if the request's tokens are to be hashed with `keys()` first. Throws RequestStateError if
    // they were hashed for a manager with other keys.
    bool must_bind(const RequestState &request) const;
    // Uses another fingerprint from now on. Live requests publish no more.
    void change_fingerprint(const Digest &fingerprint);

    // --- checks: throw RequestStateError, change nothing ---------------------------------------------------

    bool owns(const RequestState &request) const { return request.owner_ == id_; }
    void check_idle(const RequestState &request) const;
    void check_allocate(const RequestState &request, std::uint64_t num_tokens) const;
    void check_commit(const RequestState &request, std::int64_t num_tokens) const;
    void check_advance(const RequestState &request) const;

    // How many leading blocks of a bound request a match may find: not the last token's, nor any above its
    // limit.
    std::size_t matchable(const RequestState &request) const;

    // --- a step ------------------------------------------------------------------------------------------

    // Begins a request that is idle and bound with the longest prefix that is cached on the device, then on
    // the host, and pins it. Or defers it, which releases everything, if the next block is on its way.
    Matched match(RequestState &request, const MatchTerms &terms, StorageUse storage = StorageUse::kNone);
    // Ends a match with the service's answer: a run, or nothing.
    Matched answer(RequestState &request, const MatchTerms &terms, HostRun run);
    // Counts blocks of a matched request's run on the host as read from storage.
    void set_from_storage(RequestState &request, std::size_t blocks) {
        request.host_run_.from_storage = blocks;
    }
    // Counts blocks of a matched request on the device as hits of the tier that they were loaded from for it.
    // Throws RequestStateError for more than it has there.
    void set_loaded_ahead(RequestState &request, std::uint32_t from_host, std::uint32_t from_storage);
    // Releases a request that waits for its reads from storage.
    void wait_for_reads(RequestState &request);

    // Extends the table to hold `num_tokens` tokens, and plans the loads of the run on the host. Nothing is
    // added if blocks are missing, or if the request has to be matched again, which releases it.
    Allocated allocate(RequestState &request, std::uint64_t num_tokens, BlockCopies *loads = nullptr);
    // Publishes the full blocks of the first `num_tokens` tokens, once no load is below them.
    void commit(RequestState &request, std::uint64_t num_tokens);
    // The decode step: after tokens were appended, extends the table of each request to hold all its tokens,
    // and commits all but the last `uncomputed`. Without `grow`, requests that need blocks get none.
    void advance(std::span<RequestState *const> requests, std::uint64_t uncomputed, bool grow,
                 AdvanceResult &out);
    // Releases every block of a live request.
    void release(RequestState &request);
    // As `release`, at the end of the request: its blocks were used.
    void finish(RequestState &request);
    // The slots added to the table since the match or the last call: [first, second).
    std::pair<std::size_t, std::size_t> take_added(RequestState &request);
    // Forgets the hits that a request has counted for: its next match is another use.
    void forget_hits(RequestState &request) { request.hit_blocks_ = 0; }

    // --- loads -------------------------------------------------------------------------------------------

    Loads &loads() { return loads_; }
    // The loads that have ended since the last call, but for those whose request was released. Publishes what
    // waited for them. A request whose load is overdue goes on waiting until it is released, and loads
    // nothing any more.
    std::vector<LoadPointer> take_ended();

    // --- fetches from peers ------------------------------------------------------------------------------

    // Extends a match by all further matchable blocks, which a peer has, and returns their number. Throws
    // RequestStateError unless it follows a match, once.
    std::size_t expect_from_peer(RequestState &request);
    // The fetches that allocations have planned since the last call.
    std::vector<PlannedFetch> take_fetches() { return std::exchange(open_fetches_, {}); }

    // Live requests keep their blocks and publish no more.
    void stop_publishing() { ++epoch_; }
    bool publishes(const RequestState &request) const { return request.publish_epoch_ == epoch_; }

    std::size_t blocks_for(std::uint64_t tokens) const {
        return tokens / block_size_ + (tokens % block_size_ != 0);
    }
    bool has_followed() const { return !followed_.empty(); }
    // Moves the blocks that became entries or reached `Follow::hits` to the queue.
    void queue_followed(SlotQueue &queue);
    Followed take_followed();
    const BlockManagerStats &stats() const { return stats_; }

  private:
    Matched end_match(RequestState &request, const MatchTerms &terms, std::size_t on_device, HostRun run,
                      bool device_pending, bool host_pending);
    Matched deferred(RequestState &request);
    std::size_t ready_on_device(std::span<const Digest> path);
    bool shorten(RequestState &request, std::size_t limit);
    void drop_host_run(RequestState &request);
    void drop_run(RequestState &request);
    std::size_t run_length(const RequestState &request) const {
        return request.host_run_.size() + request.peer_blocks_;
    }
    bool refresh_host_run(Tier::Session &tier, RequestState &request);
    std::uint32_t missing_for(Tier::Session &tier, std::size_t wanted);
    void plan_loads(Tier::Session &tier, RequestState &request, BlockCopies &loads);
    void count_hits(RequestState &request);
    bool begin(Tier::Session &tier, RequestState &request, std::size_t limit);
    bool extend_match(Tier::Session &tier, RequestState &request, std::size_t limit);
    std::uint32_t grow_to(Tier::Session &tier, RequestState &request, std::size_t blocks);
    void extend_table(Tier::Session &tier, RequestState &request, std::size_t position, bool grow,
                      AdvanceResult &out);
    void commit_to(Tier::Session &tier, RequestState &request, std::uint64_t num_tokens);
    void publish(Tier::Session &tier, RequestState &request);
    void end_load(RequestState &request, const Load &load);
    void forget(RequestState &request);

    Tier &tier_;
    HostIndex *host_;
    std::uint64_t id_;
    BlockKeys keys_;
    std::size_t block_size_;
    bool caches_prefixes_;
    Follow follow_;
    std::uint64_t epoch_ = 1;
    std::vector<Digest> former_;
    Followed followed_;
    BlockManagerStats stats_;
    Loads loads_;
    std::vector<PlannedFetch> open_fetches_;
    std::vector<Slot> slots_;  // of the last call; kept for its capacity
    std::vector<Digest> parents_;
    CopyReservation taken_;
    std::vector<CommitStatus> status_;
};

}  // namespace fdcache
