#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>

#include "core/arrays.hpp"
#include "core/bindings.hpp"
#include "core/presence_bindings.hpp"
#include "core/tier.hpp"

namespace fdcache {

namespace {

nb::object digests_to_numpy(std::vector<Digest> &&digests) {
    return to_numpy<std::uint8_t>(std::move(digests), sizeof(Digest));
}

Digest digest_from(const nb::bytes &bytes) {
    Digest digest;
    if (bytes.size() != sizeof digest) throw std::invalid_argument("a block hash has 32 bytes");
    std::memcpy(digest.bytes.data(), bytes.c_str(), sizeof digest);
    return digest;
}

nb::bytes digest_to_bytes(const Digest &digest) {
    return nb::bytes(digest.bytes.data(), digest.bytes.size());
}

// For calls that walk the whole tier. The others keep the GIL: they are short, and nobody may change the
// arrays that they read.
using LetOthersRun = nb::call_guard<nb::gil_scoped_release>;

constexpr std::uint32_t kLongListing = 16384;

void wait_without_gil(std::mutex &mutex) {
    if (!PyGILState_Check()) return mutex.lock();
    const nb::gil_scoped_release others_run;
    mutex.lock();
}

void require_equal(std::size_t left, std::size_t right) {
    if (left != right) throw std::invalid_argument("parallel arrays differ in length");
}

template <typename T>
nb::object status_array(const std::vector<T> &status) {
    std::vector<std::uint8_t> values(status.size());
    for (std::size_t i = 0; i < status.size(); ++i) values[i] = static_cast<std::uint8_t>(status[i]);
    return to_numpy<std::uint8_t>(std::move(values));
}

nb::list run_list(const std::vector<FreeRuns::Run> &runs) {
    nb::list list;
    for (const FreeRuns::Run &run : runs) list.append(nb::make_tuple(run.first, run.count));
    return list;
}

std::span<const Tenant> tenants_of(const std::optional<VectorIn<std::uint32_t>> &tenants, std::size_t count) {
    if (!tenants) return {};
    require_equal(tenants->shape(0), count);
    return span_of(*tenants);
}

void bind_records(nb::module_ &module) {
    nb::class_<BlockList>(module, "BlockList")
        .def("__len__", [](const BlockList &list) { return list.slots.size(); })
        .def_prop_ro("slots",
                     [](const BlockList &list) { return to_numpy<std::int32_t>(std::vector(list.slots)); })
        .def_prop_ro(
            "generations",
            [](const BlockList &list) { return to_numpy<std::uint32_t>(std::vector(list.generations)); })
        .def_prop_ro("hashes",
                     [](const BlockList &list) { return digests_to_numpy(std::vector(list.hashes)); })
        .def_prop_ro("parents",
                     [](const BlockList &list) { return digests_to_numpy(std::vector(list.parents)); })
        .def_prop_ro("hits",
                     [](const BlockList &list) { return to_numpy<std::uint32_t>(std::vector(list.hits)); });

    nb::class_<MatchRun>(module, "MatchRun")
        .def("__len__", [](const MatchRun &run) { return run.slots.size(); })
        .def_prop_ro("slots",
                     [](const MatchRun &run) { return to_numpy<std::int32_t>(std::vector(run.slots)); })
        .def_prop_ro(
            "generations",
            [](const MatchRun &run) { return to_numpy<std::uint32_t>(std::vector(run.generations)); })
        .def_prop_ro("hits",
                     [](const MatchRun &run) { return to_numpy<std::uint32_t>(std::vector(run.hits)); })
        .def_ro("pending", &MatchRun::pending);

    nb::class_<Reservation>(module, "Reservation")
        .def("__len__", [](const Reservation &taken) { return taken.slots.size(); })
        .def_prop_ro(
            "slots",
            [](const Reservation &taken) { return to_numpy<std::int32_t>(std::vector(taken.slots)); })
        .def_prop_ro(
            "generations",
            [](const Reservation &taken) { return to_numpy<std::uint32_t>(std::vector(taken.generations)); })
        .def_ro("evicted", &Reservation::evicted)
        .def_ro("missing", &Reservation::missing);

    nb::class_<CopyReservation, Reservation>(module, "CopyReservation")
        .def_prop_ro("status", [](const CopyReservation &taken) { return status_array(taken.status); });

    nb::class_<TierStats>(module, "TierStats")
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

    nb::class_<NodeView>(module, "NodeView")
        .def_ro("slot", &NodeView::slot)
        .def_prop_ro("parent",
                     [](const NodeView &node) -> nb::object {
                         return node.parent == kNoSlot ? nb::none() : nb::object(nb::int_(node.parent));
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
        .def_ro("idle_seconds", &NodeView::idle_seconds)
        .def_ro("ready_seconds", &NodeView::ready_seconds);
}

void bind_free_runs(nb::module_ &module) {
    nb::class_<FreeRuns>(module, "FreeRuns")
        .def(nb::init<std::uint32_t>(), nb::arg("extent") = 0)
        .def("__len__", &FreeRuns::size)
        .def("resize", &FreeRuns::resize, nb::arg("slots"))
        .def(
            "add",
            [](FreeRuns &free, std::uint32_t first, std::uint32_t count) {
                if (!count || first >= free.slots() || count > free.slots() - first)
                    throw std::invalid_argument("not slots of the tier");
                for (const FreeRuns::Run &run : free.runs())
                    if (run.first < first + count && first < run.first + run.count)
                        throw std::invalid_argument("slots are freed twice");
                free.add(first, count);
            },
            nb::arg("first"), nb::arg("count") = 1)
        .def(
            "take",
            [](FreeRuns &free, std::uint32_t count) {
                if (count > free.size()) throw std::invalid_argument("fewer slots are free");
                std::vector<FreeRuns::Run> taken;
                taken.reserve(count);
                free.take(count, taken);
                return run_list(taken);
            },
            nb::arg("count"))
        .def("clear", &FreeRuns::clear)
        .def("runs", [](const FreeRuns &free) { return run_list(free.runs()); })
        .def("check_integrity", &FreeRuns::check_integrity);
}

nb::tuple take_events(Tier &tier) {
    std::vector<TierEvent> events = tier.take_events();
    std::vector<std::uint8_t> kinds;
    std::vector<Digest> hashes, parents;
    for (const TierEvent &event : events) {
        kinds.push_back(static_cast<std::uint8_t>(event.kind));
        hashes.push_back(event.hash);
        parents.push_back(event.parent);
    }
    return nb::make_tuple(to_numpy<std::uint8_t>(std::move(kinds)), digests_to_numpy(std::move(hashes)),
                          digests_to_numpy(std::move(parents)));
}

}  // namespace

void bind_tier(nb::module_ &module) {
    nb::register_exception_translator([](const std::exception_ptr &error, void *) {
        try {
            std::rethrow_exception(error);
        } catch (const StaleLease &stale) {
            PyErr_SetString(nb::module_::import_("fdcache.errors").attr("StaleLeaseError").ptr(),
                            stale.what());
        }
    });
    TierMutex::wait = wait_without_gil;
    module.attr("SLOT_FREE") = static_cast<int>(SlotState::kFree);
    module.attr("SLOT_WRITING") = static_cast<int>(SlotState::kWriting);
    module.attr("SLOT_READY") = static_cast<int>(SlotState::kReady);
    bind_records(module);
    bind_free_runs(module);
    nb::class_<Tier>(module, "Tier")
        .def(nb::init<std::uint32_t, std::string_view, std::uint32_t, double>(), nb::arg("slots"),
             nb::arg("eviction") = "lru", nb::arg("extent") = 0, nb::arg("spare") = 0.0)
        .def("open_lease", &Tier::open_lease)
        .def("release", &Tier::release, nb::arg("lease"))
        .def(
            "match",
            [](Tier &tier, LeaseId lease, const HashesIn &hashes, std::size_t start, std::size_t known) {
                return tier.match(lease, digests_of(hashes), start, known);
            },
            nb::arg("lease"), nb::arg("hashes"), nb::arg("start") = 0, nb::arg("known") = 0)
        .def(
            "contains",
            [](const Tier &tier, const HashesIn &hashes) {
                return status_array(tier.contains(digests_of(hashes)));
            },
            nb::arg("hashes"))
        .def("reserve", &Tier::reserve, nb::arg("lease"), nb::arg("count"))
        .def(
            "reserve_copies",
            [](Tier &tier, LeaseId lease, const HashesIn &parents, const HashesIn &hashes) {
                require_equal(parents.shape(0), hashes.shape(0));
                return tier.reserve_copies(lease, digests_of(parents), digests_of(hashes));
            },
            nb::arg("lease"), nb::arg("parents"), nb::arg("hashes"))
        .def(
            "commit",
            [](Tier &tier, LeaseId lease, const nb::bytes &parent, const HashesIn &hashes,
               const VectorIn<std::int32_t> &slots) {
                require_equal(slots.shape(0), hashes.shape(0));
                return status_array(
                    tier.commit(lease, digest_from(parent), digests_of(hashes), slots_of(slots)));
            },
            nb::arg("lease"), nb::arg("parent"), nb::arg("hashes"), nb::arg("slots"))
        .def(
            "publish",
            [](Tier &tier, LeaseId lease, const HashesIn &parents, const HashesIn &hashes,
               const VectorIn<std::int32_t> &slots, const VectorIn<std::uint8_t> &copied,
               const VectorIn<std::uint64_t> &checksums,
               const std::optional<VectorIn<std::uint32_t>> &tenants) {
                for (const auto size :
                     {parents.shape(0), slots.shape(0), copied.shape(0), checksums.shape(0)})
                    require_equal(size, hashes.shape(0));
                return status_array(tier.publish(lease, digests_of(parents), digests_of(hashes),
                                                 slots_of(slots), span_of(copied), span_of(checksums),
                                                 tenants_of(tenants, hashes.shape(0))));
            },
            nb::arg("lease"), nb::arg("parents"), nb::arg("hashes"), nb::arg("slots"), nb::arg("copied"),
            nb::arg("checksums"), nb::arg("tenants") = nb::none())
        .def("set_tenant_limit", &Tier::set_tenant_limit, nb::arg("tenant"), nb::arg("most"))
        .def("tenant_entries",
             [](const Tier &tier) { return to_numpy<std::uint32_t>(tier.tenant_entries()); })
        .def(
            "drop",
            [](Tier &tier, const HashesIn &hashes) {
                const auto given = digests_of(hashes);
                const std::vector<Digest> dropped(given.begin(), given.end());
                const nb::gil_scoped_release others_run;
                return tier.drop(dropped);
            },
            nb::arg("hashes"))
        .def(
            "complete",
            [](Tier &tier, const VectorIn<std::int32_t> &slots, const VectorIn<std::uint8_t> &copied,
               const VectorIn<std::uint64_t> &checksums) {
                require_equal(slots.shape(0), copied.shape(0));
                if (checksums.shape(0)) require_equal(slots.shape(0), checksums.shape(0));
                return status_array(tier.complete(slots_of(slots), span_of(copied), span_of(checksums)));
            },
            nb::arg("slots"), nb::arg("copied"), nb::arg("checksums"))
        .def(
            "hold", [](Tier &tier, const VectorIn<std::int32_t> &slots) { tier.hold(slots_of(slots)); },
            nb::arg("slots"))
        .def(
            "unhold", [](Tier &tier, const VectorIn<std::int32_t> &slots) { tier.unhold(slots_of(slots)); },
            nb::arg("slots"))
        .def(
            "find", [](const Tier &tier, const HashesIn &hashes) { return tier.find(digests_of(hashes)); },
            nb::arg("hashes"))
        .def(
            "ancestry",
            [](const Tier &tier, const VectorIn<std::int32_t> &slots, std::uint32_t levels) {
                return tier.ancestry(slots_of(slots), levels);
            },
            nb::arg("slots"), nb::arg("levels") = UINT32_MAX)
        .def(
            "coldest",
            [](const Tier &tier, std::uint32_t count) {
                if (count < kLongListing) return tier.coldest(count);
                const nb::gil_scoped_release others_run;
                return tier.coldest(count);
            },
            nb::arg("count"))
        .def("hottest", &Tier::hottest, nb::arg("count"), LetOthersRun())
        .def(
            "idle",
            [](const Tier &tier, double seconds, std::optional<Tenant> tenant) {
                const auto most = static_cast<double>(std::numeric_limits<std::uint32_t>::max());
                const double milliseconds = std::clamp(seconds * 1000.0, 0.0, most);
                const nb::gil_scoped_release others_run;
                return tier.idle(static_cast<std::uint32_t>(milliseconds), tenant ? &*tenant : nullptr);
            },
            nb::arg("seconds"), nb::arg("tenant") = nb::none())
        .def(
            "starting_with",
            [](const Tier &tier, const nb::bytes &prefix) {
                const auto *bytes = reinterpret_cast<const std::uint8_t *>(prefix.c_str());
                const nb::gil_scoped_release others_run;
                return tier.starting_with({bytes, prefix.size()});
            },
            nb::arg("prefix"))
        .def(
            "restore",
            [](Tier &tier, const VectorIn<std::int32_t> &slots, const VectorIn<std::uint32_t> &generations,
               const HashesIn &hashes, const HashesIn &parents, const VectorIn<std::uint64_t> &checksums,
               const std::optional<VectorIn<std::uint64_t>> &times, std::uint32_t generation,
               const std::optional<VectorIn<std::uint32_t>> &tenants) {
                for (const std::size_t size :
                     {generations.shape(0), hashes.shape(0), parents.shape(0), checksums.shape(0)})
                    require_equal(slots.shape(0), size);
                if (times) require_equal(slots.shape(0), times->shape(0));
                const FoundEntries found{slots_of(slots),
                                         span_of(generations),
                                         digests_of(hashes),
                                         digests_of(parents),
                                         span_of(checksums),
                                         times ? span_of(*times) : std::span<const std::uint64_t>{},
                                         tenants_of(tenants, slots.shape(0))};
                std::vector<std::uint8_t> restored;
                {
                    const nb::gil_scoped_release others_run;
                    restored = tier.restore(found, generation);
                }
                return to_numpy<std::uint8_t>(std::move(restored));
            },
            nb::arg("slots"), nb::arg("generations"), nb::arg("hashes"), nb::arg("parents"),
            nb::arg("checksums"), nb::arg("times") = nb::none(), nb::arg("generation") = 0,
            nb::arg("tenants") = nb::none())
        .def(
            "discard",
            [](Tier &tier, const VectorIn<std::int32_t> &slots, bool quarantine) {
                const auto given = slots_of(slots);
                const std::vector<Slot> discarded(given.begin(), given.end());
                const nb::gil_scoped_release others_run;
                return tier.discard(discarded, quarantine);
            },
            nb::arg("slots"), nb::arg("quarantine") = false)
        .def(
            "quarantine",
            [](Tier &tier, const VectorIn<std::int32_t> &slots) { tier.quarantine(slots_of(slots)); },
            nb::arg("slots"))
        .def(
            "withhold",
            [](Tier &tier, const VectorIn<std::int32_t> &slots) { tier.withhold(slots_of(slots)); },
            nb::arg("slots"))
        .def(
            "give_back",
            [](Tier &tier, const VectorIn<std::int32_t> &slots) { tier.give_back(slots_of(slots)); },
            nb::arg("slots"))
        .def("reset", &Tier::reset, LetOthersRun())
        .def("resize", &Tier::resize, nb::arg("slots"), LetOthersRun())
        .def(
            "mirror",
            [](Tier &tier, nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> memory) {
                const PresenceTable table = presence_table(memory.data(), memory.shape(0));
                const nb::gil_scoped_release others_run;
                tier.mirror(table);
            },
            nb::arg("memory"), nb::keep_alive<1, 2>())
        .def("record_events", &Tier::record_events, nb::arg("capacity"))
        .def("take_events", &take_events)
        .def("stats", &Tier::stats)
        .def("node", &Tier::node, nb::arg("slot"))
        .def_prop_ro("available", &Tier::available)
        .def("check_integrity", &Tier::check_integrity, LetOthersRun());
}

}  // namespace fdcache
