// The host tier of a service as one engine uses it: look-ups and pins in shared memory, slots that the
// service has granted for copies, and what the service has to be told.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "hash/digest.hpp"
#include "tier/host_index.hpp"
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

// Copies or a load that ended, until they are sent to the service.
struct HostReport {
    bool is_load = false;
    std::vector<Slot> slots;
    std::vector<Digest> parents;  // of copies
    std::vector<Digest> hashes;
    std::vector<std::uint8_t> copied;
    std::vector<std::uint64_t> checksums;  // of copies
};

// An engine has one session after another. The next one begins once nothing of the one before is in flight,
// so that the service may give all its slots to others; a run keeps its session's table and ring alive.
// Nothing is found or reserved while no session is open, or is `closed`; copies and loads still end.
//
// The caller has the interpreter lock. The thread that keeps the session opens and closes it between any two
// calls.
class SharedHost : public HostIndex {
  public:
    using Runs = std::shared_ptr<SharedRuns>;
    using Copies = std::shared_ptr<OutgoingCopies>;

    // A session has begun. Nothing of the one before is in flight, to the service or from it.
    void begin_session(Runs runs, Copies copies);
    void end_session() { is_open_ = false; }
    // Closed for look-ups and copies, whatever session there is: its blocks are to be forgotten.
    void set_closed(bool closed) { is_closed_ = closed; }

    Found find_and_pin(std::span<const Digest> path, std::size_t start, StorageUse storage) override;
    bool release(LeaseId lease) override;
    void begin_load(LeaseId lease, std::span<const Slot> slots) override;
    void end_load(const EndedLoad &ended) override;
    void cancel_load(std::span<const Slot> slots) override;
    std::vector<Presence> contains(std::span<const Digest> hashes) const override;
    std::uint64_t holds(std::span<const Digest *const> digests) const override;
    std::size_t blocks() const override;
    std::size_t room() const override;
    std::size_t capacity() const override;
    CopyReservation reserve(std::span<const Digest> parents, std::span<const Digest> hashes,
                            bool below_pending) override;
    std::vector<std::uint8_t> complete(std::span<const Slot> slots, std::span<const std::uint8_t> copied,
                                       std::span<const std::uint64_t> checksums) override;

    // Adds a run that a service has pinned under this number.
    LeaseId add(Runs owner, std::uint64_t number, bool unverified);
    // Ends of copies and loads that the service has to be told of, in order. Without a session that it
    // listens to, blocks that were copied are not there.
    std::vector<HostReport> take_reports();
    void drop_reports();
    bool has_reports() const { return !reports_.empty(); }

    // Runs that are not released, slots that loads read, and blocks that are being copied.
    std::size_t runs() const { return held_; }
    std::size_t slots_loading() const { return loads_.slots(); }
    std::size_t blocks_in_flight() const { return copies_ ? copies_->in_flight() : 0; }

    MissLog misses;

  private:
    struct Run {
        Runs owner;
        std::uint64_t number;
        bool unverified;
        bool released = false;
    };
    using Pinned = std::unordered_map<LeaseId, Run>;

    // Null while nothing is found or reserved.
    Runs open_runs() const { return is_open_ && !is_closed_ ? runs_ : nullptr; }
    Copies open_copies() const { return is_open_ && !is_closed_ ? copies_ : nullptr; }
    void count_miss(const OutgoingCopies &copies, std::span<const Digest> path, std::size_t start,
                    std::size_t end);
    void unpin(Pinned::iterator run);
    void unpin_if_over(Pinned::iterator run);

    Runs runs_;      // of the session that began last
    Copies copies_;  // to it
    bool is_open_ = false;
    bool is_closed_ = false;
    LeaseId last_lease_ = 0;
    std::size_t held_ = 0;  // runs that are not released
    Pinned pinned_;
    LoadingRuns loads_;
    std::vector<HostReport> reports_;
};

}  // namespace fdcache
