#include "scheduler/host_source.hpp"

#include <algorithm>
#include <utility>

#include "tier/session.hpp"

namespace fdcache {

void HostRun::keep_first(std::size_t count) {
    slots.resize(count);
    generations.resize(count);
    if (!unverified.empty()) unverified.resize(count);
}

void HostRun::drop_first(std::size_t count) {
    const auto drop = [count](auto &column) {
        column.erase(column.begin(), column.begin() + static_cast<std::ptrdiff_t>(count));
    };
    drop(slots);
    drop(generations);
    if (!unverified.empty()) drop(unverified);
}

HostSource::Answer HostSource::find(std::span<const Digest> path, std::size_t start, StorageUse storage) {
    Answer answer;
    HostRun &run = answer.run;
    if (service_) {
        PinnedRuns::LookUp found = service_->find(path, start, storage);
        answer.ask_for = found.ask_for;
        if (!found.lease) return answer;
        run.lease = found.lease;
        run.slots = std::move(found.found.slots);
        run.generations = std::move(found.found.generations);
        run.unverified = std::move(found.found.unverified);
        return answer;
    }
    Tier::Session session(*tier_);
    run.lease = session.open_lease();
    answer.pending = session.match(run.lease, path, start, 0, run.slots);
    if (run.slots.empty()) {
        session.release(std::exchange(run.lease, 0));
        return answer;
    }
    run.generations.reserve(run.slots.size());
    for (const Slot slot : run.slots) run.generations.push_back(session.generation(slot));
    return answer;
}

void HostSource::release(std::uint64_t lease) {
    if (!lease) return;
    if (tier_)
        tier_->release(lease);
    else
        service_->release(lease);
}

void HostSource::finish(std::uint64_t lease) {
    if (tier_)
        tier_->finish(lease);
    else
        service_->release(lease);
}

bool HostSource::is_copying(std::span<const Digest> hashes) const {
    if (!tier_ && !service_) return false;
    const std::vector<Presence> known = tier_ ? tier_->contains(hashes) : service_->contains(hashes);
    return std::ranges::find(known, Presence::kPending) != known.end();
}

void HostSource::begin_load(const HostRun &run) {
    if (tier_)
        tier_->hold(run.slots);
    else
        service_->begin_load(run.lease, run.slots);
}

void HostSource::end_load(std::span<const Slot> slots) {
    if (tier_)
        tier_->unhold(slots);
    else
        service_->end_load(slots);
}

}  // namespace fdcache
