#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "bindings.hpp"
#include "plan/copy_out.hpp"
#include "plan/ledger.hpp"

namespace fdcache {
namespace {

using Ids = VectorIn<DeviceBlock>;

// A path that blocks on the device refer to after Python has forgotten it.
struct PythonPath {
    std::shared_ptr<DevicePath> path = std::make_shared<DevicePath>();
};

std::optional<PlannedCopies> unless_empty(PlannedCopies &&planned) {
    if (planned.asked || planned.dropped || !planned.after.empty()) return std::move(planned);
    return std::nullopt;
}

// `kNoBlock` may be there any number of times.
bool are_distinct(std::span<const DeviceBlock> ids) {
    constexpr DeviceBlock kMostMarked = 1 << 20;
    const DeviceBlock most = ids.empty() ? kNoBlock : std::ranges::max(ids);
    if (most < kMostMarked) {
        std::vector<bool> seen(static_cast<std::size_t>(most) + 1);
        return std::ranges::none_of(ids, [&seen](DeviceBlock id) {
            if (id == kNoBlock) return false;
            const bool again = seen[static_cast<std::size_t>(id)];
            seen[static_cast<std::size_t>(id)] = true;
            return again;
        });
    }
    std::vector<DeviceBlock> sorted(ids.begin(), ids.end());
    std::erase(sorted, kNoBlock);
    std::ranges::sort(sorted);
    return std::ranges::adjacent_find(sorted) == sorted.end();
}

// False for another type too: no error is set.
bool are_block_ids(nb::handle values, DeviceBlock least, bool distinct) {
    Py_buffer view;
    if (PyObject_GetBuffer(values.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) {
        PyErr_Clear();
        return false;
    }
    bool are = view.ndim == 1 && view.itemsize == sizeof(DeviceBlock) && view.format &&
               (view.format[0] == 'i' || view.format[0] == 'l') && !view.format[1];
    if (are) {
        const std::span<const DeviceBlock> ids(static_cast<const DeviceBlock *>(view.buf),
                                               static_cast<std::size_t>(view.len) / sizeof(DeviceBlock));
        are = std::ranges::none_of(ids, [least](DeviceBlock id) { return id < least; });
        if (are && distinct) are = are_distinct(ids);
    }
    PyBuffer_Release(&view);
    return are;
}

void bind_device_path(nb::module_ &module) {
    nb::class_<PythonPath>(module, "DevicePath",
                           "The blocks of one request on the device, growing at the end.\n\n"
                           "``parent`` is the hash before the first one, None if it is unknown: the first "
                           "block can then\n"
                           "not be copied.")
        .def(
            "__init__",
            [](PythonPath *self, const std::optional<nb::bytes> &parent) {
                new (self) PythonPath();
                if (parent) self->path->parent = digest_of("parent", *parent);
            },
            "parent"_a.none())
        .def("__len__", [](const PythonPath &self) { return self.path->ids.size(); })
        .def_prop_ro(
            "root",
            [](const PythonPath &self) -> std::optional<nb::bytes> {
                const DevicePath &path = *self.path;
                if (path.hashes.empty() || !path.parent || !path.parent->is_zero()) return std::nullopt;
                return digest_to_bytes(path.hashes.front());
            },
            "Hash of the first block; None if there is none, or it has a parent.")
        .def(
            "extend",
            [](PythonPath &self, const HashesIn &hashes, const Ids &ids) {
                const std::size_t have = self.path->ids.size(), more = ids.shape(0);
                if (hashes.shape(0) < have + more)
                    throw std::invalid_argument("there are fewer hashes than blocks");
                self.path->extend(digests_of(hashes).subspan(have, more), span_of(ids));
            },
            "hashes"_a, "ids"_a,
            "Append blocks by their device blocks, -1 for none; ``hashes`` are those of the whole path.");
}

}  // namespace

void bind_copy_out(nb::module_ &module) {
    bind_device_path(module);
    module.def("are_block_ids", &are_block_ids, "values"_a.none(), "least"_a = 0, "distinct"_a = false,
               "Return True for a contiguous int32 array of numbers from ``least`` on; ``distinct``: each "
               "but -1 is\n"
               "there once.");
    nb::class_<PlannedCopies, PlannedBackups>(module, "PlannedCopies",
                                              "The outcome of a call of ``CopyOut`` that did something.")
        .def_ro("after", &PlannedCopies::after, "Plans that read device blocks which are given away.");
    nb::class_<CopyOut>(
        module, "CopyOut",
        "Plans copies of the blocks of a device cache that the engine owns.\n\n"
        "``target``: as for ``BackupPlanner``. Blocks are wanted there as soon as they have ``least_hits``, "
        "or,\n"
        "with ``writes_back``, once they are given away or among the next ``clean_reserve`` to be.")
        .def(nb::init<bool, std::uint32_t, std::size_t>(), "writes_back"_a, "least_hits"_a, "clean_reserve"_a)
        .def_prop_ro(
            "num_blocks", [](const CopyOut &self) { return self.contents().num_blocks(); },
            "Number of device blocks that were offered at any time.")
        .def_prop_ro(
            "num_known", [](const CopyOut &self) { return self.contents().num_known(); },
            "Number of device blocks whose content is known.")
        .def_prop_ro("has_queue", &CopyOut::has_queue,
                     "True if the next plan may copy blocks, or offers have not been looked at.")
        .def(
            "offered",
            [](CopyOut &self, const PythonPath &path, std::size_t start, std::size_t counted) {
                self.offered(path.path, start, counted);
            },
            "path"_a, "start"_a, "counted"_a,
            "Take an offer of the blocks of a path from ``start`` on. Its request has counted as a hit of "
            "those before\n"
            "``counted``.")
        .def(
            "given_away",
            [](CopyOut &self, const Ids &ids, HostIndex &target, BlockCopies &copies,
               const PlanTable &plans) {
                const auto is_in_flight = [&plans](std::uint64_t plan) { return plans.find(nb::int_(plan)); };
                return unless_empty(self.given_away(span_of(ids), target, copies, is_in_flight));
            },
            "ids"_a, "target"_a, "copies"_a, "plans"_a,
            "Plan copies of wanted blocks before these device blocks are overwritten, and forget them.")
        .def(
            "forget_blocks",
            [](CopyOut &self, const Ids &ids, HostIndex &target) {
                self.forget_blocks(span_of(ids), target);
            },
            "ids"_a, "target"_a, "Forget what is in these device blocks, without a copy.")
        .def("forget", &CopyOut::forget, "Forget every block and what is queued.")
        .def(
            "next_evicted", [](CopyOut &self, const Ids &ids) { self.next_evicted(span_of(ids)); }, "ids"_a,
            "Take the device blocks that are given away next, for the clean reserve.")
        .def(
            "queued", [](CopyOut &self, HostIndex &target) { return self.queued(target); }, "target"_a,
            "Return the number of blocks that wait for a plan.")
        .def(
            "has_work", [](CopyOut &self, HostIndex &target) { return self.has_work(target); }, "target"_a,
            "Return True if the next plan may copy queued blocks.")
        .def(
            "plan",
            [](CopyOut &self, HostIndex &target, std::size_t in_flight, bool is_patient, double now,
               BlockCopies &copies) {
                return unless_empty(self.plan(target, in_flight, is_patient, now, copies));
            },
            "target"_a, "in_flight"_a, "is_patient"_a, "now"_a, "copies"_a,
            "Plan backups of queued blocks, while ``in_flight`` blocks are being backed up. While\n"
            "``is_patient``, a few blocks wait for more.")
        .def(
            "sent",
            [](CopyOut &self, std::uint64_t plan, const std::vector<Ids> &read) {
                std::vector<std::span<const DeviceBlock>> ids;
                for (const Ids &each : read) ids.push_back(span_of(each));
                self.sent(plan, ids);
            },
            "plan"_a, "read"_a, "Record the device blocks that a plan reads.")
        .def("copies_ended", &CopyOut::copies_ended, "Release the blocks whose parents were being copied.");
}

}  // namespace fdcache
