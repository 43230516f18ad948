#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "copy/bound_memory.hpp"
#include "copy/plane_copy.hpp"

namespace fdcache {
namespace {

using Planes = std::vector<Plane>;

void check_same(const Planes &source, const Planes &target) {
    const bool same = std::ranges::equal(source, target, {}, &Plane::nbytes, &Plane::nbytes);
    if (!same) throw std::invalid_argument("the caches have other planes");
}

}  // namespace

void bind_plane_copies(nb::module_ &module) {
    module.def(
        "copy_planes",
        [](const PlanesRef &source, std::int32_t source_blocks, const VectorIn<std::int32_t> &from,
           const PlanesRef &target, std::int32_t target_blocks, const VectorIn<std::int32_t> &to,
           std::size_t first, std::size_t last) {
            const std::shared_ptr<const Planes> sources = planes_of(source), targets = planes_of(target);
            check_same(*sources, *targets);
            require_equal(from.shape(0), to.shape(0));
            require_slots(span_of(from), source_blocks);
            require_slots(span_of(to), target_blocks);
            const PlaneRange range = range_of(sources->size(), first, last);
            const nb::gil_scoped_release release;
            copy_planes(*sources, span_of(from), *targets, span_of(to), range);
        },
        "source"_a, "source_blocks"_a, "source_slots"_a, "target"_a, "target_blocks"_a, "target_slots"_a,
        "first_plane"_a, "last_plane"_a,
        "Copy planes [first_plane, last_plane) of blocks between two caches with equal planes, without the\n"
        "GIL. Raises IndexError for a slot that a cache does not have.");
    module.def(
        "plane_runs",
        [](const PlanesRef &source, const VectorIn<std::int32_t> &from, const PlanesRef &target,
           const VectorIn<std::int32_t> &to, std::size_t first, std::size_t last) {
            const std::shared_ptr<const Planes> sources = planes_of(source), targets = planes_of(target);
            check_same(*sources, *targets);
            require_equal(from.shape(0), to.shape(0));
            const PlaneRange range = range_of(sources->size(), first, last);
            std::array<std::vector<std::uint64_t>, 3> columns;
            for (const PlaneRun &run : plane_runs(*sources, span_of(from), *targets, span_of(to), range)) {
                columns[0].push_back(run.source);
                columns[1].push_back(run.target);
                columns[2].push_back(run.nbytes);
            }
            return std::tuple(to_numpy<std::uint64_t>(std::move(columns[0])),
                              to_numpy<std::uint64_t>(std::move(columns[1])),
                              to_numpy<std::uint64_t>(std::move(columns[2])));
        },
        "source"_a, "source_slots"_a, "target"_a, "target_slots"_a, "first_plane"_a, "last_plane"_a,
        "Return the runs of a copy of planes [first_plane, last_plane) of blocks, plane by plane: where "
        "each\n"
        "begins in the source and in the target, and its bytes. Pieces that adjoin on both sides are one "
        "run.\n"
        "Accesses no memory, so the planes may be those of another process.");
    module.def(
        "sum_planes",
        [](const PlanesRef &planes, std::int32_t num_blocks, const VectorIn<std::int32_t> &slots,
           std::size_t first, std::size_t last) {
            const std::shared_ptr<const Planes> table = planes_of(planes);
            require_slots(span_of(slots), num_blocks);
            const PlaneRange range = range_of(table->size(), first, last);
            std::vector<std::uint64_t> sums;
            {
                const nb::gil_scoped_release release;
                sums = sum_planes(*table, span_of(slots), range);
            }
            return to_numpy<std::uint64_t>(std::move(sums));
        },
        "planes"_a, "num_blocks"_a, "slots"_a, "first_plane"_a, "last_plane"_a,
        "Sum planes [first_plane, last_plane) of blocks, without the GIL. Sums of ranges add up to the sum "
        "of\n"
        "the record's checksum.");
}

}  // namespace fdcache
