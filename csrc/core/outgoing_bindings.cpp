#include <nanobind/nanobind.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "core/arrays.hpp"
#include "core/bindings.hpp"
#include "core/outgoing.hpp"

namespace fdcache {
namespace {

using namespace nb::literals;

void require_equal(std::size_t left, std::size_t right) {
    if (left != right) throw std::invalid_argument("parallel arrays differ in length");
}

nb::object digests_to_numpy(std::vector<Digest> &&digests) {
    return to_numpy<std::uint8_t>(std::move(digests), sizeof(Digest));
}

}  // namespace

void bind_outgoing(nb::module_ &module) {
    nb::class_<OutgoingCopies>(module, "OutgoingCopies")
        .def(nb::init<PresenceTable>(), "table"_a, nb::keep_alive<1, 2>())
        .def(
            "grant",
            [](OutgoingCopies &copies, const VectorIn<std::int32_t> &slots,
               const VectorIn<std::uint32_t> &generations) {
                require_equal(slots.shape(0), generations.shape(0));
                copies.grant(slots_of(slots), span_of(generations));
            },
            "slots"_a, "generations"_a)
        .def(
            "give_up_stock",
            [](OutgoingCopies &copies, Slot first) {
                return to_numpy<std::int32_t>(copies.give_up_stock(first));
            },
            "first"_a)
        .def_prop_ro("stock", &OutgoingCopies::stock)
        .def(
            "contains",
            [](const OutgoingCopies &copies, const HashesIn &hashes) {
                return to_numpy<std::uint8_t>(copies.contains(digests_of(hashes)));
            },
            "hashes"_a)
        .def(
            "run",
            [](const OutgoingCopies &copies, const HashesIn &path, std::size_t start) {
                return copies.run(digests_of(path), start);
            },
            "path"_a, "start"_a)
        .def(
            "reserve",
            [](OutgoingCopies &copies, const HashesIn &parents, const HashesIn &hashes) {
                require_equal(parents.shape(0), hashes.shape(0));
                return copies.reserve(digests_of(parents), digests_of(hashes));
            },
            "parents"_a, "hashes"_a)
        .def(
            "end",
            [](OutgoingCopies &copies, const VectorIn<std::int32_t> &slots,
               const VectorIn<std::uint8_t> &copied, bool told) {
                require_equal(slots.shape(0), copied.shape(0));
                OutgoingCopies::Ended ended = copies.end(slots_of(slots), span_of(copied), told);
                return nb::make_tuple(digests_to_numpy(std::move(ended.parents)),
                                      digests_to_numpy(std::move(ended.hashes)));
            },
            "slots"_a, "copied"_a, "told"_a)
        .def(
            "answered",
            [](OutgoingCopies &copies, const HashesIn &hashes) { copies.answered(digests_of(hashes)); },
            "hashes"_a)
        .def("forget_answers", &OutgoingCopies::forget_answers)
        .def_prop_ro("under_way", &OutgoingCopies::under_way);
}

}  // namespace fdcache
