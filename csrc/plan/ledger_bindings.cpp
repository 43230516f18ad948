#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <utility>

#include "plan/ledger.hpp"

namespace fdcache {

Purpose purpose_of(nb::handle value) {
    if (PyUnicode_Check(value.ptr()) && PyUnicode_GET_LENGTH(value.ptr())) {
        switch (PyUnicode_READ_CHAR(value.ptr(), 0)) {
            case 'l':
                return kLoad;
            case 'e':
                return kEvict;
            case 'b':
                return kBackup;
            case 's':
                return PyUnicode_CompareWithASCIIString(value.ptr(), "send") ? kStore : kSend;
            case 'f':
                return kFetch;
            case 'p':
                return kPrefetch;
        }
    }
    throw nb::type_error("expected a SwapPurpose");
}

PlanInFlight::PlanInFlight(nb::object given, double deadline, std::size_t ranks)
    : plan(std::move(given)),
      plan_id(nb::cast<std::uint64_t>(plan.attr("plan_id"))),
      deadline(deadline),
      waiting(ranks, true),
      remaining(ranks) {
    const auto add = [this](nb::object swap) {
        nb::object purpose = swap.attr("purpose");
        const Purpose kind = purpose_of(purpose);
        const std::size_t size = nb::len(nb::object(swap.attr("src_block_ids")));
        transfers.push_back({std::move(swap), std::move(purpose), kind, size, {}});
    };
    is_task = nb::hasattr(plan, "swap");
    if (is_task) {
        add(plan.attr("swap"));
        return;
    }
    for (const char *name : {"evictions", "loads", "backups"})
        if (nb::object swap = plan.attr(name); !swap.is_none()) add(std::move(swap));
}

PlanInFlight *PlanTable::find(nb::handle plan_id) const {
    PyObject *const found = PyDict_GetItemWithError(plans.ptr(), plan_id.ptr());
    if (!found && PyErr_Occurred()) nb::raise_python_error();
    return found ? nb::inst_ptr<PlanInFlight>(found) : nullptr;
}

void PlanTable::expect(nb::handle handle) {
    const auto &flight = nb::cast<const PlanInFlight &>(handle);
    plans[nb::int_(flight.plan_id)] = handle;
    for (const PlannedTransfer &each : flight.transfers) blocks[each.kind] += each.size;
    next_deadline = std::min(next_deadline, flight.deadline);
}

void PlanTable::remove(const PlanInFlight &flight) {
    for (const PlannedTransfer &each : flight.transfers) blocks[each.kind] -= each.size;
    nb::del(plans[nb::int_(flight.plan_id)]);
}

void bind_ledger(nb::module_ &module) {
    nb::class_<PlanInFlight>(module, "PlanInFlight",
                             "A plan or a task of one that some of ``ranks`` ranks have not reported.")
        .def(nb::init<nb::object, double, std::size_t>(), "plan"_a, "deadline"_a, "ranks"_a)
        .def_prop_ro(
            "plan", [](const PlanInFlight &self) { return self.plan; },
            nb::for_getter(nb::sig("def plan(self, /) -> typing.Any")))
        .def_ro("deadline", &PlanInFlight::deadline)
        .def_rw("is_overdue", &PlanInFlight::is_overdue)
        .def("waits_for", &PlanInFlight::waits_for, "rank"_a, "Return True if this rank has not reported.")
        .def("stop_waiting", &PlanInFlight::stop_waiting, "rank"_a, "Count a rank that has reported.")
        .def_prop_ro(
            "is_finished", [](const PlanInFlight &self) { return !self.remaining; },
            "True once every rank has reported.")
        .def(
            "count_in_python",
            [](PlanInFlight &self) {
                self.is_counted_in_python = true;
                nb::list checksums;
                for (const PlannedTransfer &each : self.transfers)
                    checksums.append(each.checksums.is_valid() ? each.checksums : nb::none());
                return checksums;
            },
            nb::sig("def count_in_python(self) -> list[numpy.typing.NDArray[numpy.uint64] | None]"),
            "Leave the plan's further reports to Python. Return the checksums that rank 0 has reported for "
            "each\n"
            "transfer.");
    nb::class_<PlanTable>(module, "PlanTable", "The plans in flight by number, for ``num_ranks`` ranks.")
        .def(nb::init<std::size_t>(), "num_ranks"_a)
        .def("__len__", [](const PlanTable &self) { return nb::len(self.plans); })
        .def_ro("num_ranks", &PlanTable::num_ranks)
        .def_prop_ro(
            "plans", [](const PlanTable &self) { return self.plans; },
            nb::for_getter(nb::sig("def plans(self, /) -> dict[int, typing.Any]")))
        .def_rw("next_deadline", &PlanTable::next_deadline, "No plan is newly overdue before it.")
        .def(
            "expect",
            [](PlanTable &self, nb::typed<nb::object, PlanInFlight> flight) { self.expect(flight); },
            "flight"_a, "Add a plan.")
        .def("remove", &PlanTable::remove, "flight"_a, "Remove a plan.")
        .def(
            "blocks_in_flight",
            [](const PlanTable &self, nb::handle purpose) { return self.blocks[purpose_of(purpose)]; },
            "purpose"_a, "Return the number of blocks being copied for this purpose.");
    nb::class_<CopyMeter>(module, "CopyMeter",
                          "Bytes and durations of copies by purpose.\n\n"
                          "``bounds``: upper bounds of a histogram's buckets, in seconds; the\n"
                          "last bucket has none.")
        .def(nb::init<std::vector<double>>(), "bounds"_a)
        .def(
            "add",
            [](CopyMeter &self, nb::handle purpose, std::uint64_t bytes, double seconds) {
                self.add(purpose_of(purpose), bytes, seconds);
            },
            "purpose"_a, "copied_bytes"_a, "seconds"_a,
            "Count one rank's transfer, unless it copied nothing.")
        .def(
            "total",
            [](const CopyMeter &self, nb::handle purpose) {
                const CopyMeter::Total &total = self.totals[purpose_of(purpose)];
                return std::tuple(total.bytes, total.counts, total.seconds);
            },
            "purpose"_a, "Return bytes, transfers by duration, and the sum of the durations.");
}

}  // namespace fdcache
