#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>

#include "bindings.hpp"
#include "tier/pinned_runs.hpp"

namespace fdcache {
namespace {

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

void bind_pinned_runs(nb::module_ &module) {
    bind_misses(module);
    nb::class_<PinnedRuns, LowerTier>(
        module, "PinnedRuns",
        "The runs that an engine has pinned at a service, by lease. A run is unpinned once it\n"
        "is released and no load reads it.")
        .def(nb::init<MissLog &>(), "misses"_a, nb::keep_alive<1, 2>())
        .def("__len__", &PinnedRuns::size, "Number of runs that are not released.")
        .def_prop_ro("slots_loading", &PinnedRuns::slots_loading, "Number of slots that loads read.")
        .def("begin_session", &PinnedRuns::begin_session, "copies"_a,
             "Record a session that has begun, and the copies to it.")
        .def("search", &PinnedRuns::search, "runs"_a.none(), "copies"_a.none(),
             "Look up in this session from now on; without one nothing is found.")
        .def(
            "find",
            [](PinnedRuns &self, const HashesIn &path, std::size_t start, int storage_use) {
                auto found = self.find(digests_of(path), start, static_cast<StorageUse>(storage_use));
                return std::tuple(found.lease, std::move(found.found), found.ask_for);
            },
            "path"_a, "start"_a, "storage_use"_a = 0,
            "Pin the leading run of a path from ``start`` on. Return its lease or 0, the run, and for how "
            "many\n"
            "leading blocks of the path the service has to be asked, 0 if it need not.")
        .def("add", &PinnedRuns::add, "owner"_a, "number"_a, "unverified"_a,
             "Add a run that the service has pinned under a number; return its lease.")
        .def("release", &PinnedRuns::release, "lease"_a,
             "Unpin a run after the loads that read it; return False when it was released before.")
        .def(
            "begin_load",
            [](PinnedRuns &self, std::uint64_t lease, const VectorIn<std::int32_t> &slots) {
                self.begin_load(lease, slots_of(slots));
            },
            "lease"_a, "slots"_a, "Keep these slots of a run pinned until their load ends.")
        .def(
            "end_load",
            [](PinnedRuns &self, const VectorIn<std::int32_t> &slots) {
                auto ended = self.end_load(slots_of(slots));
                return std::pair(std::move(ended.owner), ended.unverified);
            },
            "slots"_a,
            nb::sig("def end_load(self, slots: numpy.typing.NDArray[numpy.int32]) -> "
                    "tuple[SharedRuns | None, bool]"),
            "End a load of these slots. Return whose runs it read, and True if it may have read unverified\n"
            "records. Raises IndexError for a slot that no load reads.");
}

}  // namespace fdcache
