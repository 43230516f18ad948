#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "copy/bound_memory.hpp"
#include "cuda/step_runner.hpp"
#include "cuda/swap_plan.hpp"
#include "cuda/swap_steps.hpp"

namespace fdcache {
namespace {

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

constexpr char kKernelSource[] = {
#include "swap_source.inc"
    , 0};

cuda::SwapThresholds thresholds_of(const std::vector<std::size_t> &values) {
    if (values.size() != 3)
        throw std::invalid_argument("thresholds are direct_plane, staged_column, run_copy");
    return {values[0], values[1], values[2]};
}

const char *name_of(cuda::Queue queue) {
    return queue == cuda::Queue::kMain ? "main" : "copy";
}

// A step as a tuple whose first element is its name.
struct StepTuple {
    const std::vector<cuda::Piece> &pieces;

    nb::tuple operator()(const cuda::TakeSlot &step) const {
        return nb::make_tuple("take", name_of(step.user));
    }
    nb::tuple operator()(const cuda::FreeSlot &step) const {
        return nb::make_tuple("free", name_of(step.user));
    }
    nb::tuple operator()(const cuda::HandOver &step) const {
        return nb::make_tuple("hand over", name_of(step.from), name_of(step.to));
    }
    nb::tuple operator()(const cuda::CopyPieces &step) const {
        nb::list list;
        for (std::size_t i = step.first; i < step.first + step.count; ++i) {
            list.append(nb::make_tuple(pieces[i].host, pieces[i].device, pieces[i].nbytes));
        }
        return nb::make_tuple("pieces", step.staged, list);
    }
    nb::tuple operator()(const cuda::CopyRows &step) const {
        return nb::make_tuple("rows", step.staged, step.host, step.host_pitch, step.device, step.device_pitch,
                              step.width, step.rows);
    }
    nb::tuple operator()(const cuda::RunKernel &step) const {
        const char *kind = step.kind == cuda::RunKernel::Kind::kMove ? "move" : "sum";
        return nb::make_tuple(kind, step.staged, nb::make_tuple(step.planes.first, step.planes.last),
                              nb::make_tuple(step.rows.first, step.rows.count), step.pitch);
    }
};

using StepTuples = nb::typed<nb::list, nb::typed<nb::tuple, nb::any, nb::ellipsis>>;

StepTuples plan_steps(const cuda::SwapPolicy &policy, bool to_host, const PlanesRef &planes,
                      const RecordsRef &records, const VectorIn<std::int32_t> &device_slots,
                      const VectorIn<std::int32_t> &host_slots, std::size_t first, std::size_t last,
                      std::size_t slot_bytes, bool contended, bool unhurried) {
    const auto &layers = *planes_of(planes);
    const RecordTable &table = *records_of(records);
    const auto hosts = span_of(host_slots);
    require_equal(device_slots.shape(0), hosts.size());
    if (!std::ranges::is_sorted(hosts)) throw std::invalid_argument("host slots are not sorted");
    std::vector<swap::Block> blocks;
    for (std::size_t i = 0; i < hosts.size(); ++i) {
        check_slot(table, hosts[i]);
        blocks.push_back(
            {reinterpret_cast<cuda::Address>(table.record(hosts[i])), 0, device_slots.data()[i]});
    }
    const auto runs = cuda::find_runs(hosts, table.records_per_extent);
    const cuda::SwapPlanner planner(policy, direction_of(to_host), layers, table.record_bytes, blocks, runs);
    const cuda::StepList list =
        planner.plan(range_of(layers.size(), first, last), slot_bytes, contended, unhurried);
    nb::list steps;
    for (const cuda::Step &step : list.steps) steps.append(std::visit(StepTuple{list.pieces}, step));
    return steps;
}

void bind_policy(nb::module_ &module) {
    nb::enum_<cuda::SwapMethod>(module, "SwapMethod", "How the planes of a batch are copied.")
        .value("DIRECT", cuda::SwapMethod::kDirect, "By the copy engine, between records and layers.")
        .value("STAGED", cuda::SwapMethod::kStaged,
               "By the copy engine between records and a staging ring, by a kernel between ring and layers.")
        .value("KERNEL", cuda::SwapMethod::kKernel, "By a kernel that accesses host memory in place.");
    nb::enum_<cuda::SwapChoice>(module, "SwapChoice", "The method that the settings ask for.")
        .value("AUTO", cuda::SwapChoice::kAuto)
        .value("DIRECT", cuda::SwapChoice::kDirect)
        .value("STAGED", cuda::SwapChoice::kStaged)
        .value("KERNEL", cuda::SwapChoice::kKernel);
    nb::class_<cuda::SwapPolicy>(module, "SwapPolicy", "The fastest way to copy on a machine, as measured.")
        .def(
            "__init__",
            [](cuda::SwapPolicy *self, cuda::SwapChoice choice, const std::vector<std::size_t> &to_host,
               const std::vector<std::size_t> &to_device, std::size_t staging_bytes, unsigned kernel_ctas,
               unsigned transpose_ctas, std::size_t direct_pieces, std::size_t small_pieces, bool batched) {
                new (self) cuda::SwapPolicy{choice,
                                            thresholds_of(to_host),
                                            thresholds_of(to_device),
                                            staging_bytes,
                                            kernel_ctas,
                                            transpose_ctas,
                                            direct_pieces,
                                            small_pieces,
                                            batched};
            },
            "choice"_a, "to_host"_a, "to_device"_a, "staging_bytes"_a, "kernel_ctas"_a, "transpose_ctas"_a,
            "direct_pieces"_a, "small_pieces"_a, "batched"_a,
            "``to_host``, ``to_device``: the thresholds direct_plane, staged_column and run_copy, in\n"
            "bytes.")
        .def_ro("kernel_ctas", &cuda::SwapPolicy::kernel_ctas)
        .def_ro("transpose_ctas", &cuda::SwapPolicy::transpose_ctas)
        .def_ro("batched", &cuda::SwapPolicy::batched);
}

void bind_slots(nb::module_ &module) {
    module.def(
        "find_runs",
        [](const VectorIn<std::int32_t> &slots, std::size_t records_per_extent) {
            Pairs runs;
            for (const cuda::Rows &run : cuda::find_runs(span_of(slots), records_per_extent))
                runs.emplace_back(run.first, run.count);
            return runs;
        },
        "host_slots"_a, "records_per_extent"_a,
        "Return (first index, count) of the maximal runs of adjacent slots within one extent.");
}

void bind_swap_planner(nb::module_ &module) {
    module.def(
        "choose_method",
        [](const cuda::SwapPolicy &policy, bool to_host, const PlanesRef &planes, std::size_t first,
           std::size_t last, std::size_t record_bytes, std::size_t rows, std::size_t runs, bool contended,
           bool unhurried) {
            const auto &table = *planes_of(planes);
            if (rows == 0 || runs == 0)
                throw std::invalid_argument("a batch has at least one row and one run");
            return cuda::choose_method(policy, direction_of(to_host), table,
                                       range_of(table.size(), first, last), record_bytes,
                                       {rows, runs, contended, unhurried});
        },
        "policy"_a, "to_host"_a, "planes"_a, "first_plane"_a, "last_plane"_a, "record_bytes"_a, "rows"_a,
        "runs"_a, "contended"_a, "unhurried"_a,
        "Choose the method for a plane range of a batch of ``rows`` blocks.");
    module.def("plan_steps", &plan_steps, "policy"_a, "to_host"_a, "planes"_a, "records"_a, "device_slots"_a,
               "host_slots"_a, "first_plane"_a, "last_plane"_a, "slot_bytes"_a, "contended"_a, "unhurried"_a,
               "Plan a plane range of a batch: tuples that start with the name of a step\n"
               "(csrc/cuda/swap_steps.hpp).");
    module.def(
        "split_range",
        [](const PlanesRef &planes, std::size_t first, std::size_t last, std::size_t record_bytes,
           std::size_t limit) {
            const auto &table = *planes_of(planes);
            Pairs parts;
            for (const PlaneRange part :
                 cuda::split_range(table, range_of(table.size(), first, last), record_bytes, limit)) {
                parts.emplace_back(part.first, part.last);
            }
            return parts;
        },
        "planes"_a, "first_plane"_a, "last_plane"_a, "record_bytes"_a, "limit"_a,
        "Split a plane range into parts whose columns have at most ``limit`` bytes, or one plane.");
    module.def(
        "swap_chunks",
        [](const PlanesRef &planes, std::size_t record_bytes) {
            const auto table = cuda::make_chunks(*planes_of(planes), record_bytes);
            return std::pair(vector_to_bytes(table.chunks), table.first);
        },
        "planes"_a, "record_bytes"_a,
        "Return the chunk table of the kernels, as bytes, and the first chunk of each plane and the\n"
        "end.");
    module.def(
        "swap_source", [] { return std::string(kKernelSource); },
        "Return the CUDA source of the copy kernels.");
}

}  // namespace

void bind_swap_plan(nb::module_ &module) {
    bind_policy(module);
    bind_slots(module);
    bind_swap_planner(module);
}

}  // namespace fdcache
