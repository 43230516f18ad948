#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "tier/outgoing.hpp"
#include "tier/presence.hpp"
#include "tier/run_ring.hpp"
#include "tier/shared_runs.hpp"

namespace fdcache {
namespace {

void bind_outgoing(nb::module_ &module) {
    nb::class_<OutgoingCopies>(
        module, "OutgoingCopies",
        "Copies into the tier of another process, whose presence table is ``table``.\n\n"
        "Keeps the slots granted for copies, and the blocks that the table does not show yet.")
        .def(nb::init<PresenceTable>(), "table"_a, nb::keep_alive<1, 2>())
        .def(
            "grant",
            [](OutgoingCopies &self, const VectorIn<std::int32_t> &slots,
               const VectorIn<std::uint32_t> &generations) {
                require_equal(slots.shape(0), generations.shape(0));
                self.grant(slots_of(slots), span_of(generations));
            },
            "slots"_a, "generations"_a, "Add slots to the stock, from which copies take theirs.")
        .def(
            "give_up_stock",
            [](OutgoingCopies &self, Slot first) {
                return to_numpy<std::int32_t>(self.give_up_stock(first));
            },
            "first"_a, "Remove and return the slots of the stock from ``first`` on.")
        .def_prop_ro("stock", &OutgoingCopies::stock, "Number of granted slots that no copy uses yet.")
        .def("take_asked", &OutgoingCopies::take_asked,
             "Return the most slots that one reservation since the last call has asked for.")
        .def_prop_rw(
            "tier_slots", [](const OutgoingCopies &self) { return self.tier_slots.load(); },
            [](OutgoingCopies &self, std::size_t slots) { self.tier_slots = slots; },
            "Slots of the whole tier, as the service has told last.")
        .def(
            "contains",
            [](const OutgoingCopies &self, const HashesIn &hashes) {
                return to_numpy<std::uint8_t>(self.contains(digests_of(hashes)));
            },
            "hashes"_a, "Per hash: 0 absent, 1 ready, 2 being copied by this process.")
        .def(
            "reserve",
            [](OutgoingCopies &self, const HashesIn &parents, const HashesIn &hashes, bool below_pending) {
                require_equal(parents.shape(0), hashes.shape(0));
                return self.reserve(digests_of(parents), digests_of(hashes), below_pending);
            },
            "parents"_a, "hashes"_a, "below_pending"_a = false,
            "Take slots of the stock for hashes that are absent and whose parent is ready or precedes\n"
            "them. ``below_pending``: as for ``Tier.reserve_copies``.")
        .def(
            "end",
            [](OutgoingCopies &self, const VectorIn<std::int32_t> &slots,
               const VectorIn<std::uint8_t> &copied, bool reported) {
                require_equal(slots.shape(0), copied.shape(0));
                OutgoingCopies::Ended ended = self.end(slots_of(slots), span_of(copied), reported);
                return std::pair(hashes_to_numpy(std::move(ended.parents)),
                                 hashes_to_numpy(std::move(ended.hashes)));
            },
            "slots"_a, "copied"_a, "reported"_a,
            "End copies and return the parents and hashes of their blocks.\n\n"
            "``reported``: the tier gets a report and will acknowledge it. Raises IndexError for a slot\n"
            "without a copy in flight.")
        .def(
            "acknowledge",
            [](OutgoingCopies &self, const HashesIn &hashes) { self.acknowledge(digests_of(hashes)); },
            "hashes"_a, "Forget these blocks: the tier has acknowledged them, and its table shows them.")
        .def("drop_unacknowledged", &OutgoingCopies::drop_unacknowledged,
             "Forget all copied blocks that the tier has not acknowledged.")
        .def_prop_ro("in_flight", &OutgoingCopies::in_flight, "Number of blocks being copied.");
}

using Memory = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The memory of a vector member, which lives as long as its owner.
template <typename Out, typename T>
auto view(std::vector<T> FoundRun::*member) {
    return [member](FoundRun &self) {
        std::vector<T> &values = self.*member;
        return VectorOut<Out>(reinterpret_cast<Out *>(values.data()), {values.size()}, nb::find(self));
    };
}

std::vector<std::tuple<std::uint64_t, std::size_t, HashesOut>> take_records(RunRing &ring) {
    std::vector<std::tuple<std::uint64_t, std::size_t, HashesOut>> records;
    try {
        while (std::optional<RunRecord> record = ring.read())
            records.emplace_back(record->run, record->start, hashes_to_numpy(std::move(record->path)));
    } catch (const std::invalid_argument &) {
        if (records.empty()) throw;  // those before it count
    }
    return records;
}

void bind_runs(nb::module_ &module) {
    nb::class_<FoundRun>(module, "FoundRun",
                         "The leading run of a path, as the table showed it. Not pinned yet.")
        .def("__len__", [](const FoundRun &self) { return self.slots.size(); })
        .def_prop_ro("slots", view<std::int32_t>(&FoundRun::slots))
        .def_prop_ro("generations", view<std::uint32_t>(&FoundRun::generations))
        .def_prop_ro(
            "unverified",
            [](FoundRun &self) -> std::optional<VectorOut<std::uint8_t>> {
                if (self.unverified.empty()) return std::nullopt;
                return view<std::uint8_t>(&FoundRun::unverified)(self);
            },
            "1 for records whose bytes nothing has verified; None if there are none.");
    nb::class_<SharedRuns>(module, "SharedRuns",
                           "Runs that a client finds in the table of a shared tier and pins by itself.\n\n"
                           "``ring``: shared memory in which it tells the service.")
        .def(
            "__init__",
            [](SharedRuns *self, const PresenceTable &table, const Memory &ring) {
                new (self) SharedRuns(table, RunRing(ring.data(), ring.shape(0)));
            },
            "table"_a, "ring"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def(
            "find",
            [](const SharedRuns &self, const HashesIn &path, std::size_t start) {
                return self.find(digests_of(path), start);
            },
            "path"_a, "start"_a, "Look up the leading run of a path from ``start`` on.")
        .def(
            "pin",
            [](SharedRuns &self, const HashesIn &path, const FoundRun &found) {
                return self.pin(digests_of(path), found);
            },
            "path"_a, "found"_a,
            "Pin a run that was found on this path; return its number, or 0: ask the service.\n\n"
            "0 if the service removes blocks now or has removed some since, lets no client pin, or has\n"
            "not read enough of the ring.")
        .def_prop_rw(
            "observer", [](const SharedRuns &self) { return self.observer; },
            [](SharedRuns &self, std::function<void(const char *)> observer) {
                self.observer = std::move(observer);
            },
            nb::for_setter(nb::arg("observer").none()),
            "For tests: called with 'found' after a look-up that found blocks, and 'pinned' after a pin.")
        .def("next_number", &SharedRuns::next_number, "Return a number for a run pinned on request.")
        .def("unpin", &SharedRuns::unpin, "run"_a, "Unpin a run; a full ring delays it until ``flush``.")
        .def("flush", &SharedRuns::flush, "Write what a full ring has delayed.");
    nb::class_<LoadingRuns>(module, "LoadingRuns", "The slots that loads read, and the runs that pin them.")
        .def(nb::init<>())
        .def("__len__", &LoadingRuns::slots)
        .def("__contains__", &LoadingRuns::reads, "run"_a)
        .def(
            "begin",
            [](LoadingRuns &self, std::uint64_t run, const VectorIn<std::int32_t> &slots) {
                self.begin(run, slots_of(slots));
            },
            "run"_a, "slots"_a, "Begin to load these slots of a run.")
        .def(
            "end",
            [](LoadingRuns &self, const VectorIn<std::int32_t> &slots) { return self.end(slots_of(slots)); },
            "slots"_a,
            "End a load of these slots; return the runs that pin them, each once.\n\n"
            "Raises IndexError for a slot that no load reads.");
    nb::class_<RunRing>(module, "RunRing", "The service's end of the ring of a client.")
        .def(
            "__init__",
            [](RunRing *self, const Memory &memory) { new (self) RunRing(memory.data(), memory.shape(0)); },
            "memory"_a, nb::keep_alive<1, 2>())
        .def("take", &take_records,
             "Return (run, start, path) of each record since the last call; an empty path unpins.\n\n"
             "The first ``start`` hashes of a path are zero. Raises ValueError for a record that no\n"
             "client writes.")
        .def("close", &RunRing::close, "Stop the client from writing.");
}

// The table of a tier in this process.
struct PresenceWriter : PresenceTable {
    using PresenceTable::PresenceTable;
};

void bind_writer(nb::module_ &module) {
    nb::class_<PresenceWriter, PresenceTable>(
        module, "PresenceWriter",
        "The presence table of a tier of this process, which the tier itself keeps: ``Tier.mirror``.")
        .def(
            "__init__",
            [](PresenceWriter *self, const Memory &memory) {
                new (self) PresenceWriter(memory.data(), memory.shape(0));
            },
            "memory"_a, nb::keep_alive<1, 2>())
        .def("close", &PresenceWriter::close,
             "Stop clients from pinning blocks by themselves until ``open``. What they have pinned is in "
             "their rings.")
        .def("open", &PresenceWriter::open)
        .def(
            "set_unverified",
            [](PresenceWriter &self, const HashesIn &hashes, bool unverified) {
                for (const Digest &hash : digests_of(hashes)) self.set_unverified(hash, unverified);
            },
            "hashes"_a, "unverified"_a, "Mark blocks of the table, or remove the mark.");
}

}  // namespace

void bind_presence(nb::module_ &module) {
    nb::class_<PresenceTable>(
        module, "PresenceTable",
        "The blocks of a tier of another process, read from memory that the tier mirrors itself\n"
        "into.\n\n"
        "Answers may be out of date.")
        .def(
            "__init__",
            [](PresenceTable *self, const VectorIn<std::uint8_t> &memory) {
                new (self) PresenceTable(const_cast<std::uint8_t *>(memory.data()), memory.shape(0));
            },
            "memory"_a, nb::keep_alive<1, 2>(),
            "``memory``: whole buckets of 128 bytes, after one for control.")
        .def(
            "contains",
            [](const PresenceTable &self, const HashesIn &hashes) {
                std::vector<std::uint8_t> present;
                present.reserve(hashes.shape(0));
                for (const Digest &hash : digests_of(hashes)) present.push_back(self.holds(hash));
                return to_numpy<std::uint8_t>(std::move(present));
            },
            "hashes"_a, "1 for each hash that is present, else 0.")
        .def(
            "run",
            [](const PresenceTable &self, const HashesIn &path, std::size_t start) {
                return self.run(digests_of(path), start);
            },
            "path"_a, "start"_a = 0,
            "Number of consecutive blocks of a path that are present, from ``start`` on.");
    bind_writer(module);
    bind_outgoing(module);
    bind_runs(module);
}

}  // namespace fdcache
