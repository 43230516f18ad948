#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <utility>

#include "plan/ledger.hpp"
#include "python_arrays.hpp"

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

namespace {

constexpr std::array<const char *, kCauses> kCauseNames{"lost", "corrupt", "bad_slots", "no_room"};

std::string numbered(std::uint64_t plan_id) {
    return "report of plan " + std::to_string(plan_id);
}

std::size_t length(nb::handle object, const char *member) {
    return nb::len(nb::object(object.attr(member)));
}

// Calls `use` with each position of a failure.
template <typename Use>
void each_position(nb::handle result, const char *member, const Use &use) {
    const nb::object positions = result.attr(member);
    if (!nb::len(positions)) return;
    const ArrayValues<std::int32_t> values(positions);
    for (const std::int32_t position : values.span()) use(position);
}

void mark(std::vector<std::uint8_t> &flags, std::size_t size, std::int32_t position, std::uint8_t value) {
    if (flags.empty()) flags.assign(size, !value);
    flags[static_cast<std::size_t>(position)] = value;
}

}  // namespace

// --- transfers ---------------------------------------------------------------------------------------------

SwapInFlight::SwapInFlight(nb::object given)
    : swap(std::move(given)),
      purpose(swap.attr("purpose")),
      kind(purpose_of(purpose)),
      size(length(swap, "src_block_ids")) {}

bool SwapInFlight::check(nb::handle result, std::uint64_t plan_id) const {
    const auto require = [&](std::int32_t position) {
        if (position < 0 || static_cast<std::size_t>(position) >= size)
            throw PlanError(numbered(plan_id) + ": failed positions must be below " + std::to_string(size));
    };
    const bool is_whole = !length(result, "failed");
    if (!is_whole) {
        each_position(result, "failed", require);
        for (const char *cause : kCauseNames) each_position(result, cause, require);
    }
    const std::size_t sums = length(result, "checksums");
    if (sums && sums != size)
        throw PlanError(numbered(plan_id) + ": " + std::to_string(sums) + " checksums for " +
                        std::to_string(size) + " blocks");
    return is_whole && nb::object(result.attr("error_message")).is_none();
}

void SwapInFlight::add(nb::handle result) {
    if (!length(result, "failed")) return;
    each_position(result, "failed", [&](std::int32_t position) { mark(copied, size, position, 0); });
    for (std::size_t cause = 0; cause < kCauses; ++cause)
        each_position(result, kCauseNames[cause],
                      [&](std::int32_t position) { mark(causes[cause], size, position, 1); });
}

bool SwapInFlight::is_whole() const {
    return std::ranges::find(copied, 0) == copied.end();
}

// --- plans -------------------------------------------------------------------------------------------------

InFlightPlan::InFlightPlan(nb::object given, double deadline, std::size_t ranks)
    : plan(std::move(given)),
      plan_id(nb::cast<std::uint64_t>(plan.attr("plan_id"))),
      deadline(deadline),
      waiting(ranks, true),
      remaining(ranks) {
    const auto add = [this](nb::object swap) {
        transfers.push_back(std::make_shared<SwapInFlight>(std::move(swap)));
    };
    is_task = nb::hasattr(plan, "swap");
    if (is_task) {
        add(plan.attr("swap"));
        return;
    }
    for (const char *name : {"evictions", "loads", "backups"})
        if (nb::object swap = plan.attr(name); !swap.is_none()) add(std::move(swap));
}

bool InFlightPlan::check(const nb::tuple &results, std::size_t rank) const {
    bool is_same = nb::len(results) == transfers.size();
    for (std::size_t i = 0; is_same && i < transfers.size(); ++i)
        is_same = nb::object(results[i].attr("purpose")).is(transfers[i]->purpose);
    if (!is_same)
        throw PlanError(numbered(plan_id) + " by rank " + std::to_string(rank) +
                        " has other transfers than the plan");
    bool is_whole = true;
    for (std::size_t i = 0; i < transfers.size(); ++i) is_whole &= transfers[i]->check(results[i], plan_id);
    return is_whole;
}

