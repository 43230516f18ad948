// The runs that an engine has pinned in the tier of a service, by lease, and the loads that read them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hash/digest.hpp"
#include "tier/outgoing.hpp"
#include "tier/shared_runs.hpp"

namespace fdcache {

// Blocks that look-ups did not find, until they are sent to the service.
struct MissLog {
    static constexpr std::size_t kMost = 4096;

    std::vector<Digest> firsts;         // first missing block of each look-up
    std::vector<std::int32_t> blocks;   // missing blocks from there on
    std::uint32_t whole = 0;            // look-ups that found nothing
    std::uint64_t in_flight = 0;        // look-ups that ended at a block which this engine is copying there
    std::vector<std::uint64_t> sample;  // of all missing blocks, the beginnings of hashes that are below ...
    std::uint64_t below = kAll;         // ... this, which is halved when there are too many

    void count(std::span<const Digest> missing, bool is_whole) {
        if (firsts.size() == kMost) return;
        firsts.push_back(missing.front());
        blocks.push_back(static_cast<std::int32_t>(missing.size()));
        whole += is_whole;
        if (is_new(missing.back()))
            for (const Digest &digest : missing) add_to_sample(digest);
    }
    void clear() {
        firsts.clear();
        blocks.clear();
        whole = 0;
        sample.clear();
        below = kAll;
    }

  private:
    static constexpr std::uint64_t kAll = ~std::uint64_t{0};

    // A request that gets no blocks looks its path up again; the sample has it once.
    bool is_new(const Digest &last) {
        const std::uint64_t path = last.word(0);
        if (std::ranges::find(recent_, path) != recent_.end()) return false;
        recent_[next_++ % recent_.size()] = path;
        return true;
    }

    void add_to_sample(const Digest &digest) {
        const std::uint64_t start = digest.word(0);
        if (start >= below) return;
        sample.push_back(start);
        while (sample.size() > kMost) {
            below /= 2;
            std::erase_if(sample, [this](std::uint64_t each) { return each >= below; });
        }
    }

    std::array<std::uint64_t, 64> recent_{};  // the last paths
    std::size_t next_ = 0;
};

// May a look-up be answered from shared memory although the service may read blocks from storage?
enum class StorageUse : std::uint8_t {
    kNone,          // yes: nothing is read for this request
    kIfIncomplete,  // if everything is found
    kRunning,       // no: blocks of this request are being read
};

// The caller has the interpreter lock.
class PinnedRuns : public LowerTier {
  public:
    explicit PinnedRuns(MissLog &misses) : misses_(misses) {}

    // Looks up in this session from now on; without one nothing is found.
    void search(std::shared_ptr<SharedRuns> runs, std::shared_ptr<OutgoingCopies> copies) {
        runs_ = std::move(runs);
        copies_ = std::move(copies);
    }

    // A session has begun. Nothing of the one before is in flight, to the service or from it.
    void begin_session(std::shared_ptr<OutgoingCopies> copies) { latest_copies_ = std::move(copies); }

    // In the session of `search`.
    std::uint64_t holds(std::span<const Digest *const> digests) const override;
    std::size_t blocks() const override;

    // What the session that began last has, and what this engine copies there, whether it has looked up or
    // not.
    std::vector<Presence> contains(std::span<const Digest> hashes) const;

    struct LookUp {
        std::uint64_t lease = 0;  // pins `found`, unless it is 0
        FoundRun found;
        std::size_t ask_for = 0;  // if not 0: ask the service for as many leading blocks of the path
    };
    // Pins the leading run of the path from `start` on.
    LookUp find(std::span<const Digest> path, std::size_t start, StorageUse storage);

    // Adds a run that a service has pinned under this number.
    std::uint64_t add(std::shared_ptr<SharedRuns> owner, std::uint64_t number, bool unverified);
    // Unpins a run after the loads that read it. Returns false if it was released before.
    bool release(std::uint64_t lease);
    // Keeps these slots of a run pinned until their load ends.
    void begin_load(std::uint64_t lease, std::span<const Slot> slots);

    struct EndedLoad {
        std::shared_ptr<SharedRuns> owner;  // of the runs that it read
        bool unverified = false;            // it may have read unverified records
    };
    EndedLoad end_load(std::span<const Slot> slots);

    std::size_t size() const { return held_; }
    std::size_t slots_loading() const { return loads_.slots(); }

  private:
    struct Run {
        std::shared_ptr<SharedRuns> owner;
        std::uint64_t number;
        bool unverified;
        bool released = false;
    };
    using Runs = std::unordered_map<std::uint64_t, Run>;

    void count_miss(std::span<const Digest> path, std::size_t start, std::size_t end);
    void unpin(Runs::iterator run);

    MissLog &misses_;
    std::shared_ptr<SharedRuns> runs_;
    std::shared_ptr<OutgoingCopies> copies_;
    std::shared_ptr<OutgoingCopies> latest_copies_;
    std::uint64_t last_lease_ = 0;
    std::size_t held_ = 0;  // runs that are not released
    Runs pinned_;
    LoadingRuns loads_;
};

}  // namespace fdcache
