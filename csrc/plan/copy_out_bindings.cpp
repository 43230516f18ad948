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
#include "plan/device_contents.hpp"
#include "plan/ledger.hpp"

namespace fdcache {
namespace {

using Ids = VectorIn<std::int32_t>;

// A path that blocks on the device refer to after Python has forgotten it.
struct PythonPath {
    std::shared_ptr<DevicePath> path = std::make_shared<DevicePath>();
};

constexpr std::int32_t kNone = -1;  // the engine does not have the block on the device

std::optional<PlannedCopies> unless_empty(PlannedCopies &&planned) {
    if (planned.asked || planned.dropped || !planned.after.empty()) return std::move(planned);
    return std::nullopt;
}

// `kNone` may be there any number of times.
bool are_distinct(std::span<const std::int32_t> ids) {
    constexpr std::int32_t kMostMarked = 1 << 20;
    const std::int32_t most = ids.empty() ? kNone : std::ranges::max(ids);
    if (most < kMostMarked) {
        std::vector<bool> seen(static_cast<std::size_t>(most) + 1);
        return std::ranges::none_of(ids, [&seen](std::int32_t id) {
            if (id == kNone) return false;
            const bool again = seen[static_cast<std::size_t>(id)];
            seen[static_cast<std::size_t>(id)] = true;
            return again;
        });
    }
    std::vector<std::int32_t> sorted(ids.begin(), ids.end());
    std::erase(sorted, kNone);
    std::ranges::sort(sorted);
    return std::ranges::adjacent_find(sorted) == sorted.end();
}

// False for another type too: no error is set.
bool are_block_ids(nb::handle values, std::int32_t least, bool distinct) {
    Py_buffer view;
    if (PyObject_GetBuffer(values.ptr(), &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) {
        PyErr_Clear();
        return false;
    }
    bool are = view.ndim == 1 && view.itemsize == sizeof(std::int32_t) && view.format &&
               (view.format[0] == 'i' || view.format[0] == 'l') && !view.format[1];
    if (are) {
        const std::span<const std::int32_t> ids(static_cast<const std::int32_t *>(view.buf),
                                                static_cast<std::size_t>(view.len) / sizeof(std::int32_t));
        are = std::ranges::none_of(ids, [least](std::int32_t id) { return id < least; });
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
        .def("__len__", [](const PythonPath &self) { return self.path->slots.size(); })
        .def_prop_ro(
            "root",
            [](const PythonPath &self) -> std::optional<nb::bytes> {
                const DevicePath &path = *self.path;
                if (path.hashes.empty() || !path.parent || !path.parent->is_zero()) return std::nullopt;
                return digest_to_bytes(path.hashes.front());
            },
            "Hash of the first block; None if there is none, or it is not the first of a prompt.")
        .def(
            "hashes_from",
            [](const PythonPath &self, std::size_t start) {
                const std::vector<Digest> &hashes = self.path->hashes;
                if (start > hashes.size()) throw std::out_of_range("the path has no such block");
                return hashes_to_numpy({hashes.begin() + static_cast<std::ptrdiff_t>(start), hashes.end()});
            },
            "start"_a, "Return the hashes of the blocks from one on.")
        .def(
            "extend",
            [](PythonPath &self, const HashesIn &hashes, const Ids &ids) {
                const std::size_t have = self.path->slots.size(), more = ids.shape(0);
                if (hashes.shape(0) < have + more)
                    throw std::invalid_argument("there are fewer hashes than blocks");
                self.path->extend(digests_of(hashes).subspan(have, more), slots_of(ids));
            },
            "hashes"_a, "ids"_a,
            "Append blocks by their device blocks, -1 for none; ``hashes`` are those of the whole path.");
}

void bind_contents(nb::module_ &module) {
    nb::class_<DeviceContents>(module, "DeviceContents",
                               "The known blocks of a device cache that an engine owns, by device block.")
        .def(nb::init<>())
        .def_prop_ro("num_blocks", &DeviceContents::num_slots,
                     "Number of device blocks that were offered at any time.")
        .def_prop_ro("num_known", &DeviceContents::num_known,
                     "Number of device blocks whose content is known.")
        .def_prop_ro("has_offers", &DeviceContents::has_offers, "True if offers have not been looked at.")
        .def(
            "offered",
            [](DeviceContents &self, const PythonPath &path, std::size_t start, std::size_t counted) {
                self.offered(path.path, start, counted);
            },
            "path"_a, "start"_a, "counted"_a,
            "Take an offer of the blocks of a path from ``start`` on. Its request has counted as a hit of "
            "those before\n"
            "``counted``.")
        .def(
            "next_evicted", [](DeviceContents &self, const Ids &ids) { self.next_evicted(slots_of(ids)); },
            "ids"_a, "Set which device blocks are given away next, coldest first.")
        .def(
            "give_away",
            [](DeviceContents &self, const Ids &ids, CopyOut &copies_out, HostIndex &target,
               BlockCopies &copies, const PlanTable &plans) {
                const auto is_in_flight = [&plans](std::uint64_t plan) { return plans.find(nb::int_(plan)); };
                PlannedCopies planned = copies_out.give_away(slots_of(ids), target, copies);
                planned.after = self.readers(slots_of(ids), is_in_flight);
                self.forget(slots_of(ids));
                return unless_empty(std::move(planned));
            },
            "ids"_a, "copies_out"_a, "target"_a, "copies"_a, "plans"_a,
            "Plan copies of wanted blocks before these device blocks are overwritten, and forget them.")
        .def(
            "forget", [](DeviceContents &self, const Ids &ids) { self.forget(slots_of(ids)); }, "ids"_a,
            "Forget what is in these device blocks, without a copy.")
        .def(
            "drop", [](DeviceContents &self, const HashesIn &hashes) { self.drop(digests_of(hashes)); },
            "hashes"_a, "Forget these blocks, and all below them, without a copy.")
        .def(
            "sent",
            [](DeviceContents &self, std::uint64_t plan, const Ids &ids) { self.sent(plan, slots_of(ids)); },
            "plan"_a, "ids"_a, "Record the device blocks that a plan reads.");
}

void bind_planner(nb::module_ &module) {
    nb::class_<CopyOut>(
        module, "CopyOut",
        "Plans copies of the blocks of a device cache to a host tier, ancestors first.\n\n"
        "Blocks are wanted there as soon as they have ``least_hits``, or, with ``writes_back``, once they "
        "are\n"
        "evicted or among the next ``clean_reserve`` to be. ``target``: the host tier, of this process or of "
        "a\n"
        "service. Planned copies hold their slots on the host, and on a device of "
        "the\n"
        "scheduler's.")
        .def(nb::init<Tier &, bool, std::uint32_t, std::size_t>(), "device"_a, "writes_back"_a,
             "least_hits"_a, "clean_reserve"_a, nb::keep_alive<1, 2>())
        .def(nb::init<DeviceContents &, bool, std::uint32_t, std::size_t>(), "device"_a, "writes_back"_a,
             "least_hits"_a, "clean_reserve"_a, nb::keep_alive<1, 2>())
        .def_prop_ro("has_queue", &CopyOut::has_queue, "True if the next plan may copy queued blocks.")
        .def(
            "enqueue", [](CopyOut &self, const Ids &slots) { self.queue().add(slots_of(slots)); }, "slots"_a,
            "Queue the blocks in these device slots.")
        .def(
            "enqueue_awaited", [](CopyOut &self, const Ids &slots) { self.awaited().add(slots_of(slots)); },
            "slots"_a, "Queue blocks ahead of all and whatever their hits.")
        .def("clear", &CopyOut::clear, "Forget what is queued, and what an engine has told of its device.")
        .def(
            "ended", [](CopyOut &self, const Ids &slots) { self.ended(slots_of(slots)); }, "slots"_a,
            "Record the end of copies out of these device slots.")
        .def(
            "queued", [](CopyOut &self, HostIndex &target) { return self.queued(target); }, "target"_a,
            "Return the number of blocks that wait for a plan.")
        .def(
            "has_work", [](CopyOut &self, HostIndex &target) { return self.has_work(target); }, "target"_a,
            "Return True if the next plan may copy queued blocks.")
        .def(
            "ended_of",
            [](CopyOut &self, const PythonPath &path, std::size_t start, std::size_t stop,
               HostIndex &target) {
                if (start > stop || stop > path.path->slots.size())
                    throw std::invalid_argument("the path has no such blocks");
                const CopyOut::Ended ended = self.ended(*path.path, start, stop, target);
                return nb::make_tuple(ended.count, ended.there);
            },
            nb::sig("def ended_of(self, path: DevicePath, start: int, stop: int, target: HostIndex) -> "
                    "tuple[int, int]"),
            "path"_a, "start"_a, "stop"_a, "target"_a,
            "Return how many blocks of an offered path, from ``start`` on, neither wait for a plan nor are "
            "being copied,\n"
            "up to the first that does or is; and how many of these the target has.")
        .def(
            "evict",
            [](CopyOut &self, const BlockList &evicted, HostIndex &target, BlockCopies &copies) {
                return unless_empty(self.evict(evicted, target, copies));
            },
            "evicted"_a, "target"_a, "copies"_a,
            "Plan copies of evicted blocks that the host lacks, before their slots are overwritten.")
        .def(
            "plan",
            [](CopyOut &self, HostIndex &target, std::size_t in_flight, bool is_patient, double now,
               BlockCopies &copies) {
                return unless_empty(self.plan(target, in_flight, is_patient, now, copies));
            },
            "target"_a, "in_flight"_a, "is_patient"_a, "now"_a, "copies"_a,
            "Plan backups of queued blocks, while ``in_flight`` blocks are being backed up. While "
            "``is_patient``, a few\n"
            "blocks wait for more.");
}

}  // namespace

void bind_copy_out(nb::module_ &module) {
    bind_device_path(module);
    module.def("are_block_ids", &are_block_ids, "values"_a.none(), "least"_a = 0, "distinct"_a = false,
               "Return True for a contiguous int32 array of numbers from ``least`` on; ``distinct``: each "
               "but -1 is\n"
               "there once.");
    nb::class_<PlannedCopies>(module, "PlannedCopies",
                              "The outcome of a call that planned or dropped copies.")
        .def_ro("planned", &PlannedCopies::planned, "Number of copies planned.")
        .def_ro("dropped", &PlannedCopies::dropped,
                "Number of blocks that the host had no room for, each counted once.")
        .def_ro("asked", &PlannedCopies::asked, "Number of host slots asked for at once.")
        .def_ro("displaced", &PlannedCopies::displaced, "Blocks that left the host to make room.")
        .def_ro("after", &PlannedCopies::after, "Plans that read device blocks which are given away.");
    bind_contents(module);
    bind_planner(module);
    module.def(
        "copies_that_may_end",
        [](const HashesIn &hashes, const HashesIn &parents, HostIndex &target) {
            require_equal(hashes.shape(0), parents.shape(0));
            return to_numpy<std::uint8_t>(
                copies_that_may_end(digests_of(hashes), digests_of(parents), target));
        },
        "hashes"_a, "parents"_a, "target"_a,
        "Return 1 for each block of a transfer to the host that is not below a copy in flight of another "
        "one.");
}

}  // namespace fdcache
