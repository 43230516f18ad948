// Reports of plans of which everything was copied: the usual end of a plan, in one call.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "plan/ledger.hpp"
#include "python_arrays.hpp"
#include "scheduler/block_manager.hpp"
#include "scheduler/python_request.hpp"

namespace fdcache {
namespace {

// How Python is told of the end of a load: its class and members.
struct LoadForms {
    nb::object outcome, confirmed, failed;
    std::size_t block_size;
};

struct CopiedBlocks {
    std::uint64_t loaded = 0, evicted = 0, backed_up = 0, failed = 0;
};

class WholeReports {
  public:
    // Without blocks and a device, which are there together, the device cache is the engine's.
    WholeReports(PlanTable &plans, BlockManager *blocks, Tier *device, HostIndex &host, CopyMeter &meter,
                 bool tells_arrivals, LoadForms forms)
        : plans_(plans),
          blocks_(blocks),
          device_(device),
          host_(host),
          meter_(meter),
          tells_arrivals_(tells_arrivals),
          forms_(std::move(forms)) {}

    // Counts the reports and returns the loads that ended, for a device of the engine the numbers of their
    // plans, and with `tells_arrivals` the (transfer, flags) of blocks that came to the host. Returns
    // nothing, and changes nothing, if Python has to count one of them.
    std::optional<std::pair<nb::list, nb::list>> count(const nb::list &reports);
    const CopiedBlocks &copied() const { return copied_; }

  private:
    struct Report {
        PlanInFlight *flight;
        nb::object keep;
        std::size_t rank;
        nb::object results;
    };

    bool read(nb::handle value, Report &report) const;
    bool is_whole(const PlannedTransfer &transfer, nb::handle result) const;
    bool waits_for_copy_above(const PlannedTransfer &transfer) const;
    void count(const Report &report);
    void end_plan(PlanInFlight &flight, nb::list &outcomes, nb::list &arrived);
    void end_loads(const PlanInFlight &flight, const PlannedTransfer &loads, nb::list &outcomes);
    void end_copies_to_host(const PlannedTransfer &copies, nb::list &arrived);

    PlanTable &plans_;
    BlockManager *blocks_;
    Tier *device_;
    HostIndex &host_;
    CopyMeter &meter_;
    bool tells_arrivals_;
    LoadForms forms_;
    CopiedBlocks copied_;
    std::vector<std::uint8_t> ones_;
};

std::vector<std::uint64_t> checksums_of(const PlannedTransfer &transfer) {
    if (!transfer.checksums.is_valid()) return {};
    const ArrayValues<std::uint64_t> values(transfer.checksums);
    return {values.span().begin(), values.span().end()};
}

// One side of a transfer.
class Slots {
  public:
    Slots(const PlannedTransfer &transfer, const char *side) : values_(transfer.swap.attr(side)) {}
    std::span<const Slot> all() const {
        return {reinterpret_cast<const Slot *>(values_.span().data()), values_.span().size()};
    }

