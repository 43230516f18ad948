// The host's part of a request: matches that go on there, and loads.
#include <algorithm>
#include <string>
#include <utility>

#include "scheduler/block_manager.hpp"

namespace fdcache {
namespace {

void append(BlockList &list, const BlockList &more) {
    const auto add = [](auto &to, const auto &from) { to.insert(to.end(), from.begin(), from.end()); };
    add(list.slots, more.slots);
    add(list.generations, more.generations);
    add(list.hashes, more.hashes);
    add(list.parents, more.parents);
    add(list.hits, more.hits);
}

}  // namespace

// --- match -------------------------------------------------------------------------------------------------

Matched BlockManager::match(RequestState &request, const MatchTerms &terms, StorageUse storage) {
    const bool has_grid = terms.cell > 1;
    std::size_t limit = matchable(request);
    bool pending;
    {
        Tier::Session tier(tier_);
        // With a grid, blocks are pinned once the length of the whole match is known.
        pending = begin(tier, request, has_grid ? 0 : limit);
    }
    if (!publishes(request)) limit = 0;
    const std::span<const Digest> path{request.blocks().hashes().data(), limit};
    const std::size_t on_device = has_grid ? ready_on_device(path) : request.table_.size();
    request.searched_from_ = static_cast<std::uint32_t>(on_device);
    if (!host_ || request.device_only || pending || on_device >= limit)
        return end_match(request, terms, on_device, {}, pending, false);
    HostIndex::Found found = host_->find_and_pin(path, on_device, storage);
    if (found.ask_for) return {MatchEnd::kUnanswered, on_device, 0, found.ask_for};
    const bool host_pending =
        found.pending && !(terms.is_reading && terms.is_reading(path[on_device + found.run.size()]));
    return end_match(request, terms, on_device, std::move(found.run), pending, host_pending);
}

Matched BlockManager::answer(RequestState &request, const MatchTerms &terms, HostRun run) {
    return end_match(request, terms, request.searched_from_, std::move(run), false, false);
}

std::size_t BlockManager::ready_on_device(std::span<const Digest> path) {
    const std::vector<Presence> known = tier_.contains(path);
    const auto absent = std::find(known.begin(), known.end(), Presence::kAbsent);
    return static_cast<std::size_t>(absent - known.begin());
}

// Joins what device and host found, as far as the reuse grid allows, or defers the request.
Matched BlockManager::end_match(RequestState &request, const MatchTerms &terms, std::size_t on_device,
                                HostRun run, bool device_pending, bool host_pending) {
    std::size_t on_host = run.size();
    if (on_host && terms.worth_loading)
        on_host = std::min(on_host, terms.worth_loading(request, on_device, on_host));
    request.host_run_ = std::move(run);
    if (terms.cell > 1) {
        const std::size_t allowed = (on_device + on_host) / terms.cell * terms.cell;
        on_device = std::min(allowed, on_device);
        on_host = allowed - on_device;
        device_pending = shorten(request, on_device);
        // The run ends early where a block is pending, or has left since: match again up to the grid.
        while (request.table_.size() < on_device) {
            on_host = 0;
            on_device = request.table_.size() / terms.cell * terms.cell;
            if (on_device < request.table_.size()) device_pending |= shorten(request, on_device);
        }
    }
    if (device_pending) on_host = 0;
    if (device_pending || host_pending) {
        const double now = terms.clock();
        if (!request.deferred_since_) request.deferred_since_ = now;
        if (now - *request.deferred_since_ < terms.defer_timeout) return deferred(request);
    }
    if (on_host)
        request.host_run_.keep_first(on_host);
    else
        drop_host_run(request);
    request.num_cached_tokens = (request.table_.size() + on_host) * block_size_;
    request.deferred_since_.reset();
    return {MatchEnd::kMatched, on_device, on_host, 0};
}

// Releases the request; the time that it waits goes on.
Matched BlockManager::deferred(RequestState &request) {
    const std::optional<double> since = request.deferred_since_;
    release(request);
    request.deferred_since_ = since;
    ++stats_.deferred;
    return {MatchEnd::kDeferred};
}

void BlockManager::wait_for_reads(RequestState &request) {
    if (owns(request)) release(request);
    request.deferred_since_.reset();
    ++stats_.deferred;
}

bool BlockManager::shorten(RequestState &request, std::size_t limit) {
    Tier::Session tier(tier_);
    tier.release(request.lease_);
    return begin(tier, request, limit);
}

void BlockManager::drop_host_run(RequestState &request) {
    if (!request.host_run_.lease) return;
    host_->release(request.host_run_.lease);
    request.host_run_ = {};
}

void BlockManager::drop_run(RequestState &request) {
    drop_host_run(request);
    request.peer_blocks_ = 0;
}

std::size_t BlockManager::expect_from_peer(RequestState &request) {
    if (!owns(request) || request.peer_blocks_)
        throw RequestStateError("request '" + request.id() + "': fetch follows a match, once");
    const std::size_t start = request.table_.size() + request.host_run_.size(), stop = matchable(request);
    if (start >= stop || !publishes(request) || request.device_only) return 0;
    request.peer_blocks_ = static_cast<std::uint32_t>(stop - start);
    request.num_cached_tokens = stop * block_size_;
    return stop - start;
}

// --- allocate ----------------------------------------------------------------------------------------------

Allocated BlockManager::allocate(RequestState &request, std::uint64_t num_tokens, BlockCopies *loads) {
    bool is_stale = false;
    std::uint32_t missing = 0;
    {
        Tier::Session tier(tier_);
        if (run_length(request)) is_stale = !refresh_host_run(tier, request);
        if (!is_stale && run_length(request)) {
            const std::size_t blocks = blocks_for(num_tokens), have = request.table_.size();
            const std::size_t wanted = blocks > have ? blocks - have : 0;
            missing = missing_for(tier, wanted);
            if (!missing) {
                count_hits(request);
                plan_loads(tier, request, *loads);
                if (grow_to(tier, request, blocks))
                    throw BrokenPromise("request '" + request.id() + "': available blocks are gone");
            }
        } else if (!is_stale) {
            missing = grow_to(tier, request, blocks_for(num_tokens));
        }
    }
    if (is_stale) {
        deferred(request);
        return {AllocationEnd::kDeferred};
    }
    if (missing) return {AllocationEnd::kNoBlocks, missing};
    count_hits(request);
    request.allocated_tokens_ = std::max(request.allocated_tokens_, num_tokens);
    return {};
}

// Returns how many of the wanted blocks cannot be reserved.
std::uint32_t BlockManager::missing_for(Tier::Session &tier, std::size_t wanted) {
    if (wanted <= tier.available()) return 0;
    const auto missing =
        static_cast<std::uint32_t>(std::min<std::size_t>(wanted - tier.available(), UINT32_MAX));
    if (tier.evict_copied(missing, follow_.evicted ? &followed_.evicted : nullptr)) return 0;
    ++stats_.allocation_failures;
    return missing;
}

// Takes blocks of the run that others have loaded since the match as device hits. Returns false if the
// request has to be matched again: another request is loading the next block, or a reset took the run away.
bool BlockManager::refresh_host_run(Tier::Session &tier, RequestState &request) {
    if (!publishes(request)) return false;
    HostRun &run = request.host_run_;
    const std::size_t start = request.table_.size(), length = run_length(request);
    const bool pending = extend_match(tier, request, start + length);
    const std::size_t found = request.table_.size() - start;
    if (found >= run.size())
        drop_host_run(request);
    else if (found)
        run.drop_first(found);
    request.peer_blocks_ = std::min(request.peer_blocks_, static_cast<std::uint32_t>(length - found));
    return !pending;
}

// Reserves device blocks for the run, and plans its copies from the host and its fetch from a peer.
void BlockManager::plan_loads(Tier::Session &tier, RequestState &request, BlockCopies &loads) {
    const HostRun &run = request.host_run_;
    const std::size_t first = request.table_.size(), count = run_length(request);
    const auto start = static_cast<std::uint32_t>(first), on_host = static_cast<std::uint32_t>(run.size());
    const std::span<const Digest> path{request.blocks().hashes().data(), first + count};
    std::span<const Digest> parents = path.subspan(first ? first - 1 : 0, count);
    if (!first) {
        parents_.assign(1, Digest{});
        parents_.insert(parents_.end(), path.begin(), path.end() - 1);
        parents = parents_;
    }
    tier.reserve_copies(request.lease_, parents, path.subspan(first), taken_);
    if (taken_.slots.size() != count)
        throw BrokenPromise("request '" + request.id() + "': " + std::to_string(count) + " loads got " +
                            std::to_string(taken_.slots.size()) + " device blocks");
    append_slots(request.table_, taken_.slots);
    if (follow_.evicted) append(followed_.evicted, taken_.evicted);
    const std::span slots(taken_.slots);
    const std::span generations(taken_.generations);
    const LoadPointer load = loads_.begin(start, start + static_cast<std::uint32_t>(count), &request);
    if (on_host) {
        host_->begin_load(run.lease, run.slots);
        const auto offset = static_cast<std::uint32_t>(loads.size());
        loads.append({run.slots, run.generations, path.subspan(first, on_host), parents.first(on_host),
                      run.unverified},
                     slots.first(on_host), generations.first(on_host));
        loads_.add(loads_.next_part(load, start + on_host, offset, on_host));
    }
    if (request.peer_blocks_) {
        const auto at = static_cast<std::ptrdiff_t>(on_host);
        open_fetches_.push_back({loads_.next_part(load, load->stop, 0, request.peer_blocks_),
                                 {slots.begin() + at, slots.end()},
                                 {generations.begin() + at, generations.end()}});
    }
    request.load_ = load;
    if (run.lease) host_->release(run.lease);
    request.host_run_ = {};
    request.peer_blocks_ = 0;
}

// --- loads -------------------------------------------------------------------------------------------------

std::vector<LoadPointer> BlockManager::take_ended() {
    std::vector<LoadPointer> ended = loads_.take_ended(true);
    for (const LoadPointer &load : ended) end_load(*load->waiting, *load);
    return ended;
}

void BlockManager::end_load(RequestState &request, const Load &load) {
    if (load.status == LoadStatus::kOverdue) {
        request.device_only = true;
        return;
    }
    request.load_.reset();
    request.committed_blocks_ = load.whole;
    if (load.status == LoadStatus::kFailed) {
        request.num_cached_tokens = load.whole * block_size_;
        return;
    }
    if (publishes(request)) {
        Tier::Session tier(tier_);
        publish(tier, request);
    }
}

}  // namespace fdcache
