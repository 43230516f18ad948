#include "core/swap_plan_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "core/bindings.hpp"
#include "core/cuda_steps.hpp"
#include "core/swap_steps.hpp"

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

const char *name_of(Queue queue) {
    return queue == Queue::kMain ? "main" : "copy";
}

// A step as a tuple that begins with its name.
struct StepTuple {
    const std::vector<Piece> &pieces;

    nb::tuple operator()(const TakeSlot &step) const { return nb::make_tuple("take", name_of(step.user)); }
    nb::tuple operator()(const FreeSlot &step) const { return nb::make_tuple("free", name_of(step.user)); }
    nb::tuple operator()(const HandOver &step) const {
        return nb::make_tuple("hand over", name_of(step.from), name_of(step.to));
    }
    nb::tuple operator()(const CopyPieces &step) const {
        nb::list list;
        for (std::size_t i = step.first; i < step.first + step.count; ++i) {
            list.append(nb::make_tuple(pieces[i].host, pieces[i].device, pieces[i].nbytes));
        }
        return nb::make_tuple("pieces", step.staged, list);
    }
    nb::tuple operator()(const CopyRows &step) const {
        return nb::make_tuple("rows", step.staged, step.host, step.host_pitch, step.device, step.device_pitch,
                              step.width, step.rows);
    }
    nb::tuple operator()(const RunKernel &step) const {
        const char *kind = step.kind == RunKernel::Kind::kMove ? "move" : "sum";
        return nb::make_tuple(kind, step.staged, nb::make_tuple(step.planes.first, step.planes.last),
                              nb::make_tuple(step.rows.first, step.rows.count), step.pitch);
    }
};

nb::list plan_steps(const SwapPolicy &policy, bool to_host, const nb::object &planes,
                    const nb::object &records, const InputArray<std::int32_t> &device_slots,
                    const InputArray<std::int32_t> &host_slots, std::size_t first, std::size_t last,
                    std::size_t slot_bytes, bool contended) {
    const auto &layers = nb::cast<BoundPlanes &>(planes).planes;
    const auto &table = nb::cast<BoundRecords &>(records).table;
    const std::span<const std::int32_t> hosts(host_slots.data(), host_slots.shape(0));
    if (device_slots.shape(0) != hosts.size()) throw std::invalid_argument("slots differ in number");
    if (!std::ranges::is_sorted(hosts)) throw std::invalid_argument("host slots are not sorted");
    std::vector<swap::Block> blocks;
    for (std::size_t i = 0; i < hosts.size(); ++i) {
        check_slot(table, hosts[i]);
        blocks.push_back({reinterpret_cast<Address>(table.record(hosts[i])), 0, device_slots.data()[i]});
    }
    const auto runs = find_runs(hosts, table.records_per_extent);
    const SwapPlanner planner(policy, to_host ? Direction::kToHost : Direction::kToDevice, layers,
                              table.record_bytes, blocks, runs);
    const StepList list = planner.plan(range_of(layers, first, last), slot_bytes, contended);
    nb::list steps;
    for (const Step &step : list.steps) steps.append(std::visit(StepTuple{list.pieces}, step));
    return steps;
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
        .def_ro("transpose_ctas", &SwapPolicy::transpose_ctas)
        .def_ro("batched", &SwapPolicy::batched);
    module.def(
        "are_sound_slots",
        [](const InputArray<std::int32_t> &slots, std::int32_t limit, bool distinct) {
            return are_sound_slots({slots.data(), slots.shape(0)}, limit, distinct);
        },
        "slots"_a, "limit"_a, "distinct"_a);
    module.def(
        "are_disjoint_slots",
        [](const InputArray<std::int32_t> &first, const InputArray<std::int32_t> &second) {
            return are_disjoint_slots({first.data(), first.shape(0)}, {second.data(), second.shape(0)});
        },
        "first"_a, "second"_a);
    module.def(
        "find_runs",
        [](const InputArray<std::int32_t> &slots, std::size_t records_per_extent) {
            return pairs_of(find_runs({slots.data(), slots.shape(0)}, records_per_extent));
        },
        "host_slots"_a, "records_per_extent"_a);
    module.def(
        "choose_method",
        [](const SwapPolicy &policy, bool to_host, const nb::object &planes, std::size_t first,
           std::size_t last, std::size_t record_bytes, std::size_t rows, std::size_t runs, bool contended) {
            const auto &table = nb::cast<BoundPlanes &>(planes).planes;
            if (rows == 0 || runs == 0) throw std::invalid_argument("there are no rows");
            return choose_method(policy, to_host ? Direction::kToHost : Direction::kToDevice, table,
                                 range_of(table, first, last), record_bytes, {rows, runs, contended});
        },
        "policy"_a, "to_host"_a, "planes"_a, "first_plane"_a, "last_plane"_a, "record_bytes"_a, "rows"_a,
        "runs"_a, "contended"_a);
    module.def("plan_steps", &plan_steps, "policy"_a, "to_host"_a, "planes"_a, "records"_a, "device_slots"_a,
               "host_slots"_a, "first_plane"_a, "last_plane"_a, "slot_bytes"_a, "contended"_a);
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
