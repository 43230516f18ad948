// Plans in flight, as Python objects: which ranks have to report, and what each has copied.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"

namespace fdcache {

// Index of a SwapPurpose, a str.
enum Purpose : std::size_t { kLoad, kEvict, kBackup, kStore, kPrefetch, kSend, kFetch, kPurposes };
Purpose purpose_of(nb::handle value);

// A report that does not fit its plan.
struct PlanError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Why a rank has not copied a block, where that matters to the tier that it comes from or goes to.
enum Cause : std::size_t { kLost, kCorrupt, kBadSlots, kNoRoom, kCauses };

// One transfer of a plan, a CacheSwapMetadata, with the result of each block over all ranks that have
// reported.
struct SwapInFlight {
    explicit SwapInFlight(nb::object swap);

    // Throws PlanError for a TransferResult of other blocks. Returns true if the rank has copied all of
    // these.
    bool check(nb::handle result, std::uint64_t plan_id) const;
    void add(nb::handle result);
    void add_checksums(nb::object more);
    void fail() { copied.assign(size, 0); }
    bool is_whole() const;

    nb::object swap;
    nb::object purpose;
    Purpose kind;
    std::size_t size;
    nb::object checksums;                                   // of the first record; none before
    std::vector<std::uint8_t> copied;                       // 1 for each block; empty: all
    std::array<std::vector<std::uint8_t>, kCauses> causes;  // 1 for each block; empty: none
};

// A TransferPlan, a StorageTask or a PeerTask that some rank has not reported.
struct InFlightPlan {
    InFlightPlan(nb::object plan, double deadline, std::size_t ranks);

    bool waits_for(std::size_t rank) const { return rank < waiting.size() && waiting[rank]; }
    void stop_waiting(std::size_t rank) {
        remaining -= waiting[rank];
        waiting[rank] = false;
    }
    // Throws PlanError for results of other transfers. Returns true if the rank has copied everything.
    bool check(const nb::tuple &results, std::size_t rank) const;
    // Counts one rank's results, which were checked. `sharers`: see PlanTable.
    void add(const nb::tuple &results, std::size_t rank, bool is_whole, std::size_t sharers);
    // Counts a rank that will never report as one that has copied nothing.
    void fail(std::size_t rank, const std::string &reason);
    // Tells the transfers how they have ended, once the last rank has reported.
    void finish() const;

    nb::object plan;
    std::uint64_t plan_id;
    double deadline;
    bool is_overdue = false;
    bool is_task = false;  // a StorageTask or a PeerTask
    std::vector<std::shared_ptr<SwapInFlight>> transfers;
    std::vector<std::string> errors;  // one for each failed rank and transfer
    std::vector<bool> waiting;        // by rank
    std::size_t remaining;
};

// A report that fits its plan.
struct CheckedReport {
    nb::object flight;  // an InFlightPlan; none unless it waited for the rank
    std::size_t rank;
    nb::tuple results;
    bool is_whole;  // the rank has copied everything

    // Null if the plan does not wait for the rank, or has ended since with another report of it.
    InFlightPlan *expected() const {
        auto *const plan = flight.is_valid() ? nb::inst_ptr<InFlightPlan>(flight) : nullptr;
        return plan && plan->waits_for(rank) ? plan : nullptr;
    }
};

// The plans in flight by number.
struct PlanTable {
    // `sharers`: the ranks, from the first on, that write the first record of a block in shares. Each has
    // zeros for the checksums of blocks that it does not write.
    explicit PlanTable(std::size_t ranks, std::size_t sharers = 1) : num_ranks(ranks), num_sharers(sharers) {}

    // Null if there is none.
    InFlightPlan *find(nb::handle plan_id) const;
    void expect(nb::handle flight);
    void remove(const InFlightPlan &flight);

    // Returns the rank, or throws PlanError for an unknown one.
    std::size_t require_rank(nb::handle rank) const;
    // Throws PlanError for a report of an unknown rank, or one that does not fit its plan.
    CheckedReport check(nb::handle report) const;
    // Counts an expected report. Appends the plans and tasks that it completes, which are removed.
    void record(const CheckedReport &report, bool is_refused, nb::list &finished);
    // Removes a plan and appends it, unless it waits for a rank.
    void take_if_finished(InFlightPlan &flight, nb::list &finished);

    std::size_t num_ranks;
    std::size_t num_sharers;
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