  private:
    ArrayValues<std::int32_t> values_;
};

bool WholeReports::read(nb::handle value, Report &report) const {
    const nb::object rank = nb::getattr(value, "rank", nb::none());
    const nb::object plan_id = nb::getattr(value, "plan_id", nb::none());
    report.flight = plans_.find(plan_id);
    const long given = PyLong_AsLong(rank.ptr());
    if (PyErr_Occurred()) PyErr_Clear();  // Python says what is wrong with it
    if (!report.flight || given < 0) return false;
    report.rank = static_cast<std::size_t>(given);
    if (report.rank >= plans_.num_ranks || !report.flight->waits_for(report.rank)) return false;
    if (report.flight->is_task || report.flight->is_counted_in_python) return false;
    if (!value.attr("refused").is(nb::bool_(false))) return false;
    if (blocks_ && std::ranges::any_of(blocks_->loads_of(report.flight->plan_id), &LoadRange::has_fetch))
        return false;
    report.keep = nb::borrow(plans_.plans[plan_id]);
    report.results = value.attr("results");
    const auto &transfers = report.flight->transfers;
    if (!nb::isinstance<nb::tuple>(report.results) || nb::len(report.results) != transfers.size())
        return false;
    for (std::size_t i = 0; i < transfers.size(); ++i)
        if (!is_whole(transfers[i], report.results[i])) return false;
    return true;
}

bool WholeReports::is_whole(const PlannedTransfer &transfer, nb::handle result) const {
    if (!result.attr("purpose").is(transfer.purpose) || nb::len(nb::object(result.attr("failed"))) ||
        !result.attr("error_message").is_none())
        return false;
    if (transfer.kind != kLoad && waits_for_copy_above(transfer)) return false;
    const std::size_t sums = nb::len(nb::object(result.attr("checksums")));
    return !sums || sums == transfer.size;
}

// True if a copy to the host may have ended before one of a block above it.
bool WholeReports::waits_for_copy_above(const PlannedTransfer &transfer) const {
    const ArrayValues<Digest> hashes(transfer.swap.attr("hash_values"));
    const ArrayValues<Digest> parents(transfer.swap.attr("parent_hashes"));
    std::vector<Digest> above;
    for (std::size_t i = 0; i < parents.span().size(); ++i)
        if (i == 0 || parents.span()[i] != hashes.span()[i - 1]) above.push_back(parents.span()[i]);
    const std::vector<Presence> known = host_.contains(above);
    return std::ranges::find(known, Presence::kPending) != known.end();
}

std::optional<std::pair<nb::list, nb::list>> WholeReports::count(const nb::list &reports) {
    std::vector<Report> read_reports;
    read_reports.reserve(nb::len(reports));
    for (nb::handle each : reports) {
        Report report;
        if (!read(each, report)) return std::nullopt;
        for (const Report &other : read_reports)
            if (other.flight == report.flight && other.rank == report.rank) return std::nullopt;
        read_reports.push_back(std::move(report));
    }
    std::pair<nb::list, nb::list> ended;
    for (const Report &report : read_reports) {
        count(report);
        if (!report.flight->remaining) end_plan(*report.flight, ended.first, ended.second);
    }
    return ended;
}

void WholeReports::count(const Report &report) {
    auto &transfers = report.flight->transfers;
    for (std::size_t i = 0; i < transfers.size(); ++i) {
        const nb::object result = report.results[i];
        meter_.add(transfers[i].kind, nb::cast<std::uint64_t>(result.attr("copied_bytes")),
                   nb::cast<double>(result.attr("seconds")));
        if (!report.rank) transfers[i].checksums = result.attr("checksums");
    }
    report.flight->stop_waiting(report.rank);
}

void WholeReports::end_plan(PlanInFlight &flight, nb::list &outcomes, nb::list &arrived) {
    plans_.remove(flight);
    for (const PlannedTransfer &transfer : flight.transfers) {
        transfer.swap.attr("success") = true;
        if (ones_.size() < transfer.size) ones_.assign(transfer.size, 1);
        if (transfer.kind == kLoad)
            end_loads(flight, transfer, outcomes);
        else
            end_copies_to_host(transfer, arrived);
    }
}

void WholeReports::end_loads(const PlanInFlight &flight, const PlannedTransfer &loads, nb::list &outcomes) {
    const Slots targets(loads, "dst_block_ids"), sources(loads, "src_block_ids");
    const ArrayValues<Digest> hashes(loads.swap.attr("hash_values"));
    const EndedLoad ended{sources.all(), hashes.span(), std::span(ones_).first(loads.size)};
    copied_.loaded += loads.size;
    if (!device_) {
        host_.end_load(ended);
        outcomes.append(flight.plan_id);
        return;
    }
    const auto ready =
        device_->complete(targets.all(), std::span(ones_).first(loads.size), checksums_of(loads));
    host_.end_load(ended);
    for (const LoadRange &load : blocks_->take_loads(flight.plan_id)) {
        auto *const request = static_cast<PythonRequest *>(blocks_->waiting_for(load));
        if (!request) continue;
        const std::uint32_t copied = leading_copied(load, ready);
        const bool is_whole = copied == load.count;
        blocks_->end_load(*request, copied, load.count);
        const nb::object message = is_whole ? nb::none() : nb::object(nb::str("the cache was reset"));
        outcomes.append(forms_.outcome(request->request_id, is_whole ? forms_.confirmed : forms_.failed,
                                       (load.first_block + copied) * forms_.block_size, message));
    }
}

void WholeReports::end_copies_to_host(const PlannedTransfer &copies, nb::list &arrived) {
    const Slots targets(copies, "dst_block_ids"), sources(copies, "src_block_ids");
    (copies.kind == kEvict ? copied_.evicted : copied_.backed_up) += copies.size;
    auto ready = host_.complete(targets.all(), std::span(ones_).first(copies.size), checksums_of(copies));
    if (device_) device_->unhold(sources.all());
    if (tells_arrivals_)
        arrived.append(nb::make_tuple(copies.swap, to_numpy<std::uint8_t>(std::move(ready))));
}

}  // namespace

void bind_whole_reports(nb::module_ &module) {
    nb::class_<LoadForms>(module, "LoadForms", "How ``WholeReports`` tells of the ends of loads.")
        .def(nb::init<nb::object, nb::object, nb::object, std::size_t>(), "outcome"_a, "confirmed"_a,
             "failed"_a, "block_size"_a);
    nb::class_<CopiedBlocks>(module, "CopiedBlocks", "Totals of blocks copied by purpose.")
        .def_ro("loaded", &CopiedBlocks::loaded)
        .def_ro("evicted", &CopiedBlocks::evicted)
        .def_ro("backed_up", &CopiedBlocks::backed_up);
    using Reports = WithParts<WholeReports>;
    nb::class_<Reports>(
        module, "WholeReports", traversed<Reports>(),
        "Counts the reports of plans of which every rank has copied everything so far, and ends\n"
        "their transfers in the tiers.")
        .def(
            "__init__",
            [](Reports *self, nb::typed<nb::object, PlanTable> plans,
               nb::typed<nb::object, PythonBlockManager> blocks, nb::typed<nb::object, Tier> device,
               nb::typed<nb::object, HostIndex> host, nb::typed<nb::object, CopyMeter> meter,
               bool tells_arrivals, const LoadForms &forms) {
                new (self) Reports(nb::cast<PlanTable &>(plans), nb::cast<PythonBlockManager *>(blocks),
                                   nb::cast<Tier *>(device), nb::cast<HostIndex &>(host),
                                   nb::cast<CopyMeter &>(meter), tells_arrivals, forms);
                self->parts = {plans, blocks, device, host, meter};
            },
            "plans"_a, "blocks"_a.none(), "device"_a.none(), "host"_a, "meter"_a, "tells_arrivals"_a,
            "forms"_a)
        .def(
            "count", [](Reports &self, const nb::list &reports) { return self.count(reports); }, "reports"_a,
            nb::sig("def count(self, reports: list[typing.Any]) -> "
                    "tuple[list[typing.Any], list[typing.Any]] | None"),
            "Count reports. Return the outcomes of loads that ended, without a device the numbers of their "
            "plans,\n"
            "and with ``tells_arrivals`` (transfer, 1 for each block that is in the tier) of copies to the\n"
            "host. Return None, and change nothing, if one of the reports is another: unexpected, refused, "
            "of a\n"
            "failure or a task, or of a copy below one in flight.")
        .def_prop_ro("copied", [](const Reports &self) -> const CopiedBlocks & { return self.copied(); });
}

}  // namespace fdcache