void SwapInFlight::add_checksums(nb::object more) {
    if (!checksums.is_valid() || !nb::len(checksums))
        checksums = std::move(more);
    else if (nb::len(more))
        checksums = checksums + more;
}

void InFlightPlan::add(const nb::tuple &results, std::size_t rank, bool is_whole, std::size_t sharers) {
    stop_waiting(rank);
    for (std::size_t i = 0; i < transfers.size(); ++i) {
        if (rank < sharers) transfers[i]->add_checksums(results[i].attr("checksums"));
        if (is_whole) continue;
        transfers[i]->add(results[i]);
        const nb::object message = results[i].attr("error_message");
        if (!message.is_none() && nb::len(message))
            errors.push_back("rank " + std::to_string(rank) + ": " + nb::cast<std::string>(message));
    }
}

void InFlightPlan::fail(std::size_t rank, const std::string &reason) {
    for (const auto &transfer : transfers) transfer->fail();
    errors.push_back("rank " + std::to_string(rank) + ": " + reason);
    stop_waiting(rank);
}

void InFlightPlan::finish() const {
    for (const auto &transfer : transfers) {
        const bool is_whole = transfer->is_whole();
        transfer->swap.attr("success") = is_whole;
        if (is_whole) continue;
        std::string message;
        for (const std::string &each : errors) message += (message.empty() ? "" : "; ") + each;
        transfer->swap.attr("error_message") = message;
    }
}

InFlightPlan *PlanTable::find(nb::handle plan_id) const {
    PyObject *const found = PyDict_GetItemWithError(plans.ptr(), plan_id.ptr());
    if (!found && PyErr_Occurred()) nb::raise_python_error();
    return found ? nb::inst_ptr<InFlightPlan>(found) : nullptr;
}

void PlanTable::expect(nb::handle handle) {
    const auto &flight = nb::cast<const InFlightPlan &>(handle);
    plans[nb::int_(flight.plan_id)] = handle;
    for (const auto &each : flight.transfers) blocks[each->kind] += each->size;
    next_deadline = std::min(next_deadline, flight.deadline);
}

void PlanTable::remove(const InFlightPlan &flight) {
    for (const auto &each : flight.transfers) blocks[each->kind] -= each->size;
    nb::del(plans[nb::int_(flight.plan_id)]);
}

// --- reports -----------------------------------------------------------------------------------------------

std::size_t PlanTable::require_rank(nb::handle rank) const {
    const long given = PyLong_Check(rank.ptr()) ? PyLong_AsLong(rank.ptr()) : -1;
    if (PyErr_Occurred()) PyErr_Clear();
    if (given >= 0 && static_cast<std::size_t>(given) < num_ranks) return static_cast<std::size_t>(given);
    throw PlanError("rank " + nb::cast<std::string>(nb::repr(rank)) + " is not one of the " +
                    std::to_string(num_ranks) + " ranks");
}

CheckedReport PlanTable::check(nb::handle report) const {
    static PyObject *const type =
        nb::object(nb::module_::import_("fdcache.metadata").attr("TransferReport")).release().ptr();
    const int is_report = PyObject_IsInstance(report.ptr(), type);
    if (is_report < 0) nb::raise_python_error();
    if (!is_report)
        throw PlanError("reports: " + nb::cast<std::string>(nb::object(report.type().attr("__name__"))) +
                        " is not a TransferReport of CacheController.poll");
    CheckedReport checked{{}, require_rank(nb::object(report.attr("rank"))), nb::tuple(), false};
    const nb::object plan_id = report.attr("plan_id");
    const InFlightPlan *const flight = find(plan_id);
    if (!flight || !flight->waits_for(checked.rank)) return checked;
    checked.flight = nb::borrow(plans[plan_id]);
    checked.results = nb::tuple(nb::object(report.attr("results")));
    checked.is_whole = flight->check(checked.results, checked.rank);
    return checked;
}

void PlanTable::record(const CheckedReport &report, bool is_refused, nb::list &finished) {
    InFlightPlan &flight = *report.expected();
    flight.add(report.results, report.rank, report.is_whole, num_sharers);
    take_if_finished(flight, finished);
    if (flight.is_task || !is_refused) return;
    for (nb::handle task : nb::object(flight.plan.attr("tasks"))) {
        InFlightPlan *const other = find(nb::object(task.attr("plan_id")));
        if (!other || !other->waits_for(report.rank)) continue;
        other->fail(report.rank, "the plan did not reach the rank");
        take_if_finished(*other, finished);
    }
}

