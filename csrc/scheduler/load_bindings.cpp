#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python_arrays.hpp"
#include "scheduler/python_loads.hpp"

namespace fdcache {
namespace {

// Returns the messages as one, in the words of the first failure of each rank.
std::string joined(const std::vector<std::string> &messages) {
    std::string text;
    for (const std::string &each : messages) text += (text.empty() ? "" : "; ") + each;
    return text.empty() ? "the cache was reset" : text;
}

}  // namespace

nb::object LoadForms::outcome_of(const Load &load, nb::handle request_id, nb::handle unplanned) const {
    const bool is_whole = load.status == LoadStatus::kConfirmed;
    const nb::object &status = is_whole ? confirmed : load.status == LoadStatus::kOverdue ? overdue : failed;
    const nb::object message = is_whole ? nb::none() : nb::cast(joined(load.errors));
    return outcome(request_id, status, load.arrived() / groups * block_size, message, unplanned, load.number);
}

void bind_loads(nb::module_ &module) {
    nb::class_<LoadForms>(module, "LoadForms", "How Python is told of the ends of loads.")
        .def(nb::init<nb::object, nb::object, nb::object, nb::object, std::size_t, std::size_t>(),
             "outcome"_a, "confirmed"_a, "failed"_a, "overdue"_a, "block_size"_a, "groups"_a = 1);
    nb::class_<LoadTotals>(module, "LoadTotals", "How loads have ended.")
        .def_ro("confirmed", &LoadTotals::confirmed)
        .def_ro("failed", &LoadTotals::failed)
        .def_ro("cut_short", &LoadTotals::cut_short)
        .def_ro("overdue", &LoadTotals::overdue);
    nb::class_<Load>(module, "Load",
                     "Blocks ``first`` to ``stop`` of one request, loaded in one part or more.")
        .def_ro("number", &Load::number)
        .def_ro("first", &Load::first)
        .def_ro("stop", &Load::stop)
        .def_ro("planned", &Load::planned, "The block after the last one that is part of a plan.")
        .def_ro("plan", &Load::plan, "The plan of the first part; 0 before it is sent.")
        .def_ro("is_revoked", &Load::is_revoked, "True if its blocks are gone through no fault of the load.")
        .def_prop_ro("arrived", &Load::arrived, "The block after the last one that counts.")
        .def_prop_ro("is_open", &Load::is_open, "True if another part will be planned.")
        .def_prop_ro(
            "is_in_flight", [](const Load &self) { return self.status == LoadStatus::kOpen; },
            "True until its end.")
        .def_prop_ro("is_confirmed", [](const Load &self) { return self.status == LoadStatus::kConfirmed; })
        .def_prop_ro("is_overdue", [](const Load &self) { return self.status == LoadStatus::kOverdue; })
        .def(
            "outcome",
            [](const Load &self, const LoadForms &forms, nb::handle request_id, nb::handle unplanned) {
                return forms.outcome_of(self, request_id, unplanned);
            },
            "forms"_a, "request_id"_a, "unplanned"_a,
            nb::sig("def outcome(self, forms: LoadForms, request_id: str, unplanned: tuple[int, ...]) -> "
                    "typing.Any"),
            "Return the outcome, once the load has ended.");
    nb::class_<LoadPart>(module, "LoadPart", "Blocks of a load that one plan has.")
        .def_ro("load", &LoadPart::load)
        .def_ro("first", &LoadPart::first)
        .def_prop_ro("has_parts_below", [](const LoadPart &self) { return self.first > self.load->first; });
    nb::class_<Loads>(
        module, "Loads",
        "What the requests of one manager load, from the plan of a load's first part to its end.\n\n"
        "A whole load has one part; one that follows reads from storage has several.")
        .def(
            "begin",
            [](Loads &self, std::uint32_t first, std::uint32_t stop) { return self.begin(first, stop); },
            "first"_a, "stop"_a, "Begin a load, whose parts follow.")
        .def(
            "add",
            [](Loads &self, const LoadPointer &load, std::uint32_t stop, std::uint32_t offset,
               std::uint32_t count,
               bool is_ahead) { self.add(self.next_part(load, stop, offset, count), is_ahead); },
            "load"_a, "stop"_a, "offset"_a, "count"_a, "is_ahead"_a,
            "Put the next part of a load, up to block ``stop``, into the plan that is sent next. "
            "``count`` of\n"
            "its blocks are copied, from ``offset`` of the plan's loads on.")
        .def(
            "take_rest",
            [](Loads &self, const LoadPointer &load, std::uint32_t count) {
                return self.next_part(load, load->stop, 0, count);
            },
            "load"_a, "count"_a,
            "Return the rest of a load as its last part, which ``send_part`` attaches to a plan. ``count`` "
            "of\n"
            "its blocks are copied.")
        .def(
            "send", [](Loads &self, std::uint64_t plan, bool is_ahead) { self.send(plan, is_ahead); },
            "plan"_a, "is_ahead"_a, "Attach the parts added since the last call to this plan.")
        .def(
            "send_part", [](Loads &self, std::uint64_t plan, const LoadPart &part) { self.send(plan, part); },
            "plan"_a, "part"_a, "Attach one part to this plan.")
        .def(
            "end",
            [](Loads &self, std::uint64_t plan, const VectorIn<std::uint8_t> &copied,
               const std::vector<std::string> &errors) { self.end(plan, span_of(copied), errors); },
            "plan"_a, "copied"_a, "errors"_a, "End the parts of a plan that every rank has reported.")
        .def("give_up", &Loads::give_up, "plan"_a, "End the loads that wait for an overdue plan.")
        .def(
            "withdraw",
            [](Loads &self,
               const LoadPointer &load) -> std::optional<std::tuple<std::uint32_t, std::uint32_t, bool>> {
                const auto withdrawn = self.withdraw(load);
                if (!withdrawn) return std::nullopt;
                return std::tuple(withdrawn->part.offset, withdrawn->part.count, withdrawn->is_ahead);
            },
            "load"_a,
            "Withdraw a load of which no plan was sent: it never ends. Return offset and count of its blocks "
            "in\n"
            "the plan's loads, which have to leave it, and True if that is the plan of loads ahead. None if "
            "a\n"
            "plan was sent.")
        .def("cut_off", &Loads::cut_off, "load"_a, "reason"_a, "Plan no other part of a load.")
        .def("revoke", &Loads::revoke, "reason"_a,
             "Make every load fail that has not ended, or whose end was not taken: its blocks are gone.")
        .def(
            "take_ended", [](Loads &self) { return self.take_ended(); },
            "Return the loads that have ended since the last call.")
        .def(
            "loads_of",
            [](const Loads &self, std::uint64_t plan) {
                std::vector<std::pair<std::uint64_t, bool>> found;
                for (const LoadPart &part : self.parts_of(plan))
                    found.emplace_back(part.load->number, part.stop == part.load->stop);
                return found;
            },
            "plan"_a,
            "Return the numbers of the loads that have blocks in a plan in flight; True: their last.")
        .def_prop_ro("open", &Loads::open, "The loads of which other parts will be planned.")
        .def_prop_ro("has_ended", &Loads::has_ended, "True if ``take_ended`` has something.")
        .def_prop_ro("totals", &Loads::totals);
}

}  // namespace fdcache
