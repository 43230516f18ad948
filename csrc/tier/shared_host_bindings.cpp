#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "tier/shared_host.hpp"

namespace fdcache {
namespace {

using ReportFields = std::tuple<nb::bytes, std::optional<nb::bytes>, nb::bytes, nb::bytes, nb::bytes>;

ReportFields fields_of_report(const HostReport &report) {
    std::optional<nb::bytes> parents;
    if (!report.is_load) parents = vector_to_bytes(report.parents);
    return {vector_to_bytes(report.slots), parents, vector_to_bytes(report.hashes),
            vector_to_bytes(report.copied), vector_to_bytes(report.checksums)};
}

void bind_misses(nb::module_ &module) {
    nb::class_<MissLog>(module, "MissLog",
                        "Blocks that look-ups did not find, until they are sent to the service.")
        .def(nb::init<>())
        .def("__len__", [](const MissLog &self) { return self.firsts.size(); })
        .def_rw("in_flight", &MissLog::in_flight,
                "Number of look-ups that ended at a block which this engine was copying to the service.")
        .def("clear", &MissLog::clear, "Forget what was not sent.")
        .def(
            "take",
            [](MissLog &self) {
                auto taken =
                    std::tuple(self.whole, vector_to_bytes(self.firsts), vector_to_bytes(self.blocks),
                               vector_to_bytes(self.sample), self.below);
                self.clear();
                return taken;
            },
            "Return and forget: the number of look-ups without any hit, the hash of the first missing block "
            "of\n"
            "each look-up, how many blocks were missing as int32, and a sample of all missing blocks: the\n"
            "beginnings of their hashes as uint64, those below a limit, and the limit.");
}

}  // namespace

void bind_shared_host(nb::module_ &module) {
    bind_misses(module);
    nb::class_<SharedHost, HostIndex>(
        module, "SharedHost",
        "The host tier of a service, through one session after another.\n\n"
        "Nothing is found or reserved without a session. A run is unpinned once it is released and no\n"
        "load reads it.")
        .def(nb::init<>())
        .def("begin_session", &SharedHost::begin_session, "runs"_a, "copies"_a,
             "Use a session that has begun. Nothing of the one before may be in flight.")
        .def("end_session", &SharedHost::end_session,
             "Find and reserve nothing until the next session begins.")
        .def("set_closed", &SharedHost::set_closed, "closed"_a,
             "Find and reserve nothing while ``closed``, whatever session there is.")
        .def(
            "reserve",
            [](SharedHost &self, const HashesIn &parents, const HashesIn &hashes, bool below_pending) {
                require_equal(parents.shape(0), hashes.shape(0));
                return self.reserve(digests_of(parents), digests_of(hashes), below_pending);
            },
            "parents"_a, "hashes"_a, "below_pending"_a = false,
            "Take slots of the session's stock, as ``OutgoingCopies.reserve``; all are missing without one.")
        .def("add", &SharedHost::add, "owner"_a, "number"_a, "unverified"_a,
             "Add a run that the service has pinned under a number; return its lease.")
        .def(
            "take_reports",
            [](SharedHost &self) {
                std::vector<ReportFields> taken;
                for (const HostReport &each : self.take_reports()) taken.push_back(fields_of_report(each));
                return taken;
            },
            "Return the copies and loads that ended and that the service has to be told of, in order:\n"
            "slots, parents (None for a load), hashes, copied and checksums of each, as bytes.")
        .def("drop_reports", &SharedHost::drop_reports,
             "Forget what ended: no service listens. What was copied is not there.")
        .def_prop_ro("has_reports", &SharedHost::has_reports)
        .def_prop_ro(
            "misses", [](SharedHost &self) -> MissLog & { return self.misses; },
            nb::rv_policy::reference_internal)
        .def_prop_ro("runs", &SharedHost::runs, "Number of runs that are not released.")
        .def_prop_ro("slots_loading", &SharedHost::slots_loading, "Number of slots that loads read.")
        .def_prop_ro("blocks_in_flight", &SharedHost::blocks_in_flight, "Number of blocks being copied.");
}

}  // namespace fdcache
