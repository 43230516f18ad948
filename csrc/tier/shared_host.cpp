#include "tier/shared_host.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace fdcache {

void SharedHost::begin_session(Runs runs, Copies copies) {
    runs_ = std::move(runs);
    copies_ = std::move(copies);
    is_open_ = true;
}

// --- look-ups and loads ------------------------------------------------------------------------------------

HostIndex::Found SharedHost::find_and_pin(std::span<const Digest> path, std::size_t start,
                                          StorageUse storage) {
    Found answer;
    const Runs runs = open_runs();
    const Copies copies = open_copies();
    if (!runs) return answer;
    FoundRun found = runs->find(path, start);
    const std::size_t end = start + found.slots.size();
    const bool is_partial = storage == StorageUse::kIfIncomplete && end < path.size();
    if (is_partial || storage == StorageUse::kRunning) {
        if (path.size() > start) answer.ask_for = path.size();
        return answer;
    }
    if (end < path.size()) count_miss(*copies, path, start, end);
    if (end == start) return answer;
    const std::uint64_t number = runs->pin(path, found);
    if (!number) {
        answer.ask_for = end;
        return answer;
    }
    answer.run.lease = add(runs, number, !found.unverified.empty());
    answer.run.slots = std::move(found.slots);
    answer.run.generations = std::move(found.generations);
    answer.run.unverified = std::move(found.unverified);
    return answer;
}

void SharedHost::count_miss(const OutgoingCopies &copies, std::span<const Digest> path, std::size_t start,
                            std::size_t end) {
    misses.count(path.subspan(end), end == start);
    if (copies.contains(path.subspan(end, 1))[0] == Presence::kPending) ++misses.in_flight;
}

LeaseId SharedHost::add(Runs owner, std::uint64_t number, bool unverified) {
    pinned_.emplace(++last_lease_, Run{std::move(owner), number, unverified});
    ++held_;
    return last_lease_;
}

void SharedHost::unpin(Pinned::iterator run) {
    run->second.owner->unpin(run->second.number);
    pinned_.erase(run);
}

bool SharedHost::release(LeaseId lease) {
    const auto run = pinned_.find(lease);
    if (run == pinned_.end() || run->second.released) return false;
    run->second.released = true;
    --held_;
    unpin_if_over(run);
    return true;
}

// Unpins a run that is released, unless a load reads it.
void SharedHost::unpin_if_over(Pinned::iterator run) {
    if (run->second.released && !loads_.reads(run->first)) unpin(run);
}

void SharedHost::begin_load(LeaseId lease, std::span<const Slot> slots) {
    const auto run = pinned_.find(lease);
    if (run == pinned_.end() || run->second.released)
        throw std::out_of_range("no run is pinned by lease " + std::to_string(lease));
    loads_.begin(lease, slots);
}

// The service hears of records that every rank could read although nothing had verified them, and of those
// that a rank could not: it forgets the bad ones.
void SharedHost::end_load(const EndedLoad &ended) {
    bool is_news = std::ranges::find(ended.copied, 0) != ended.copied.end(), is_of_session = false;
    for (const std::uint64_t lease : loads_.end(ended.slots)) {
        const auto run = pinned_.find(lease);
        is_news |= run->second.unverified;
        is_of_session |= run->second.owner == runs_;
        unpin_if_over(run);
    }
    if (!is_news || !is_of_session) return;
    reports_.push_back({.is_load = true,
                        .slots = {ended.slots.begin(), ended.slots.end()},
                        .parents = {},
                        .hashes = {ended.hashes.begin(), ended.hashes.end()},
                        .copied = {ended.copied.begin(), ended.copied.end()},
                        .checksums = {}});
}

void SharedHost::cancel_load(std::span<const Slot> slots) {
    for (const std::uint64_t lease : loads_.end(slots)) unpin_if_over(pinned_.find(lease));
}

// --- copies ------------------------------------------------------------------------------------------------

// Copies in flight are known without a session, too.
std::vector<Presence> SharedHost::contains(std::span<const Digest> hashes) const {
    const Copies copies = copies_;
    if (!copies) return std::vector(hashes.size(), Presence::kAbsent);
    std::vector<Presence> known = copies->contains(hashes);
    if (!open_copies()) std::ranges::replace(known, Presence::kReady, Presence::kAbsent);
    return known;
}

std::uint64_t SharedHost::holds(std::span<const Digest *const> digests) const {
    const Copies copies = open_copies();
    return copies ? copies->holds(digests) : 0;
}

std::size_t SharedHost::blocks() const {
    const Copies copies = open_copies();
    return copies ? copies->blocks() : 0;
}

std::size_t SharedHost::room() const {
    const Copies copies = open_copies();
    return copies ? copies->stock() : 0;
}

std::size_t SharedHost::capacity() const {
    const Copies copies = open_copies();
    return copies ? copies->tier_slots.load() : 0;
}

CopyReservation SharedHost::reserve(std::span<const Digest> parents, std::span<const Digest> hashes,
                                    bool below_pending) {
    if (const Copies copies = open_copies()) return copies->reserve(parents, hashes, below_pending);
    CopyReservation none;
    none.missing = static_cast<std::uint32_t>(hashes.size());
    return none;
}

// No session follows while copies are in flight, so they are those of the last one. Whether the service still
// listens to it shows when the report is sent.
std::vector<std::uint8_t> SharedHost::complete(std::span<const Slot> slots,
                                               std::span<const std::uint8_t> copied,
                                               std::span<const std::uint64_t> checksums) {
    std::vector<std::uint8_t> there(copied.begin(), copied.end());
    if (!copies_ || slots.empty()) return there;
    OutgoingCopies::Ended ended = copies_->end(slots, copied, true);
    HostReport report{.is_load = false,
                      .slots = {slots.begin(), slots.end()},
                      .parents = std::move(ended.parents),
                      .hashes = std::move(ended.hashes),
                      .copied = there,
                      .checksums = {checksums.begin(), checksums.end()}};
    report.checksums.resize(slots.size());
    reports_.push_back(std::move(report));
    return there;
}

std::vector<HostReport> SharedHost::take_reports() {
    return std::exchange(reports_, {});
}

void SharedHost::drop_reports() {
    if (reports_.empty()) return;
    reports_.clear();
    copies_->drop_unacknowledged();
}

}  // namespace fdcache
