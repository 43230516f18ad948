#include "tier/shared_runs.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace fdcache {
namespace {

constexpr std::size_t kAhead = 8;  // blocks whose buckets are on their way to the cache

}  // namespace

FoundRun SharedRuns::find(std::span<const Digest> path, std::size_t start) const {
    FoundRun found{.version = table_.version(), .start = start};
    const std::size_t stop = start + table_.run(path, start);
    found.slots.reserve(stop - start);
    found.generations.reserve(stop - start);
    for (std::size_t i = start; i < std::min(stop, start + kAhead); ++i) table_.prefetch(path[i]);
    for (std::size_t i = start; i < stop; ++i) {
        if (i + kAhead < stop) table_.prefetch(path[i + kAhead]);
        const std::optional<Place> place = table_.place(path[i]);
        if (!place) break;
        if (place->unverified) found.unverified.resize(stop - start);
        if (place->unverified) found.unverified[i - start] = 1;
        found.slots.push_back(place->slot);
        found.generations.push_back(place->generation);
    }
    if (!found.unverified.empty()) found.unverified.resize(found.slots.size());
    if (observer && !found.slots.empty()) observer("found");
    return found;
}

std::uint64_t SharedRuns::next_number() {
    std::lock_guard lock(mutex_);
    return ++last_;
}

// The service closes the table, reads every ring, and only then removes blocks. If the version is still the
// same after the record was written, the service had not closed the table, so it will read the record before
// it removes any of these blocks. Record and version are written and read in one order of all threads.
std::uint64_t SharedRuns::pin(std::span<const Digest> path, const FoundRun &found) {
    const std::uint64_t run = write_pin(path, found);
    if (observer && run) observer("pinned");
    return run;
}

std::uint64_t SharedRuns::write_pin(std::span<const Digest> path, const FoundRun &found) {
    const std::size_t size = found.slots.size();
    if (found.start + size > path.size()) throw std::invalid_argument("the run was found on a longer path");
    std::lock_guard lock(mutex_);
    if (!size || found.version & 1 || !write_unpins()) return 0;
    if (!ring_.write(last_ + 1, found.start, path.subspan(found.start, size))) return 0;
    ++last_;
    if (table_.version() == found.version) return last_;
    unpins_.push_back(last_);
    write_unpins();
    return 0;
}

void SharedRuns::unpin(std::uint64_t run) {
    std::lock_guard lock(mutex_);
    unpins_.push_back(run);
    write_unpins();
}

void SharedRuns::flush() {
    std::lock_guard lock(mutex_);
    write_unpins();
}

bool SharedRuns::write_unpins() {
    while (!unpins_.empty() && ring_.write(unpins_.front(), 0, {})) unpins_.pop_front();
    return unpins_.empty();
}

void LoadingRuns::begin(std::uint64_t run, std::span<const Slot> slots) {
    if (slots.empty()) return;
    counts_[run] += slots.size();
    reads_ += slots.size();
    if (const std::size_t most = std::ranges::max(slots); most >= first_.size()) first_.resize(most + 1);
    for (const Slot slot : slots) {
        if (first_[slot])
            more_.emplace(slot, run);
        else
            first_[slot] = run;
    }
}

// Ends one read of a slot, and returns its run. Any of several runs that pin it may be counted down: the
// others still pin it for their loads.
std::uint64_t LoadingRuns::take(Slot slot) {
    if (!is_read(slot)) throw std::out_of_range("a slot is named more often than loads read it");
    --reads_;
    if (!more_.empty())
        if (const auto other = more_.find(slot); other != more_.end()) {
            const std::uint64_t run = other->second;
            more_.erase(other);
            return run;
        }
    return std::exchange(first_[slot], 0);
}

std::vector<std::uint64_t> LoadingRuns::end(std::span<const Slot> slots) {
    for (const Slot slot : slots)
        if (!is_read(slot))
            throw std::out_of_range("no load reads slot " + std::to_string(static_cast<std::int32_t>(slot)));
    std::vector<std::uint64_t> runs;
    auto count = counts_.end();
    for (const Slot slot : slots) {
        const std::uint64_t run = take(slot);
        if (count == counts_.end() || count->first != run) count = counts_.find(run);
        if (!--count->second) {
            counts_.erase(count);
            count = counts_.end();
        }
        if (runs.empty() || (runs.back() != run && std::find(runs.begin(), runs.end(), run) == runs.end()))
            runs.push_back(run);
    }
    return runs;
}

}  // namespace fdcache
