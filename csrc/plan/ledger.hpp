// Plans in flight, as Python objects: which ranks have to report, and what the ranks copied.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "bindings.hpp"

namespace fdcache {

// Index of a SwapPurpose, a str.
enum Purpose : std::size_t { kLoad, kEvict, kBackup, kStore, kPrefetch, kSend, kFetch, kPurposes };
Purpose purpose_of(nb::handle value);

// One transfer of a plan: a CacheSwapMetadata.
struct PlannedTransfer {
    nb::object swap;
    nb::object purpose;
    Purpose kind;
    std::size_t size;
    nb::object checksums;  // of the first rank's result, once it has reported
};

// A TransferPlan, a StorageTask or a PeerTask that some rank has not reported. Reports of whole plans are
// counted here; once Python has counted one that is not, it counts all of this plan's.
struct PlanInFlight {
    PlanInFlight(nb::object plan, double deadline, std::size_t ranks);

    bool waits_for(std::size_t rank) const { return rank < waiting.size() && waiting[rank]; }
    void stop_waiting(std::size_t rank) {
        remaining -= waiting[rank];
        waiting[rank] = false;
    }

    nb::object plan;
    std::uint64_t plan_id;
    double deadline;
    bool is_overdue = false;
    bool is_task = false;  // a StorageTask or a PeerTask
    bool is_counted_in_python = false;
    std::vector<PlannedTransfer> transfers;
    std::vector<bool> waiting;  // by rank
    std::size_t remaining;
};

// The plans in flight by number.
struct PlanTable {
    explicit PlanTable(std::size_t ranks) : num_ranks(ranks) {}

    // Null if there is none.
    PlanInFlight *find(nb::handle plan_id) const;
    void expect(nb::handle flight);
    void remove(const PlanInFlight &flight);

    std::size_t num_ranks;
    nb::dict plans;
    std::array<std::size_t, kPurposes> blocks{};
    double next_deadline = std::numeric_limits<double>::infinity();  // no plan is newly overdue before it
};

// Bytes that ranks copied by purpose, and a histogram of how long it took.
struct CopyMeter {
    struct Total {
        std::uint64_t bytes = 0;
        std::vector<std::uint64_t> counts;
        double seconds = 0;
    };

    explicit CopyMeter(std::vector<double> upper_bounds) : bounds(std::move(upper_bounds)) {
        for (Total &total : totals) total.counts.resize(bounds.size() + 1);
    }
    void add(Purpose purpose, std::uint64_t bytes, double seconds) {
        if (!bytes) return;
        Total &total = totals[purpose];
        total.bytes += bytes;
        total.seconds += seconds;
        const auto bucket = std::lower_bound(bounds.begin(), bounds.end(), seconds) - bounds.begin();
        ++total.counts[static_cast<std::size_t>(bucket)];
    }

    std::vector<double> bounds;
    std::array<Total, kPurposes> totals;
};

}  // namespace fdcache