void PlanTable::take_if_finished(InFlightPlan &flight, nb::list &finished) {
    if (flight.remaining) return;
    finished.append(plans[nb::int_(flight.plan_id)]);
    remove(flight);
    flight.finish();
}

void bind_ledger(nb::module_ &module) {
    nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const PlanError &error) {
            PyErr_SetString(nb::module_::import_("fdcache.errors").attr("PlanError").ptr(), error.what());
        }
    });
    const auto flags_of = [](const SwapInFlight &self) {
        return self.copied.empty() ? std::vector<std::uint8_t>(self.size, 1) : self.copied;
    };
    const auto caused_by = [](Cause cause) {
        return [cause](const SwapInFlight &self) {
            std::vector<std::uint8_t> flags = self.causes[cause];
            flags.resize(self.size);
            return to_numpy<bool>(std::move(flags));
        };
    };
    nb::class_<SwapInFlight>(module, "SwapInFlight",
                             "One transfer of a plan, with the result of each block over all ranks that have "
                             "reported.")
        .def(nb::init<nb::object>(), "swap"_a)
        .def_prop_ro(
            "swap", [](const SwapInFlight &self) { return self.swap; },
            nb::for_getter(nb::sig("def swap(self, /) -> typing.Any")))
        .def_ro("size", &SwapInFlight::size)
        .def_prop_rw(
            "checksums",
            [](const SwapInFlight &self) {
                return self.checksums.is_valid()
                           ? self.checksums
                           : nb::cast(to_numpy<std::uint64_t>(std::vector<std::uint64_t>()));
            },
            [](SwapInFlight &self, nb::object checksums) { self.checksums = std::move(checksums); },
            nb::for_getter(nb::sig("def checksums(self, /) -> numpy.typing.NDArray[numpy.uint64]")),
            nb::for_setter(
                nb::sig("def checksums(self, value: numpy.typing.NDArray[numpy.uint64], /) -> None")),
            "Those of the first record; empty before the report of a rank that writes it.")
        .def(
            "settle",
            [](SwapInFlight &self, const VectorIn<std::uint8_t> &arrived) {
                require_equal(self.size, arrived.shape(0));
                self.copied.assign(arrived.data(), arrived.data() + arrived.shape(0));
            },
            "arrived"_a, "Set which blocks the target tier has; ``arrived`` is 1 for these.")
        .def_prop_ro(
            "copied", [=](const SwapInFlight &self) { return to_numpy<bool>(flags_of(self)); },
            nb::rv_policy::automatic,
            "Blocks that every rank has copied and, once the transfer is settled, the target tier has.")
        .def_prop_ro(
            "flags", [=](const SwapInFlight &self) { return to_numpy<std::uint8_t>(flags_of(self)); },
            nb::rv_policy::automatic, "1 for each block that is ``copied``, else 0.")
        .def_prop_ro("is_whole", &SwapInFlight::is_whole, "True if every block is ``copied``.")
        .def_prop_ro(
            "num_copied",
            [](const SwapInFlight &self) {
                return self.copied.empty() ? self.size
                                           : static_cast<std::size_t>(std::ranges::count(self.copied, 1));
            },
            "Number of blocks that are ``copied``.")
        .def_prop_ro("lost", caused_by(kLost), nb::rv_policy::automatic,
                     "Blocks that some rank did not find in the source.")
        .def_prop_ro("corrupt", caused_by(kCorrupt), nb::rv_policy::automatic,
                     "Blocks whose source record some rank found wrong.")
        .def_prop_ro(
            "any_corrupt", [](const SwapInFlight &self) { return !self.causes[kCorrupt].empty(); },
            "True if some rank found a source record wrong.")
        .def_prop_ro("bad_slots", caused_by(kBadSlots), nb::rv_policy::automatic,
                     "Blocks whose storage slot some rank cannot read or write.")
        .def_prop_ro("no_room", caused_by(kNoRoom), nb::rv_policy::automatic,
                     "Blocks for which some rank's disk has no room.");
    nb::class_<InFlightPlan>(module, "InFlightPlan",
                             "A plan or a task of one that some of ``ranks`` ranks have not reported.")
        .def(nb::init<nb::object, double, std::size_t>(), "plan"_a, "deadline"_a, "ranks"_a)
        .def_prop_ro(
            "plan", [](const InFlightPlan &self) { return self.plan; },
            nb::for_getter(nb::sig("def plan(self, /) -> typing.Any")))
        .def_ro("deadline", &InFlightPlan::deadline)
        .def_rw("is_overdue", &InFlightPlan::is_overdue)
        .def("waits_for", &InFlightPlan::waits_for, "rank"_a, "Return True if this rank has not reported.")
        .def("stop_waiting", &InFlightPlan::stop_waiting, "rank"_a, "Count a rank that will not report.")
        .def("fail", &InFlightPlan::fail, "rank"_a, "reason"_a,
             "Count a rank that will never report as one that copied nothing.")
        .def_prop_ro(
            "swaps",
            [](const InFlightPlan &self) {
                nb::dict swaps;
                for (const auto &each : self.transfers) swaps[each->purpose] = nb::cast(each);
                return swaps;
            },
            nb::for_getter(nb::sig("def swaps(self, /) -> dict[fdcache.metadata.SwapPurpose, SwapInFlight]")),
            "The transfers by purpose, with what the ranks have reported.")
        .def_ro("errors", &InFlightPlan::errors, "One message per failed rank and transfer.");
    nb::class_<PlanTable>(module, "PlanTable",
                          "The plans in flight by number, for ``num_ranks`` ranks.\n\n"
                          "``num_sharers``: ranks, from the first on, that write the first record of a\n"
                          "block in shares.")
        .def(nb::init<std::size_t, std::size_t>(), "num_ranks"_a, "num_sharers"_a = 1)
        .def("__len__", [](const PlanTable &self) { return nb::len(self.plans); })
        .def_ro("num_ranks", &PlanTable::num_ranks)
        .def_prop_ro(
            "plans", [](const PlanTable &self) { return self.plans; },
            nb::for_getter(nb::sig("def plans(self, /) -> dict[int, InFlightPlan]")))
        .def_rw("next_deadline", &PlanTable::next_deadline, "No plan is newly overdue before it.")
        .def(
            "expect",
            [](PlanTable &self, nb::typed<nb::object, InFlightPlan> flight) { self.expect(flight); },
            "flight"_a, "Add a plan.")
        .def("remove", &PlanTable::remove, "flight"_a, "Remove a plan.")
        .def("require_rank", &PlanTable::require_rank, "rank"_a.none(),
             "Return the rank. Raises ``PlanError`` for an unknown one.")
        .def(
            "check", [](const PlanTable &self, nb::handle report) { self.check(report); }, "report"_a.none(),
            "Raise ``PlanError`` for a report of an unknown rank, or one that does not fit its plan.")
        .def(
            "expects",
            [](const PlanTable &self, nb::handle report) { return self.check(report).expected() != nullptr; },
            "report"_a, "Return True if this rank has not reported this plan yet.")
        .def(
            "record",
            [](PlanTable &self, nb::handle report) {
                nb::list finished;
                const CheckedReport checked = self.check(report);
                if (checked.expected())
                    self.record(checked, nb::cast<bool>(report.attr("refused")), finished);
                return finished;
            },
            "report"_a, nb::sig("def record(self, report: typing.Any) -> list[InFlightPlan]"),
            "Count a report; return the plans, storage tasks included, that it completes.")
        .def(
            "take_finished",
            [](PlanTable &self) {
                nb::list finished;
                for (nb::handle each : nb::list(nb::object(self.plans.attr("values")())))
                    self.take_if_finished(*nb::inst_ptr<InFlightPlan>(each), finished);
                return finished;
            },
            nb::sig("def take_finished(self) -> list[InFlightPlan]"),
            "Remove the plans that wait for no rank, and return them.")
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
