#include "tier/pinned_runs.hpp"

#include <stdexcept>
#include <string>

namespace fdcache {

PinnedRuns::LookUp PinnedRuns::find(std::span<const Digest> path, std::size_t start, StorageUse storage) {
    LookUp answer;
    if (!runs_) return answer;
    answer.found = runs_->find(path, start);
    const std::size_t end = start + answer.found.slots.size();
    const bool is_partial = storage == StorageUse::kIfIncomplete && end < path.size();
    if (is_partial || storage == StorageUse::kRunning) {
        if (path.size() > start) answer.ask_for = path.size();
        return answer;
    }
    if (end < path.size()) count_miss(path, start, end);
    if (end == start) return answer;
    if (const std::uint64_t number = runs_->pin(path, answer.found))
        answer.lease = add(runs_, number, !answer.found.unverified.empty());
    else
        answer.ask_for = end;
    return answer;
}

std::uint64_t PinnedRuns::holds(std::span<const Digest *const> digests) const {
    const std::shared_ptr<OutgoingCopies> copies = copies_;
    return copies ? copies->holds(digests) : 0;
}

std::vector<Presence> PinnedRuns::contains(std::span<const Digest> hashes) const {
    const std::shared_ptr<OutgoingCopies> copies = latest_copies_;
    return copies ? copies->contains(hashes) : std::vector(hashes.size(), Presence::kAbsent);
}

std::size_t PinnedRuns::blocks() const {
    const std::shared_ptr<OutgoingCopies> copies = copies_;
    return copies ? copies->blocks() : 0;
}

void PinnedRuns::count_miss(std::span<const Digest> path, std::size_t start, std::size_t end) {
    misses_.count(path.subspan(end), end == start);
    if (copies_->contains(path.subspan(end, 1))[0] == Presence::kPending) ++misses_.in_flight;
}

std::uint64_t PinnedRuns::add(std::shared_ptr<SharedRuns> owner, std::uint64_t number, bool unverified) {
    pinned_.emplace(++last_lease_, Run{std::move(owner), number, unverified});
    ++held_;
    return last_lease_;
}

void PinnedRuns::unpin(Runs::iterator run) {
    run->second.owner->unpin(run->second.number);
    pinned_.erase(run);
}

bool PinnedRuns::release(std::uint64_t lease) {
    const auto run = pinned_.find(lease);
    if (run == pinned_.end() || run->second.released) return false;
    run->second.released = true;
    --held_;
    if (!loads_.reads(lease)) unpin(run);
    return true;
}

void PinnedRuns::begin_load(std::uint64_t lease, std::span<const Slot> slots) {
    const auto run = pinned_.find(lease);
    if (run == pinned_.end() || run->second.released)
        throw std::out_of_range("no run is pinned by lease " + std::to_string(lease));
    loads_.begin(lease, slots);
}

PinnedRuns::EndedLoad PinnedRuns::end_load(std::span<const Slot> slots) {
    EndedLoad ended;
    for (const std::uint64_t lease : loads_.end(slots)) {
        const auto run = pinned_.find(lease);
        ended.owner = run->second.owner;
        ended.unverified |= run->second.unverified;
        if (run->second.released && !loads_.reads(lease)) unpin(run);
    }
    return ended;
}

}  // namespace fdcache
