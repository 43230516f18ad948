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
#include "scheduler/loads.hpp"
#include "scheduler/python_request.hpp"

namespace fdcache {
namespace {

struct CopiedBlocks {
    std::uint64_t loaded = 0, evicted = 0, backed_up = 0, failed = 0;
};

class WholeReports {
  public:
    // Without a device the device cache is the engine's.
    WholeReports(PlanTable &plans, Loads &loads, Tier *device, HostIndex &host, CopyMeter &meter,
                 bool tells_arrivals)
        : plans_(plans),
          loads_(loads),
          device_(device),
          host_(host),
          meter_(meter),
          tells_arrivals_(tells_arrivals) {}

    // Counts the reports and returns, with `tells_arrivals`, the (transfer, flags) of blocks that came to the
    // host. Returns nothing, and changes nothing, if Python has to count one of them.
    std::optional<nb::list> count(const nb::list &reports);
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
    bool is_below_fetch(const PlanInFlight &flight) const;
    void end_plan(PlanInFlight &flight, nb::list &arrived);
    void end_loads(const PlanInFlight &flight, const PlannedTransfer &loads);
    void end_copies_to_host(const PlannedTransfer &copies, nb::list &arrived);

    PlanTable &plans_;
    Loads &loads_;
    Tier *device_;
    HostIndex &host_;
    CopyMeter &meter_;
    bool tells_arrivals_;
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
    if (is_below_fetch(*report.flight)) return false;
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

std::optional<nb::list> WholeReports::count(const nb::list &reports) {
    std::vector<Report> read_reports;
    read_reports.reserve(nb::len(reports));
    for (nb::handle each : reports) {
        Report report;
        if (!read(each, report)) return std::nullopt;
        for (const Report &other : read_reports)
            if (other.flight == report.flight && other.rank == report.rank) return std::nullopt;
        read_reports.push_back(std::move(report));
    }
    nb::list arrived;
    for (const Report &report : read_reports) {
        count(report);
        if (!report.flight->remaining) end_plan(*report.flight, arrived);
    }
    return arrived;
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

// True if a load of the plan goes on with a fetch from a peer, which has to end after it.
bool WholeReports::is_below_fetch(const PlanInFlight &flight) const {
    return device_ && std::ranges::any_of(loads_.parts_of(flight.plan_id),
                                          [](const LoadPart &part) { return part.stop < part.load->stop; });
}

void WholeReports::end_plan(PlanInFlight &flight, nb::list &arrived) {
    plans_.remove(flight);
    for (const PlannedTransfer &transfer : flight.transfers) {
        transfer.swap.attr("success") = true;
        if (ones_.size() < transfer.size) ones_.assign(transfer.size, 1);
        if (transfer.kind == kLoad)
            end_loads(flight, transfer);
        else
            end_copies_to_host(transfer, arrived);
    }
}

void WholeReports::end_loads(const PlanInFlight &flight, const PlannedTransfer &loads) {
    const Slots targets(loads, "dst_block_ids"), sources(loads, "src_block_ids");
    const ArrayValues<Digest> hashes(loads.swap.attr("hash_values"));
    copied_.loaded += loads.size;
    const std::span all = std::span<const std::uint8_t>(ones_).first(loads.size);
    if (device_)
        loads_.end(flight.plan_id, device_->complete(targets.all(), all, checksums_of(loads)), {});
    else
        loads_.end(flight.plan_id, all, {});
    host_.end_load({sources.all(), hashes.span(), all});
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
            [](Reports *self, nb::typed<nb::object, PlanTable> plans, nb::typed<nb::object, Loads> loads,
               nb::typed<nb::object, Tier> device, nb::typed<nb::object, HostIndex> host,
               nb::typed<nb::object, CopyMeter> meter, bool tells_arrivals) {
                new (self)
                    Reports(nb::cast<PlanTable &>(plans), nb::cast<Loads &>(loads), nb::cast<Tier *>(device),
                            nb::cast<HostIndex &>(host), nb::cast<CopyMeter &>(meter), tells_arrivals);
                self->parts = {plans, loads, device, host, meter};
            },
            "plans"_a, "loads"_a, "device"_a.none(), "host"_a, "meter"_a, "tells_arrivals"_a)
        .def(
            "count", [](Reports &self, const nb::list &reports) { return self.count(reports); }, "reports"_a,
            nb::sig("def count(self, reports: list[typing.Any]) -> list[typing.Any] | None"),
            "Count reports. Return, with ``tells_arrivals``, (transfer, 1 for each block that is in the "
            "tier)\n"
            "of copies to the host. Return None, and change nothing, if one of the reports is "
            "another:\n"
            "unexpected, refused, of a failure or a task, or of a copy below one in flight.")
        .def_prop_ro("copied", [](const Reports &self) -> const CopiedBlocks & { return self.copied(); });
}

}  // namespace fdcache
