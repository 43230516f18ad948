#include "scheduler/block_manager.hpp"

#include <algorithm>
#include <atomic>
#include <string>

namespace fdcache {
namespace {

std::uint64_t next_id() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
}

std::string named(const RequestState &request) {
    return "request '" + request.id() + "'";
}

std::span<const Slot> slots_between(const AppendOnly<std::int32_t> &table, std::size_t first,
                                    std::size_t last) {
    return {reinterpret_cast<const Slot *>(table.data()) + first, last - first};
}

}  // namespace

BlockManager::BlockManager(Tier &tier, const BlockKeys &keys, bool caches_prefixes, const Follow &follow,
                           HostIndex *host)
    : tier_(tier),
      host_(host),
      id_(next_id()),
      keys_(keys),
      block_size_(static_cast<std::size_t>(keys.block_size)),
      caches_prefixes_(caches_prefixes),
      follow_(follow) {
    if (keys.block_size < 1) throw std::invalid_argument("block_size must be at least 1");
}

bool BlockManager::must_bind(const RequestState &request) const {
    if (!request.is_bound()) return true;
    if (request.keys() == keys_ || owns(request)) return false;
    const bool is_former =
        std::find(former_.begin(), former_.end(), request.keys().fingerprint) != former_.end();
    if (!request.is_live() && is_former) return true;
    throw RequestStateError(named(request) +
                            " was matched by a manager of another layout or look-ahead; make a new request");
}

void BlockManager::change_fingerprint(const Digest &fingerprint) {
    former_.push_back(keys_.fingerprint);
    std::erase(former_, fingerprint);
    keys_.fingerprint = fingerprint;
    stop_publishing();
}

// --- checks ------------------------------------------------------------------------------------------------

void BlockManager::check_idle(const RequestState &request) const {
    if (request.is_live())
        throw RequestStateError(named(request) +
                                " is matched or running; finish it before it is matched again");
}

void BlockManager::check_allocate(const RequestState &request, std::uint64_t num_tokens) const {
    if (!owns(request)) throw RequestStateError(named(request) + " has to be matched before it gets blocks");
    if (num_tokens < request.num_cached_tokens)
        throw RequestStateError(named(request) + ": " + std::to_string(num_tokens) +
                                " tokens are fewer than the " + std::to_string(request.num_cached_tokens) +
                                " that its match found");
}

void BlockManager::check_commit(const RequestState &request, std::int64_t num_tokens) const {
    const std::uint64_t room = owns(request) ? request.table_.size() * block_size_ : 0;
    const std::uint64_t limit = std::min<std::uint64_t>(request.num_tokens(), room);
    if (owns(request) && num_tokens >= 0 && static_cast<std::uint64_t>(num_tokens) <= limit) return;
    throw RequestStateError(named(request) + ": cannot commit " + std::to_string(num_tokens) +
                            " tokens, it has blocks for " + std::to_string(limit));
}

void BlockManager::check_advance(const RequestState &request) const {
    const std::uint64_t room =
        std::max(request.allocated_tokens_, std::uint64_t{request.table_.size()} * block_size_);
    if (!owns(request) || request.num_tokens() > room)
        throw RequestStateError(
            named(request) + " has to be matched and to have blocks for all its tokens before it advances");
}

// --- match -------------------------------------------------------------------------------------------------

std::size_t BlockManager::matchable(const RequestState &request) const {
    const std::uint64_t tokens = request.num_tokens();
    if (!tokens) return 0;
    const std::uint64_t limit = std::min(tokens - 1, request.max_cached_tokens.value_or(tokens));
    return std::min<std::size_t>(limit / block_size_, request.num_hashes());
}

