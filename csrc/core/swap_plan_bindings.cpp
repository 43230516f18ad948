#include "core/swap_plan_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/bindings.hpp"
#include "core/cuda_swap.hpp"

namespace fdcache {
namespace {

using namespace nb::literals;

constexpr char kKernelSource[] = {
#include "swap_source.inc"
    , 0};

SwapThresholds thresholds_of(const std::vector<std::size_t> &values) {
    if (values.size() != 3)
        throw std::invalid_argument("thresholds are direct_plane, staged_column, run_copy");
    return {values[0], values[1], values[2]};
}

Pairs pairs_of(const std::vector<Rows> &rows) {
    Pairs pairs;
    for (const Rows &part : rows) pairs.emplace_back(part.first, part.count);
    return pairs;
}

}  // namespace

void bind_swap_plan(nb::module_ &module) {
    nb::enum_<SwapMethod>(module, "SwapMethod")
        .value("DIRECT", SwapMethod::kDirect)
        .value("STAGED", SwapMethod::kStaged)
        .value("KERNEL", SwapMethod::kKernel);
    nb::enum_<SwapChoice>(module, "SwapChoice")
        .value("AUTO", SwapChoice::kAuto)
        .value("DIRECT", SwapChoice::kDirect)
        .value("STAGED", SwapChoice::kStaged)
        .value("KERNEL", SwapChoice::kKernel);
    nb::class_<SwapPolicy>(module, "SwapPolicy")
        .def(
            "__init__",
            [](SwapPolicy *self, SwapChoice choice, const std::vector<std::size_t> &to_host,
               const std::vector<std::size_t> &to_device, std::size_t staging_bytes, unsigned kernel_ctas,
               unsigned transpose_ctas, std::size_t direct_pieces, bool batched) {
                new (self) SwapPolicy{choice,
                                      thresholds_of(to_host),
                                      thresholds_of(to_device),
                                      staging_bytes,
                                      kernel_ctas,
                                      transpose_ctas,
                                      direct_pieces,
                                      batched};
            },
            "choice"_a, "to_host"_a, "to_device"_a, "staging_bytes"_a, "kernel_ctas"_a, "transpose_ctas"_a,
            "direct_pieces"_a, "batched"_a)
        .def_ro("kernel_ctas", &SwapPolicy::kernel_ctas)
        .def_ro("batched", &SwapPolicy::batched);
    module.def(
        "are_sound_slots",
        [](const InputArray<std::int32_t> &slots, std::int32_t limit, bool distinct) {
            return are_sound_slots({slots.data(), slots.shape(0)}, limit, distinct);
        },
        "slots"_a, "limit"_a, "distinct"_a);
    module.def(
        "find_runs",
        [](const InputArray<std::int32_t> &slots, std::size_t records_per_extent) {
            return pairs_of(find_runs({slots.data(), slots.shape(0)}, records_per_extent));
        },
        "host_slots"_a, "records_per_extent"_a);
    module.def(
        "find_device_runs",
        [](std::size_t first, std::size_t count, const InputArray<std::int64_t> &slots) {
            if (count == 0 || first + count > slots.shape(0)) throw nb::index_error("run");
            return pairs_of(find_device_runs({first, count}, {slots.data(), slots.shape(0)}));
        },
        "first"_a, "count"_a, "device_slots"_a);
    module.def(
        "choose_method",
        [](const SwapPolicy &policy, bool to_host, const nb::object &planes, std::size_t first,
           std::size_t last, std::size_t record_bytes, std::size_t rows, std::size_t runs) {
            const auto &table = nb::cast<BoundPlanes &>(planes).planes;
            if (rows == 0 || runs == 0) throw std::invalid_argument("there are no rows");
            return choose_method(policy, to_host ? Direction::kToHost : Direction::kToDevice, table,
                                 range_of(table, first, last), record_bytes, rows, runs);
        },
        "policy"_a, "to_host"_a, "planes"_a, "first_plane"_a, "last_plane"_a, "record_bytes"_a, "rows"_a,
        "runs"_a);
    module.def(
        "split_range",
        [](const nb::object &planes, std::size_t first, std::size_t last, std::size_t record_bytes,
           std::size_t limit) {
            const auto &table = nb::cast<BoundPlanes &>(planes).planes;
            Pairs parts;
            for (const PlaneRange part :
                 split_range(table, range_of(table, first, last), record_bytes, limit)) {
                parts.emplace_back(part.first, part.last);
            }
            return parts;
        },
        "planes"_a, "first_plane"_a, "last_plane"_a, "record_bytes"_a, "limit"_a);
    module.def(
        "swap_chunks",
        [](const nb::object &planes, std::size_t record_bytes) {
            const auto table = cuda::make_chunks(nb::cast<BoundPlanes &>(planes).planes, record_bytes);
            return nb::make_tuple(nb::bytes(reinterpret_cast<const char *>(table.chunks.data()),
                                            table.chunks.size() * sizeof(swap::Chunk)),
                                  table.first);
        },
        "planes"_a, "record_bytes"_a);
    module.def("swap_source", [] { return std::string(kKernelSource); });
}

}  // namespace fdcache
