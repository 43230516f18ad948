#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "tier/free_runs.hpp"
#include "tier/tier.hpp"

namespace fdcache {
namespace {

// Getters that return a vector member as an array of its own.
template <typename Out, typename Owner, typename T>
auto column(std::vector<T> Owner::*member) {
    return [member](const Owner &self) { return to_numpy<Out>(std::vector(self.*member)); };
}

template <typename Owner>
auto hash_column(std::vector<Digest> Owner::*member) {
    return [member](const Owner &self) { return hashes_to_numpy(std::vector(self.*member)); };
}

constexpr auto kOwned = nb::rv_policy::automatic;  // the array owns its memory

using Runs = std::vector<std::pair<Slot, std::uint32_t>>;

Runs pairs_of(const std::vector<FreeRuns::Run> &runs) {
    Runs pairs;
    for (const FreeRuns::Run &run : runs) pairs.emplace_back(run.first, run.count);
    return pairs;
}

void bind_lists(nb::module_ &module) {
    nb::class_<BlockList>(module, "BlockList", "Parallel arrays that describe blocks.")
        .def("__len__", [](const BlockList &self) { return self.slots.size(); })
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
