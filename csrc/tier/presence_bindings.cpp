#include <nanobind/stl/pair.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "tier/outgoing.hpp"
#include "tier/presence.hpp"

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
        .def(
            "contains",
            [](const OutgoingCopies &self, const HashesIn &hashes) {
                return to_numpy<std::uint8_t>(self.contains(digests_of(hashes)));
            },
            "hashes"_a, "Per hash: 0 absent, 1 ready, 2 being copied by this process.")
        .def(
            "run",
            [](const OutgoingCopies &self, const HashesIn &path, std::size_t start) {
                return self.run(digests_of(path), start);
            },
            "path"_a, "start"_a, "Number of consecutive blocks of a path in the table, from ``start`` on.")
        .def(
            "reserve",
            [](OutgoingCopies &self, const HashesIn &parents, const HashesIn &hashes) {
                require_equal(parents.shape(0), hashes.shape(0));
                return self.reserve(digests_of(parents), digests_of(hashes));
            },
            "parents"_a, "hashes"_a,
            "Take slots of the stock for hashes that are absent and whose parent is ready or precedes\n"
            "them.")
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
            "memory"_a, nb::keep_alive<1, 2>(), "``memory``: whole buckets of 64 bytes.")
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
    bind_outgoing(module);
}

}  // namespace fdcache
