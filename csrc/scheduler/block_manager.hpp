// The device blocks of the requests of one scheduler: match, allocate, advance, commit, finish.
//
// A step is one call for all its requests. Policy (which blocks are copied down, who waits for whom) belongs
// to the caller: with `Follow` the manager keeps what the policy needs to know until it is taken.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/request_state.hpp"
#include "tier/session.hpp"

namespace fdcache {

// What the caller's policy wants to know of matches, allocations and commits.
struct Follow {
    bool stored = false;     // hashes of blocks that became entries
    bool evicted = false;    // blocks evicted for allocations
    bool owners = false;     // first blocks of tenants' requests
    std::uint32_t hits = 0;  // hashes of blocks that reach this many hits; 0: none
};

struct Followed {
    std::vector<Digest> stored;
    std::vector<Digest> hit;
    BlockList evicted;
    std::vector<std::pair<Digest, std::string>> owners;

    bool empty() const { return stored.empty() && hit.empty() && evicted.slots.empty() && owners.empty(); }
};

struct BlockManagerStats {
    std::uint64_t lookups = 0, lookup_tokens = 0, device_hit_tokens = 0, allocation_failures = 0;
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
    // `tier` outlives the manager. `caches_prefixes`: false: nothing is found or published.
    BlockManager(Tier &tier, const BlockKeys &keys, bool caches_prefixes, const Follow &follow);

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

    // Opens a lease for a request that is idle and bound, and extends its table by the leading run of its
    // first `limit` blocks, which it pins. Returns true if the block after the run is on its way to the
    // device.
    bool match(RequestState &request, std::size_t limit);
    // Extends the table of a matched request by blocks that came to the device since; as `match`.
    bool match_more(RequestState &request, std::size_t limit);
    // Matches a matched request again, up to `limit` blocks.
    bool shorten(RequestState &request, std::size_t limit);

    // Counts blocks that are still to be loaded as found by the match.
    void accept(RequestState &request, std::size_t blocks) {
        request.num_cached_tokens = blocks * block_size_;
    }

    // Extends the table to hold `num_tokens` tokens. Returns 0, or how many blocks are missing; the request
    // is unchanged then.
    std::uint32_t allocate(RequestState &request, std::uint64_t num_tokens);
    // Appends reserved slots for copies of the next blocks of the path.
    CopyReservation reserve_copies(RequestState &request, std::span<const Digest> parents,
                                   std::span<const Digest> hashes);
    // Counts the look-up and the device hits of a request, once. Returns false if they are counted.
    bool count_hits(RequestState &request);
    // Publishes the full blocks of the first `num_tokens` tokens, once no load is below them.
    void commit(RequestState &request, std::uint64_t num_tokens);
    // The decode step: after tokens were appended, extends the table of each request to hold all its tokens,
    // and commits all but the last `uncomputed`. Without `grow`, requests that need blocks get none.
    void advance(std::span<RequestState *const> requests, std::uint64_t uncomputed, bool grow,
                 AdvanceResult &out);
    // Counts the leading blocks of a load that were copied, and publishes what waited for all of them.
    void end_load(RequestState &request, std::uint32_t copied, std::uint32_t planned);
    // Releases every block of a live request.
    void release(RequestState &request);
    // As `release`, at the end of the request: its blocks were used.
    void finish(RequestState &request);
    // The slots added to the table since the match or the last call: [first, second).
    std::pair<std::size_t, std::size_t> take_added(RequestState &request);
    // Forgets the hits that a request has counted for: its next match is another use.
    void forget_hits(RequestState &request) { request.hit_blocks_ = 0; }

    // Live requests keep their blocks and publish no more.
    void stop_publishing() { ++epoch_; }
    bool publishes(const RequestState &request) const { return request.publish_epoch_ == epoch_; }

    std::size_t blocks_for(std::uint64_t tokens) const {
        return tokens / block_size_ + (tokens % block_size_ != 0);
    }
    bool has_followed() const { return !followed_.empty(); }
    Followed take_followed();
    const BlockManagerStats &stats() const { return stats_; }

  private:
    bool begin(Tier::Session &tier, RequestState &request, std::size_t limit);
    bool extend_match(Tier::Session &tier, RequestState &request, std::size_t limit);
    std::uint32_t grow_to(Tier::Session &tier, RequestState &request, std::size_t blocks);
    void extend_table(Tier::Session &tier, RequestState &request, std::size_t position, bool grow,
                      AdvanceResult &out);
    void commit_to(Tier::Session &tier, RequestState &request, std::uint64_t num_tokens);
    void publish(Tier::Session &tier, RequestState &request);
    void forget(RequestState &request);

    Tier &tier_;
    std::uint64_t id_;
    BlockKeys keys_;
    std::size_t block_size_;
    bool caches_prefixes_;
    Follow follow_;
    std::uint64_t epoch_ = 1;
    std::vector<Digest> former_;
    Followed followed_;
    BlockManagerStats stats_;
    std::vector<Slot> slots_;  // of the last call; kept for its capacity
    std::vector<CommitStatus> status_;
};

}  // namespace fdcache
