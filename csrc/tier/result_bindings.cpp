#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "python_arrays.hpp"
#include "tier/free_runs.hpp"
#include "tier/tier.hpp"

namespace fdcache {
namespace {

// Getters that return a vector member as a read-only array, which keeps the owner alive.
template <typename Out, typename Owner, typename T>
auto column(std::vector<T> Owner::*member) {
    static_assert(sizeof(T) == sizeof(Out));
    return [member](nb::pointer_and_handle<Owner> self) {
        const std::vector<T> &values = self.p->*member;
        return VectorOut<const Out>(reinterpret_cast<const Out *>(values.data()), {values.size()}, self.h);
    };
}

template <typename Owner>
auto hash_column(std::vector<Digest> Owner::*member) {
    return [member](nb::pointer_and_handle<Owner> self) {
        const std::vector<Digest> &digests = self.p->*member;
        return HashesView(reinterpret_cast<const std::uint8_t *>(digests.data()),
                          {digests.size(), sizeof(Digest)}, self.h);
    };
}

constexpr auto kOwned = nb::rv_policy::automatic;  // the array refers to its owner

using Runs = std::vector<std::pair<Slot, std::uint32_t>>;

Runs pairs_of(const std::vector<FreeRuns::Run> &runs) {
    Runs pairs;
    for (const FreeRuns::Run &run : runs) pairs.emplace_back(run.first, run.count);
    return pairs;
}

template <typename T>
nb::bytes bytes_of(const std::vector<T> &column) {
    return nb::bytes(reinterpret_cast<const char *>(column.data()), column.size() * sizeof(T));
}

template <typename T>
std::vector<T> column_from(const nb::bytes &bytes) {
    std::vector<T> column(bytes.size() / sizeof(T));
    std::memcpy(column.data(), bytes.c_str(), column.size() * sizeof(T));
    return column;
}

using ListState = std::tuple<nb::bytes, nb::bytes, nb::bytes, nb::bytes, nb::bytes>;
using BlockFields = std::tuple<Slot, std::uint32_t, nb::bytes, nb::bytes, std::uint32_t>;

ListState state_of(const BlockList &list) {
    return {bytes_of(list.slots), bytes_of(list.generations), bytes_of(list.hashes), bytes_of(list.parents),
            bytes_of(list.hits)};
}

void set_state(BlockList &list, const ListState &state) {
    const auto &[slots, generations, hashes, parents, hits] = state;
    new (&list) BlockList{column_from<Slot>(slots), column_from<std::uint32_t>(generations),
                          column_from<Digest>(hashes), column_from<Digest>(parents),
                          column_from<std::uint32_t>(hits)};
}

BlockFields fields_of(const BlockList &list, Py_ssize_t index) {
    const auto size = static_cast<Py_ssize_t>(list.slots.size());
    if (index < -size || index >= size) throw nb::index_error("list index out of range");
    const auto i = static_cast<std::size_t>(index < 0 ? index + size : index);
    return {list.slots[i], list.generations[i], digest_to_bytes(list.hashes[i]),
            digest_to_bytes(list.parents[i]), list.hits[i]};
}

BlockList slice_of(const BlockList &list, const nb::slice &slice) {
    const auto [start, stop, step, count] = slice.compute(list.slots.size());
    BlockList part;
    for (std::size_t n = 0; n < count; ++n) {
        const auto i = static_cast<std::size_t>(start + static_cast<Py_ssize_t>(n) * step);
        part.slots.push_back(list.slots[i]);
        part.generations.push_back(list.generations[i]);
        part.hashes.push_back(list.hashes[i]);
        part.parents.push_back(list.parents[i]);
        part.hits.push_back(list.hits[i]);
    }
    return part;
}

std::string text_of_list(const BlockList &list) {
    constexpr std::size_t kMost = 8;
    std::string text = "BlockList(" + std::to_string(list.slots.size()) + " blocks in slots [";
    for (std::size_t i = 0; i < std::min(list.slots.size(), kMost); ++i)
        text += (i ? ", " : "") + std::to_string(list.slots[i]);
    return text + (list.slots.size() > kMost ? ", ...])" : "])");
}

bool equal(const BlockList &left, const BlockList &right) {
    return left.slots == right.slots && left.generations == right.generations &&
           left.hashes == right.hashes && left.parents == right.parents && left.hits == right.hits;
}

void bind_host_index(nb::module_ &module) {
    nb::class_<HostRun>(module, "HostRun", "Blocks of a path on the host, in path order.")
        .def(nb::init<>())
        .def(
            "__init__",
            [](HostRun *self, LeaseId lease, const VectorIn<std::int32_t> &slots,
               const VectorIn<std::uint32_t> &generations,
               const std::optional<VectorIn<std::uint8_t>> &unverified) {
                require_equal(slots.shape(0), generations.shape(0));
                if (unverified) require_equal(slots.shape(0), unverified->shape(0));
                const auto copy = [](const auto &values) {
                    return std::vector(values.begin(), values.end());
                };
                new (self) HostRun{lease, copy(slots_of(slots)), copy(span_of(generations)), {}, 0};
                if (unverified) self->unverified = copy(span_of(*unverified));
            },
            "lease"_a, "slots"_a, "generations"_a, "unverified"_a = nb::none())
        .def("__len__", &HostRun::size)
        .def(
            "part",
            [](const HostRun &self, std::size_t first, std::size_t stop) {
                if (first > stop || stop > self.size()) throw nb::index_error("the run has no such blocks");
                return self.part(first, stop);
            },
            "first"_a, "stop"_a, "Return the blocks ``first`` to ``stop``, pinned by the same lease.")
        .def_ro("lease", &HostRun::lease, "Pins the blocks until it is released; 0 if there are none.")
        .def(
            "columns",
            [](const HostRun &self) {
                return nb::make_tuple(copied_array<Slot, std::int32_t>(std::span<const Slot>(self.slots)),
                                      copied_array(std::span<const std::uint32_t>(self.generations)),
                                      self.unverified.empty()
                                          ? nb::none()
                                          : copied_array(std::span<const std::uint8_t>(self.unverified)));
            },
            nb::sig("def columns(self) -> tuple[numpy.typing.NDArray[numpy.int32], "
                    "numpy.typing.NDArray[numpy.uint32], numpy.typing.NDArray[numpy.uint8] | None]"),
            "Return slots, generations, and 1 for records whose bytes nothing has verified, or None.");
    nb::class_<HostIndex>(module, "HostIndex",
                          "The host tier as planners see it: of this process, or of a service.")
        .def(
            "find_and_pin",
            [](HostIndex &self, const HashesIn &path, std::size_t start, int storage_use) {
                auto found = self.find_and_pin(digests_of(path), start, static_cast<StorageUse>(storage_use));
                return std::tuple(std::move(found.run), found.pending, found.ask_for);
            },
            "path"_a, "start"_a = 0, "storage_use"_a = 0,
            "Pin the leading run of a path from ``start`` on. Return the run, True if the block after it is\n"
            "being copied to the tier, and for how many leading blocks of the path the service has to be\n"
            "asked, 0 if it need not.")
        .def("release", &HostIndex::release, "lease"_a,
             "Release what a lease owns, or a run after the loads that read it. Return False if that was\n"
             "done before.")
        .def(
            "begin_load",
            [](HostIndex &self, LeaseId lease, const VectorIn<std::int32_t> &slots) {
                self.begin_load(lease, slots_of(slots));
            },
            "lease"_a, "slots"_a,
            "Keep slots of a run until the load of them ends, whatever becomes of its lease.")
        .def(
            "begin_load_of",
            [](HostIndex &self, const HostRun &run) { self.begin_load(run.lease, run.slots); }, "run"_a,
            "Do so with all slots of a run.")
        .def(
            "end_load",
            [](HostIndex &self, const VectorIn<std::int32_t> &slots, const HashesIn &hashes,
               const VectorIn<std::uint8_t> &copied, const std::optional<VectorIn<std::uint8_t>> &bad) {
                require_equal(slots.shape(0), hashes.shape(0));
                require_equal(slots.shape(0), copied.shape(0));
                if (bad) require_equal(slots.shape(0), bad->shape(0));
                self.end_load({slots_of(slots), digests_of(hashes), span_of(copied),
                               bad ? span_of(*bad) : std::span<const std::uint8_t>{}});
            },
            "slots"_a, "hashes"_a, "copied"_a, "bad"_a = nb::none(),
            "End a load. ``copied`` is 1 for blocks that every rank has, ``bad`` for records to forget.")
        .def(
            "cancel_load",
            [](HostIndex &self, const VectorIn<std::int32_t> &slots) { self.cancel_load(slots_of(slots)); },
            "slots"_a, "End a load that was planned and reads nothing.")
        .def(
            "contains",
            [](const HostIndex &self, const HashesIn &hashes) {
                return to_numpy<std::uint8_t>(self.contains(digests_of(hashes)));
            },
            "hashes"_a,
            "Per hash: 0 absent, 1 ready, 2 pending; of a service's tier as far as this process knows.")
        .def_prop_ro("room", &HostIndex::room, "The most blocks that may be copied now.")
        .def_prop_ro("capacity", &HostIndex::capacity,
                     "The blocks of the tier. A service grants room in the background, up to as many.")
        .def(
            "complete",
            [](HostIndex &self, const VectorIn<std::int32_t> &slots, const VectorIn<std::uint8_t> &copied,
               const VectorIn<std::uint64_t> &checksums) {
                require_equal(slots.shape(0), copied.shape(0));
                if (checksums.shape(0)) require_equal(slots.shape(0), checksums.shape(0));
                return to_numpy<std::uint8_t>(
                    self.complete(slots_of(slots), span_of(copied), span_of(checksums)));
            },
            "slots"_a, "copied"_a, "checksums"_a,
            "End copies into the tier, parents first. 1 for each block that is there, or will be.\n\n"
            "A block that was not copied, or whose parent is not ready, is removed. ``checksums`` may\n"
            "be empty.");
}

void bind_lists(nb::module_ &module) {
    bind_host_index(module);
    nb::class_<BlockList> list(module, "BlockList",
                               "Parallel arrays that describe blocks; the arrays are read-only views.");
    list.def("__len__", [](const BlockList &self) { return self.slots.size(); })
        .def("__getitem__", &fields_of, "index"_a,
             "Return slot, generation, hash, parent's hash and hits of a block.")
        .def("__getitem__", &slice_of, "index"_a, "Return a list of some of the blocks.")
        .def(
            "__eq__",
            [](const BlockList &self, nb::object other) {
                return nb::isinstance<BlockList>(other) && equal(self, nb::cast<const BlockList &>(other));
            },
            "other"_a.none(), "Compare the contents.")
        .def("__hash__",
             [](const BlockList &) -> Py_hash_t { throw nb::type_error("unhashable type: 'BlockList'"); })
        .def("__repr__", &text_of_list)
        .def("__getstate__", &state_of)
        .def("__setstate__", &set_state, "state"_a)
        .def_prop_ro("slots", column<std::int32_t>(&BlockList::slots), kOwned)
        .def_prop_ro("generations", column<std::uint32_t>(&BlockList::generations), kOwned)
        .def_prop_ro("hashes", hash_column(&BlockList::hashes), kOwned)
        .def_prop_ro("parents", hash_column(&BlockList::parents), kOwned, "32 zero bytes stand for the root.")
        .def_prop_ro("hits", column<std::uint32_t>(&BlockList::hits), kOwned);
    nb::class_<MatchRun>(module, "MatchRun", "The pinned leading run of a path.")
        .def("__len__", [](const MatchRun &self) { return self.slots.size(); })
        .def_prop_ro("slots", column<std::int32_t>(&MatchRun::slots), kOwned)
        .def_prop_ro("generations", column<std::uint32_t>(&MatchRun::generations), kOwned)
        .def_prop_ro("hits", column<std::uint32_t>(&MatchRun::hits), kOwned)
        .def_ro("pending", &MatchRun::pending,
                "True if the block after the run is being copied into this tier.");
    nb::class_<Reservation>(module, "Reservation",
                            "Reserved slots, and the blocks evicted for them (children before parents).")
        .def("__len__", [](const Reservation &self) { return self.slots.size(); })
        .def_prop_ro("slots", column<std::int32_t>(&Reservation::slots), kOwned)
        .def_prop_ro("generations", column<std::uint32_t>(&Reservation::generations), kOwned)
        .def_ro("evicted", &Reservation::evicted)
        .def_ro("missing", &Reservation::missing,
                "Number of slots that were not available; none is reserved then.");
    nb::class_<CopyReservation, Reservation>(module, "CopyReservation", "Slots reserved for copies.")
        .def_prop_ro(
            "status", column<std::uint8_t>(&CopyReservation::status), kOwned,
            "Per hash: 0 reserved (its slot is the next of ``slots``), 1 ready, 2 pending, 3 no parent.");
}

void bind_views(nb::module_ &module) {
    nb::class_<TierStats>(module, "TierStats", "Counts of slots, of what uses them, and of operations.")
        .def_ro("slots", &TierStats::slots)
        .def_ro("free", &TierStats::free)
        .def_ro("writing", &TierStats::writing)
        .def_ro("ready", &TierStats::ready)
        .def_ro("pending", &TierStats::pending)
        .def_ro("evictable", &TierStats::evictable)
        .def_ro("quarantined", &TierStats::quarantined)
        .def_ro("withheld", &TierStats::withheld)
        .def_ro("orphans", &TierStats::orphans)
        .def_ro("unjoined", &TierStats::unjoined)
        .def_ro("contradictions", &TierStats::contradictions)
        .def_ro("pins", &TierStats::pins)
        .def_ro("holds", &TierStats::holds)
        .def_ro("leases", &TierStats::leases)
        .def_ro("epoch", &TierStats::epoch)
        .def_ro("evictions", &TierStats::evictions)
        .def_ro("lookups", &TierStats::lookups)
        .def_ro("memory_bytes", &TierStats::memory_bytes);

    nb::class_<NodeView>(module, "NodeView", "The state of one slot.")
        .def_ro("slot", &NodeView::slot)
        .def_prop_ro("parent",
                     [](const NodeView &node) -> std::optional<Slot> {
                         if (node.parent == kNoSlot) return std::nullopt;
                         return node.parent;
                     })
        .def_ro("tenant", &NodeView::tenant)
        .def_ro("generation", &NodeView::generation)
        .def_ro("children", &NodeView::children)
        .def_ro("pins", &NodeView::pins)
        .def_ro("holds", &NodeView::holds)
        .def_ro("hits", &NodeView::hits)
        .def_ro("depth", &NodeView::depth)
        .def_prop_ro("state", [](const NodeView &node) { return static_cast<int>(node.state); })
        .def_ro("findable", &NodeView::findable)
        .def_prop_ro("hash", [](const NodeView &node) { return digest_to_bytes(node.hash); })
        .def_ro("checksum", &NodeView::checksum)
        .def_ro("idle_seconds", &NodeView::idle_seconds, "Since the entry was last matched, or stored.")
        .def_ro("ready_seconds", &NodeView::ready_seconds, "Since the entry was stored.");
}

void bind_free_runs(nb::module_ &module) {
    nb::class_<FreeRuns>(
        module, "FreeRuns",
        "The free slots of a tier as runs (first, count). No run crosses a multiple of ``extent``;\n"
        "0: there is one extent.")
        .def(nb::init<std::uint32_t>(), "extent"_a = 0)
        .def("__len__", &FreeRuns::size)
        .def("resize", &FreeRuns::resize, "slots"_a, "Change the number of slots. New ones are not free.")
        .def(
            "add",
            [](FreeRuns &self, std::uint32_t first, std::uint32_t count) {
                if (!count || first >= self.slots() || count > self.slots() - first)
                    throw std::invalid_argument("not slots of the tier");
                for (const FreeRuns::Run &run : self.runs())
                    if (run.first < first + count && first < run.first + run.count)
                        throw std::invalid_argument("slots are freed twice");
                self.add(first, count);
            },
            "first"_a, "count"_a = 1, "Free a run of slots. Raises ValueError if one of them is free.")
        .def(
            "take",
            [](FreeRuns &self, std::uint32_t count) {
                if (count > self.size()) throw std::invalid_argument("fewer slots are free");
                std::vector<FreeRuns::Run> taken;
                taken.reserve(count);
                self.take(count, taken);
                return pairs_of(taken);
            },
            "count"_a,
            "Take slots in as few runs as possible, ascending. Raises ValueError if fewer are free.")
        .def("clear", &FreeRuns::clear, "Make no slot free.")
        .def(
            "runs", [](const FreeRuns &self) { return pairs_of(self.runs()); }, "Return all runs, ascending.")
        .def("check_integrity", &FreeRuns::check_integrity,
             "Return the invariants that do not hold, in words.");
}

}  // namespace

void bind_tier_results(nb::module_ &module) {
    bind_lists(module);
    bind_views(module);
    bind_free_runs(module);
}

}  // namespace fdcache
