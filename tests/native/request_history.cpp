#include "native/request_history.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "native/checks.hpp"

namespace fdcache::tests {
namespace {

constexpr std::int64_t kBlock = 2;
constexpr std::size_t kMostJobs = 4;
constexpr Follow kFollow{.stored = true, .evicted = true, .owners = true, .hits = 2};

}  // namespace

RequestHistory::RequestHistory(Bytes bytes, Tier &tier, std::string tenant)
    : bytes_(bytes),
      tier_(tier),
      tenant_(std::move(tenant)),
      manager_(tier, {kBlock, Digest{}, bytes_.below(2)}, true, bytes_.below(2) ? kFollow : Follow{}, &host_),
      terms_{1 + bytes_.below(2),
             static_cast<double>(bytes_.below(2)),
             [this] { return double(arrived_); },
             {}} {}

void RequestHistory::run() {
    while (!bytes_.empty()) step();
    load();
    end_loads(true);
    for (Job &job : jobs_) end(job);
    jobs_.clear();
    expect(host_.stats().pins == 0 && host_.stats().holds == 0, "the host keeps what ended requests held");
}

void RequestHistory::step() {
    static constexpr std::array kActs{
        &RequestHistory::arrive,   &RequestHistory::arrive,  &RequestHistory::allocate,
        &RequestHistory::allocate, &RequestHistory::compute, &RequestHistory::compute,
        &RequestHistory::commit,   &RequestHistory::commit,  &RequestHistory::advance,
        &RequestHistory::advance,  &RequestHistory::advance, &RequestHistory::finish,
        &RequestHistory::back_up,  &RequestHistory::load,    &RequestHistory::forget,
    };
    (this->*bytes_.pick(kActs))();
}

RequestHistory::Job *RequestHistory::some_job() {
    return jobs_.empty() ? nullptr : &jobs_[bytes_.below(jobs_.size())];
}

void RequestHistory::end(Job &job) {
    manager_.release(*job.state);
    expect(!job.state->is_live() && !job.state->table().size(), "a request that ended has blocks");
}

RequestHistory::Tokens RequestHistory::tokens_of(const Job &job, std::size_t count) const {
    const std::int32_t *tokens = job.state->blocks().tokens().data();
    return {tokens, tokens + count};
}

void RequestHistory::append(Job &job, std::size_t count) {
    std::int32_t *out = job.state->blocks().extend(count);
    for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<std::int32_t>(bytes_.below(2));
    job.state->blocks().commit(count);
}

// --- requests

void RequestHistory::arrive() {
    if (jobs_.size() >= kMostJobs) finish();
    const std::size_t prompt = 1 + bytes_.below(12);
    Job job{std::make_unique<RequestState>(std::to_string(++arrived_), prompt, tenant_, ExtraKeys{})};
    expect(manager_.must_bind(*job.state), "a new request is bound");
    job.state->bind(manager_.keys(), job.state->make_blocks(manager_.keys()));
    append(job, prompt);
    job.state->use_cache = !bytes_.one_in(16);
    if (manager_.match(*job.state, terms_).end == MatchEnd::kDeferred) {
        expect(!job.state->is_live(), "a deferred request is live");
        return;
    }
    check_match(job);
    jobs_.push_back(std::move(job));
}

void RequestHistory::check_match(Job &job) {
    const auto &table = job.state->table();
    const std::size_t found = table.size() + job.state->host_run().size();
    expect(job.state->num_cached_tokens == found * kBlock, "the length of a match");
    expect(found % terms_.cell == 0, "a match that does not end on the grid");
    expect(job.state->use_cache || !found, "a request without cache finds blocks");
    for (std::size_t i = 0; i < table.size(); ++i) {
        const auto held = held_.find(table.data()[i]);
        expect(held != held_.end() && held->second == tokens_of(job, (i + 1) * kBlock),
               "a match finds a block with other tokens");
    }
    job.computed = table.size() * kBlock;
}

void RequestHistory::check_given(const Job &job, std::size_t first) const {
    const auto &table = job.state->table();
    for (const Job &other : jobs_) {
        if (&other == &job) continue;
        const auto &blocks = other.state->table();
        for (std::size_t i = first; i < table.size(); ++i)
            expect(!std::count(blocks.data(), blocks.data() + blocks.size(), table.data()[i]),
                   "a block is given to two requests");
    }
}

void RequestHistory::allocate() {
    Job *job = some_job();
    if (!job) return;
    const std::size_t had = job->state->table().size();
    const std::size_t tokens =
        std::max<std::size_t>(job->state->num_tokens(), had * kBlock) + bytes_.below(3);
    manager_.check_allocate(*job->state, tokens);
    const std::size_t cached = job->state->num_cached_tokens / kBlock, before = loads_.size();
    const Allocated given = manager_.allocate(*job->state, tokens, &loads_);
    if (given.end == AllocationEnd::kDeferred) {
        expect(!job->state->is_live(), "a deferred request is live");
        jobs_.erase(jobs_.begin() + (job - jobs_.data()));
        return;
    }
    const bool has_all = given.end == AllocationEnd::kDone;
    if (!has_all) return expect(given.missing > 0, "an allocation failed for nothing");
    expect(job->state->table().size() == std::max(had, (tokens + kBlock - 1) / kBlock),
           "blocks of a request");
    const std::size_t first_loaded = cached - (loads_.size() - before);
    for (std::size_t i = before; i < loads_.size(); ++i)
        held_[static_cast<std::int32_t>(loads_.targets[i])] =
            tokens_of(*job, (first_loaded + i - before + 1) * kBlock);
    job->computed = std::max(job->computed, cached * kBlock);
    check_given(*job, std::max(had, first_loaded));
}

// Copies the blocks of a request that others can find to the host.
void RequestHistory::back_up() {
    const Job *job = some_job();
    if (!job) return;
    const auto &hashes = job->state->blocks().hashes();
    std::vector<Digest> parents{Digest{}};
    for (std::size_t i = 0; i + 1 < hashes.size(); ++i) parents.push_back(hashes.data()[i]);
    parents.resize(hashes.size());
    const CopyReservation taken = host_.reserve_copies(0, parents, {hashes.data(), hashes.size()});
    const std::vector<std::uint8_t> copied(taken.slots.size(), !bytes_.one_in(8));
    host_.complete(taken.slots, copied, {});
}

// Ends the loads of the plan before, and sends those of this step.
void RequestHistory::load() {
    end_loads(!bytes_.one_in(8));
    manager_.loads().send(++plan_, false);
    in_flight_ = std::exchange(loads_, {});
}

void RequestHistory::end_loads(bool copied) {
    const std::vector<std::uint8_t> flags(in_flight_.size(), copied);
    const std::vector<std::uint8_t> ready = tier_.complete(in_flight_.targets, flags, {});
    host_.unhold(in_flight_.sources);
    in_flight_ = {};
    manager_.loads().end(plan_, ready, {});
    for (const LoadPointer &load : manager_.take_ended()) {
        if (load->status == LoadStatus::kConfirmed) continue;
        RequestState *const request = load->waiting;
        const auto job = std::find_if(jobs_.begin(), jobs_.end(),
                                      [&](const Job &each) { return each.state.get() == request; });
        end(*job);
        jobs_.erase(job);
    }
}

void RequestHistory::compute_to(Job &job, std::size_t tokens) {
    const auto &table = job.state->table();
    for (std::size_t block = job.computed / kBlock; block * kBlock < tokens; ++block)
        held_[table.data()[block]] = tokens_of(job, std::min((block + 1) * kBlock, tokens));
    job.computed = std::max(job.computed, tokens);
}

// With a look-ahead token, a block's KV is computed from the token after it too.
void RequestHistory::compute() {
    Job *job = some_job();
    if (!job) return;
    const std::size_t room = job->state->table().size() * kBlock;
    compute_to(*job, std::min<std::size_t>(room, job->state->num_tokens()));
}

void RequestHistory::commit() {
    Job *job = some_job();
    if (!job) return;
    const std::size_t tokens = job->computed - bytes_.below(job->computed + 1);
    manager_.check_commit(*job->state, static_cast<std::int64_t>(tokens));
    manager_.commit(*job->state, tokens);
}

// A decode step of all requests whose tokens are computed.
void RequestHistory::advance() {
    std::vector<RequestState *> running;
    std::vector<Job *> jobs;
    for (Job &job : jobs_) {
        if (job.state->table().size() * kBlock < job.state->num_tokens()) continue;
        compute_to(job, job.state->num_tokens());
        manager_.check_advance(*job.state);
        append(job, 1);
        running.push_back(job.state.get());
        jobs.push_back(&job);
    }
    AdvanceResult added;
    manager_.advance(running, 1, !bytes_.one_in(8), added);
    for (std::size_t i = 0; i < added.blocks.size(); ++i) {
        const auto &table = running[added.positions[i]]->table();
        expect(
            std::count(table.data(), table.data() + table.size(), static_cast<std::int32_t>(added.blocks[i])),
            "an added block is not in the table");
        check_given(*jobs[added.positions[i]], table.size() - 1);
    }
    for (const std::uint32_t failed : added.failed)
        expect(running[failed]->table().size() * kBlock < running[failed]->num_tokens(),
               "a request failed, and grew");
}

void RequestHistory::finish() {
    if (jobs_.empty()) return;
    const std::size_t index = bytes_.below(jobs_.size());
    end(jobs_[index]);
    jobs_.erase(jobs_.begin() + static_cast<std::ptrdiff_t>(index));
    manager_.take_followed();
}

// Blocks are dropped, or nothing more is published, as before a reset.
void RequestHistory::forget() {
    Job *job = some_job();
    if (!job) return;
    if (bytes_.one_in(4)) return manager_.stop_publishing();
    const auto &hashes = job->state->blocks().hashes();
    if (!hashes.size()) return;
    for (const Job &each : jobs_)
        if (each.state->host_run().size()) return;  // a load needs the blocks above it
    tier_.drop({hashes.data() + bytes_.below(hashes.size()), 1});
}

}  // namespace fdcache::tests