bool BlockManager::begin(Tier::Session &tier, RequestState &request, std::size_t limit) {
    request.lease_ = tier.open_lease();
    request.owner_ = id_;
    request.publish_epoch_ = request.use_cache && caches_prefixes_ ? epoch_ : 0;
    request.table_ = {};
    request.committed_tokens_ = request.allocated_tokens_ = 0;
    request.committed_blocks_ = request.returned_blocks_ = 0;
    request.is_counted_ = false;
    request.ahead_from_host_ = request.ahead_from_storage_ = request.peer_blocks_ = 0;
    const bool pending = publishes(request) && extend_match(tier, request, limit);
    request.returned_blocks_ = request.committed_blocks_;
    request.num_cached_tokens = request.table_.size() * block_size_;
    return pending;
}

void BlockManager::set_loaded_ahead(RequestState &request, std::uint32_t from_host,
                                    std::uint32_t from_storage) {
    if (std::uint64_t{from_host} + from_storage > request.committed_blocks_)
        throw RequestStateError(named(request) + " has fewer blocks on the device than were loaded ahead");
    request.ahead_from_host_ = from_host;
    request.ahead_from_storage_ = from_storage;
}

bool BlockManager::extend_match(Tier::Session &tier, RequestState &request, std::size_t limit) {
    const Digest *hashes = request.blocks().hashes().data();
    const std::size_t start = request.table_.size();
    slots_.clear();
    const bool pending = tier.match(request.lease_, {hashes, limit}, start, request.hit_blocks_, slots_);
    append_slots(request.table_, slots_);
    const std::size_t stop = request.table_.size();
    request.committed_blocks_ = static_cast<std::uint32_t>(stop);
    for (std::size_t i = std::max<std::size_t>(start, request.hit_blocks_); follow_.hits && i < stop; ++i)
        if (tier.hits(slots_[i - start]) == follow_.hits) followed_.hit.push_back(slots_[i - start]);
    request.hit_blocks_ = std::max(request.hit_blocks_, static_cast<std::uint32_t>(stop));
    return pending;
}

// --- allocate ----------------------------------------------------------------------------------------------

void BlockManager::count_hits(RequestState &request) {
    if (request.is_counted_) return;
    request.is_counted_ = true;
    ++stats_.lookups;
    stats_.lookup_tokens += request.num_tokens();
    const std::size_t ahead_stored = request.ahead_from_storage_,
                      ahead = ahead_stored + request.ahead_from_host_;
    stats_.device_hit_tokens += (request.committed_blocks_ - ahead) * block_size_;
    const HostRun &run = request.host_run_;
    const std::size_t from_storage = std::min<std::size_t>(run.from_storage, run.size());
    stats_.host_hit_tokens += (run.size() - from_storage + request.ahead_from_host_) * block_size_;
    stats_.storage_hit_tokens += (from_storage + ahead_stored) * block_size_;
}

std::uint32_t BlockManager::grow_to(Tier::Session &tier, RequestState &request, std::size_t blocks) {
    const std::size_t have = request.table_.size();
    if (blocks <= have) return 0;
    if (blocks - have > INT32_MAX) {  // more than any tier has
        ++stats_.allocation_failures;
        return static_cast<std::uint32_t>(std::min<std::size_t>(blocks - have, UINT32_MAX));
    }
    slots_.clear();
    const auto count = static_cast<std::uint32_t>(blocks - have);
    BlockList *const evicted = follow_.evicted ? &followed_.evicted : nullptr;
    std::uint32_t missing = tier.reserve(request.lease_, count, slots_, evicted);
    if (missing && tier.evict_copied(missing, evicted))
        missing = tier.reserve(request.lease_, count, slots_, evicted);
    if (missing)
        ++stats_.allocation_failures;
    else
        append_slots(request.table_, slots_);
    return missing;
}

std::pair<std::size_t, std::size_t> BlockManager::take_added(RequestState &request) {
    const std::size_t first = request.returned_blocks_, last = request.table_.size();
    request.returned_blocks_ = static_cast<std::uint32_t>(last);
    return {first, last};
}

// --- commit ------------------------------------------------------------------------------------------------

void BlockManager::commit(RequestState &request, std::uint64_t num_tokens) {
    Tier::Session tier(tier_);
    commit_to(tier, request, num_tokens);
}

