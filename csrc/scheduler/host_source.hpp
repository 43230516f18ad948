// The host tier from which the requests of a scheduler load blocks: one of this process, or that of a
// service.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tier/pinned_runs.hpp"
#include "tier/tier.hpp"

namespace fdcache {

// Blocks of a path on the host, from some block on, in path order. `lease` pins them until it is released.
struct HostRun {
    std::uint64_t lease = 0;  // 0: there is no run
    std::vector<Slot> slots;
    std::vector<std::uint32_t> generations;
    std::vector<std::uint8_t> unverified;  // 1: the record is not verified; empty: all are
    std::size_t from_storage = 0;          // blocks that were read from storage for the request

    std::size_t size() const { return slots.size(); }
    void keep_first(std::size_t count);
    void drop_first(std::size_t count);
};

class HostSource {
  public:
    HostSource() = default;  // there is no host tier
    explicit HostSource(Tier &tier) : tier_(&tier) {}
    explicit HostSource(PinnedRuns &service) : service_(&service) {}

    explicit operator bool() const { return tier_ || service_; }
    Tier *tier() const { return tier_; }

    struct Answer {
        HostRun run;
        bool pending = false;     // the block after the run is on its way to the host
        std::size_t ask_for = 0;  // if not 0: the service has to be asked for as many blocks of the path
    };
    // Pins the leading run of a path from `start` on.
    Answer find(std::span<const Digest> path, std::size_t start, StorageUse storage);
    void release(std::uint64_t lease);
    // As `release`, of a run whose blocks were used. A service takes every run for one.
    void finish(std::uint64_t lease);
    // True if a copy into the tier of one of these blocks is in flight.
    bool is_copying(std::span<const Digest> hashes) const;
    // Starts and ends a copy out of slots of a run.
    void begin_load(const HostRun &run);
    void end_load(std::span<const Slot> slots);

  private:
    Tier *tier_ = nullptr;
    PinnedRuns *service_ = nullptr;
};

}  // namespace fdcache
