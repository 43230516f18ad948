// The side of a client of a shared tier: runs that it finds in the presence table and pins by itself, and the
// loads that read them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "hash/digest.hpp"
#include "tier/presence.hpp"
#include "tier/run_ring.hpp"

namespace fdcache {

// The leading blocks of a path from `start` on, as the table shows them under `version`.
struct FoundRun {
    std::uint64_t version = 0;
    std::size_t start = 0;
    std::vector<Slot> slots;
    std::vector<std::uint32_t> generations;
    std::vector<std::uint8_t> unverified;  // empty if all are verified
};

// Any thread may call.
class SharedRuns {
  public:
    SharedRuns(PresenceTable table, RunRing ring) : table_(table), ring_(ring) {}

    FoundRun find(std::span<const Digest> path, std::size_t start) const;
    // Pins a run that was found on this path and returns its number. Returns 0 if the service has to be
    // asked: it removes blocks now, has removed some since, or lets no client pin.
    std::uint64_t pin(std::span<const Digest> path, const FoundRun &found);
    // A number for a run that the service pins on request.
    std::uint64_t next_number();
    // Unpins a run, once there is room to say so: see flush.
    void unpin(std::uint64_t run);
    // Writes what had no room before.
    void flush();

    // Called after a look-up that found blocks ("found") and after a pin ("pinned"), so that a test can let
    // something else happen between.
    std::function<void(const char *)> observer;

  private:
    std::uint64_t write_pin(std::span<const Digest> path, const FoundRun &found);
    bool write_unpins();

    std::mutex mutex_;
    PresenceTable table_;
    RunRing ring_;
    std::uint64_t last_ = 0;
    std::deque<std::uint64_t> unpins_;
};

// The slots that loads read, and the runs that pin them.
class LoadingRuns {
  public:
    void begin(std::uint64_t run, std::span<const Slot> slots);
    // Ends a load of these slots, and returns the runs of which it read. Throws std::out_of_range.
    std::vector<std::uint64_t> end(std::span<const Slot> slots);
    bool reads(std::uint64_t run) const { return counts_.contains(run); }
    std::size_t slots() const { return reads_; }

  private:
    bool is_read(Slot slot) const { return slot < first_.size() && first_[slot]; }
    std::uint64_t take(Slot slot);

    std::vector<std::uint64_t> first_;                   // by slot: a run of which it is read, 0 for none
    std::unordered_multimap<Slot, std::uint64_t> more_;  // the others
    std::size_t reads_ = 0;
    std::unordered_map<std::uint64_t, std::size_t> counts_;  // slots of each run that are being read
};

}  // namespace fdcache