void BlockManager::commit_to(Tier::Session &tier, RequestState &request, std::uint64_t num_tokens) {
    request.committed_tokens_ = num_tokens;
    if (publishes(request) && !request.is_loading()) publish(tier, request);
}

void BlockManager::publish(Tier::Session &tier, RequestState &request) {
    const std::size_t start = request.committed_blocks_;
    if (request.committed_tokens_ < (start + 1) * block_size_) return;  // as in most decode steps
    // A block has no hash until its look-ahead tokens are known.
    const std::size_t stop = std::min(request.committed_tokens_ / block_size_, request.num_hashes());
    if (start >= stop) return;
    const Digest *hashes = request.blocks().hashes().data();
    status_.clear();
    const std::size_t count =
        tier.commit(request.lease_, start ? hashes[start - 1] : Digest{}, {hashes + start, stop - start},
                    slots_between(request.table_, start, stop), follow_.stored ? &status_ : nullptr);
    request.committed_blocks_ += static_cast<std::uint32_t>(count);
    if (follow_.owners && request.tenant_) followed_.owners.emplace_back(hashes[0], *request.tenant_);
    const std::span<const Slot> slots = slots_between(request.table_, start, stop);
    for (std::size_t i = 0; i < status_.size(); ++i)
        if (status_[i] == CommitStatus::kStored) followed_.stored.push_back(slots[i]);
}

void BlockManager::advance(std::span<RequestState *const> requests, std::uint64_t uncomputed, bool grow,
                           AdvanceResult &out) {
    Tier::Session tier(tier_);
    for (std::size_t i = 0; i < requests.size(); ++i) {
        RequestState &request = *requests[i];
        const std::uint64_t tokens = request.num_tokens();
        request.allocated_tokens_ = std::max(request.allocated_tokens_, tokens);
        if (tokens > request.table_.size() * block_size_) extend_table(tier, request, i, grow, out);
        const std::uint64_t computed = tokens > uncomputed ? tokens - uncomputed : 0;
        const std::uint64_t room = request.table_.size() * block_size_;
        commit_to(tier, request, std::max(request.committed_tokens_, std::min(computed, room)));
    }
}

void BlockManager::extend_table(Tier::Session &tier, RequestState &request, std::size_t position, bool grow,
                                AdvanceResult &out) {
    const std::size_t have = request.table_.size();
    const std::size_t blocks = blocks_for(request.num_tokens());
    const auto missing = grow ? grow_to(tier, request, blocks) : static_cast<std::uint32_t>(blocks - have);
    if (missing) {
        if (out.failed.empty()) out.shortfall = missing;
        out.failed.push_back(static_cast<std::uint32_t>(position));
        return;
    }
    for (const Slot slot : slots_between(request.table_, have, request.table_.size())) {
        out.positions.push_back(static_cast<std::uint32_t>(position));
        out.blocks.push_back(slot);
    }
    request.returned_blocks_ = static_cast<std::uint32_t>(request.table_.size());
}

// --- end ---------------------------------------------------------------------------------------------------

void BlockManager::release(RequestState &request) {
    tier_.release(request.lease_);
    forget(request);
}

void BlockManager::finish(RequestState &request) {
    const RequestEnd end{request.prompt_tokens(), request.num_tokens() - request.prompt_tokens(),
                         static_cast<std::uint32_t>(block_size_)};
    tier_.finish(request.lease_, &end);
    forget(request);
}

void BlockManager::forget(RequestState &request) {
    drop_run(request);
    if (request.load_) request.load_->waiting = nullptr;
    request.load_.reset();
    request.lease_ = request.owner_ = 0;
    request.table_ = {};
    request.num_cached_tokens = 0;
    request.deferred_since_.reset();
}

void BlockManager::queue_followed(SlotQueue &queue) {
    for (std::vector<Slot> *const news : {&followed_.hit, &followed_.stored}) {
        queue.add(*news);
        news->clear();
    }
}

Followed BlockManager::take_followed() {
    return std::exchange(followed_, {});
}

}  // namespace fdcache
