// The reports of plans. The usual end, of a plan of which everything was copied, takes no step in Python.
#include <nanobind/stl/optional.h>
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

class PlanReports {
  public:
    // Without a device the device cache is the engine's. Host and meter are there together.
    PlanReports(PlanTable &plans, Loads &loads, Tier *device, HostIndex *host, CopyMeter *meter,
                bool tells_arrivals)
        : plans_(plans),
          loads_(loads),
          device_(device),
          host_(host),
          meter_(meter),
          tells_arrivals_(tells_arrivals) {}

    // What follows from reports and is not done here.
    struct Counted {
        nb::list ended;            // plans whose transfers Python has to end
        nb::list arrived;          // with `tells_arrivals`, (transfer, flags) of the other copies to the host
        nb::list handovers;        // reports of hand-overs
        bool not_cleared = false;  // a rank's storage has kept its blocks

        bool is_empty() const {
            return !not_cleared && !nb::len(ended) && !nb::len(arrived) && !nb::len(handovers);
        }
    };
    // Throws PlanError, before any is counted, for a report that does not fit its plan.
    Counted count(const nb::list &reports);
    const CopiedBlocks &copied() const { return copied_; }
    std::uint64_t unexpected() const { return unexpected_; }

  private:
    void measure(const CheckedReport &report);
    bool ends_here(const InFlightPlan &flight) const;
    bool is_below_fetch(const InFlightPlan &flight) const;
    bool waits_for_copy_above(const SwapInFlight &transfer) const;
    void end_plan(const InFlightPlan &flight, nb::list &arrived);
    void end_loads(const InFlightPlan &flight, const SwapInFlight &loads);
    void end_copies_to_host(const SwapInFlight &copies, nb::list &arrived);

    PlanTable &plans_;
    Loads &loads_;
    Tier *device_;
    HostIndex *host_;
    CopyMeter *meter_;
    bool tells_arrivals_;
    CopiedBlocks copied_;
    std::uint64_t unexpected_ = 0;
    std::vector<std::uint8_t> ones_;
};

std::vector<std::uint64_t> checksums_of(const SwapInFlight &transfer) {
    if (!transfer.checksums.is_valid()) return {};
    const ArrayValues<std::uint64_t> values(transfer.checksums);
    return {values.span().begin(), values.span().end()};
}

// One side of a transfer.
class Slots {
  public:
    Slots(const SwapInFlight &transfer, const char *side) : values_(transfer.swap.attr(side)) {}
    std::span<const Slot> all() const {
        return {reinterpret_cast<const Slot *>(values_.span().data()), values_.span().size()};
    }

  private:
    ArrayValues<std::int32_t> values_;
};

// True if a copy to the host may have ended before one of a block above it.
bool PlanReports::waits_for_copy_above(const SwapInFlight &transfer) const {
    const ArrayValues<Digest> hashes(transfer.swap.attr("hash_values"));
    const ArrayValues<Digest> parents(transfer.swap.attr("parent_hashes"));
    std::vector<Digest> above;
    for (std::size_t i = 0; i < parents.span().size(); ++i)
        if (i == 0 || parents.span()[i] != hashes.span()[i - 1]) above.push_back(parents.span()[i]);
    const std::vector<Presence> known = host_->contains(above);
    return std::ranges::find(known, Presence::kPending) != known.end();
}

PlanReports::Counted PlanReports::count(const nb::list &reports) {
    std::vector<CheckedReport> checked;
    checked.reserve(nb::len(reports));
    for (nb::handle report : reports) checked.push_back(plans_.check(report));
    Counted counted;
    for (std::size_t i = 0; i < checked.size(); ++i) {
        const nb::object report = reports[i];
        const InFlightPlan *const flight = checked[i].expected();
        if (!flight) {
            ++unexpected_;
            continue;
        }
        measure(checked[i]);
        const bool is_refused = nb::cast<bool>(report.attr("refused"));
        if (flight->is_task && !nb::object(report.attr("handover")).is_none())
            counted.handovers.append(report);
        if (!flight->is_task && is_refused)
            counted.not_cleared |= nb::cast<bool>(flight->plan.attr("clear_storage"));
        nb::list finished;
        plans_.record(checked[i], is_refused, finished);
        for (nb::handle each : finished) {
            const auto &ended = *nb::inst_ptr<InFlightPlan>(each);
            if (ends_here(ended))
                end_plan(ended, counted.arrived);
            else
                counted.ended.append(each);
        }
    }
    return counted;
}

void PlanReports::measure(const CheckedReport &report) {
    if (!meter_) return;
    const auto &transfers = report.expected()->transfers;
    for (std::size_t i = 0; i < transfers.size(); ++i)
        meter_->add(transfers[i]->kind, nb::cast<std::uint64_t>(report.results[i].attr("copied_bytes")),
                    nb::cast<double>(report.results[i].attr("seconds")));
}

// True for a plan of which every rank has copied everything, and which nothing else waits for.
bool PlanReports::ends_here(const InFlightPlan &flight) const {
    if (flight.is_task || is_below_fetch(flight)) return false;
    for (const auto &each : flight.transfers) {
        if (!each->is_whole()) return false;
        if (each->kind != kLoad && waits_for_copy_above(*each)) return false;
    }
    return true;
}

// True if a load of the plan goes on with a fetch from a peer, which has to end after it.
bool PlanReports::is_below_fetch(const InFlightPlan &flight) const {
    return device_ && std::ranges::any_of(loads_.parts_of(flight.plan_id),
                                          [](const LoadPart &part) { return part.stop < part.load->stop; });
}

void PlanReports::end_plan(const InFlightPlan &flight, nb::list &arrived) {
    for (const auto &transfer : flight.transfers) {
        if (ones_.size() < transfer->size) ones_.assign(transfer->size, 1);
        if (transfer->kind == kLoad)
            end_loads(flight, *transfer);
        else
            end_copies_to_host(*transfer, arrived);
    }
}

void PlanReports::end_loads(const InFlightPlan &flight, const SwapInFlight &loads) {
    const Slots targets(loads, "dst_block_ids"), sources(loads, "src_block_ids");
    const ArrayValues<Digest> hashes(loads.swap.attr("hash_values"));
    copied_.loaded += loads.size;
    const std::span all = std::span<const std::uint8_t>(ones_).first(loads.size);
    if (device_)
        loads_.end(flight.plan_id, device_->complete(targets.all(), all, checksums_of(loads)), {});
    else
        loads_.end(flight.plan_id, all, {});
    host_->end_load({sources.all(), hashes.span(), all});
}

void PlanReports::end_copies_to_host(const SwapInFlight &copies, nb::list &arrived) {
    const Slots targets(copies, "dst_block_ids"), sources(copies, "src_block_ids");
    (copies.kind == kEvict ? copied_.evicted : copied_.backed_up) += copies.size;
    auto ready = host_->complete(targets.all(), std::span(ones_).first(copies.size), checksums_of(copies));
    if (device_) device_->unhold(sources.all());
    if (tells_arrivals_)
        arrived.append(nb::make_tuple(copies.swap, to_numpy<std::uint8_t>(std::move(ready))));
}

}  // namespace

void bind_plan_reports(nb::module_ &module) {
    nb::class_<CopiedBlocks>(module, "CopiedBlocks", "Totals of blocks copied by purpose.")
        .def_ro("loaded", &CopiedBlocks::loaded)
        .def_ro("evicted", &CopiedBlocks::evicted)
        .def_ro("backed_up", &CopiedBlocks::backed_up);
    using Counted = PlanReports::Counted;
    nb::class_<Counted>(module, "CountedReports", "What follows from reports.")
        .def_ro("ended", &Counted::ended, nb::for_getter(nb::sig("def ended(self, /) -> list[InFlightPlan]")),
                "Plans whose transfers the caller has to end: tasks, and those with a failure.")
        .def_ro("arrived", &Counted::arrived,
                nb::for_getter(nb::sig("def arrived(self, /) -> list[typing.Any]")),
                "(transfer, 1 for each block that is in the tier or None for a service, checksums or None)\n"
                "of the other copies to the host.")
        .def_ro("handovers", &Counted::handovers,
                nb::for_getter(nb::sig("def handovers(self, /) -> list[typing.Any]")),
                "Reports of hand-overs.")
        .def_ro("not_cleared", &Counted::not_cleared,
                "True if a rank refused a plan that empties its storage.");
    using Reports = WithParts<PlanReports>;
    nb::class_<Reports>(
        module, "PlanReports", traversed<Reports>(),
        "Counts the reports of plans, and ends the transfers of those of which every rank has "
        "copied everything.")
        .def(
            "__init__",
            [](Reports *self, nb::typed<nb::object, PlanTable> plans, nb::typed<nb::object, Loads> loads,
               nb::typed<nb::object, Tier> device, nb::typed<nb::object, HostIndex> host,
               nb::typed<nb::object, CopyMeter> meter, bool tells_arrivals) {
                new (self)
                    Reports(nb::cast<PlanTable &>(plans), nb::cast<Loads &>(loads), nb::cast<Tier *>(device),
                            nb::cast<HostIndex *>(host), nb::cast<CopyMeter *>(meter), tells_arrivals);
                self->parts = {plans, loads, device, host, meter};
            },
            "plans"_a, "loads"_a, "device"_a.none(), "host"_a.none(), "meter"_a.none(), "tells_arrivals"_a)
        .def(
            "count",
            [](Reports &self, const nb::list &reports) {
                Counted counted = self.count(reports);
                return counted.is_empty() ? nb::none() : nb::cast(std::move(counted));
            },
            "reports"_a, nb::sig("def count(self, reports: list[typing.Any]) -> CountedReports | None"),
            "Count reports; return what follows from them, None if nothing does. Raises ``PlanError`` "
            "before\n"
            "any is counted.")
        .def_prop_ro("copied", [](const Reports &self) -> const CopiedBlocks & { return self.copied(); })
        .def_prop_ro(
            "unexpected", [](const Reports &self) { return self.unexpected(); },
            "Reports that no plan waited for.");
}

}  // namespace fdcache
