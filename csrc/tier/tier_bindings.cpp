#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "tier/tier.hpp"

namespace fdcache {

void bind_reuse(nb::module_ &module);

namespace {

// Calls `slots_of`, which walks the tier, with a copy of these hashes, while other threads run.
template <typename SlotsOf>
VectorOut<std::int32_t> without_gil(const HashesIn &hashes, SlotsOf &&slots_of) {
    const auto given = digests_of(hashes);
    const std::vector<Digest> copied(given.begin(), given.end());
    std::vector<Slot> slots;
    {
        const nb::gil_scoped_release release;
        slots = slots_of(std::span<const Digest>(copied));
    }
    return to_numpy<std::int32_t>(std::move(slots));
}

// Up to `most` of some hashes at equal distances, from the last one on.
nb::bytes sample_of(std::span<const Digest> hashes, std::size_t most) {
    const std::size_t step = most ? (hashes.size() + most - 1) / most : 0;
    const std::size_t count = step ? (hashes.size() + step - 1) / step : 0;
    PyObject *const sample =
        PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * sizeof(Digest)));
    if (!sample) nb::raise_python_error();
    char *to = PyBytes_AS_STRING(sample);
    for (std::size_t i = 0; i < count; ++i, to += sizeof(Digest))
        std::memcpy(to, &hashes[hashes.size() - 1 - i * step], sizeof(Digest));
    return nb::steal<nb::bytes>(sample);
}

// For calls that walk the whole tier. The others are short and keep the GIL, so that no thread changes the
// arrays that they read.
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

constexpr std::uint32_t kLongListing = 16384;

void wait_without_gil(std::mutex &mutex) {
    if (!PyGILState_Check()) return mutex.lock();
    const nb::gil_scoped_release release;
    mutex.lock();
}

std::span<const Tenant> tenants_of(const std::optional<VectorIn<std::uint32_t>> &tenants, std::size_t count) {
    if (!tenants) return {};
    require_equal(tenants->shape(0), count);
    return span_of(*tenants);
}

std::tuple<VectorOut<std::uint8_t>, HashesOut, HashesOut> take_events(Tier &tier) {
    std::vector<TierEvent> events = tier.take_events();
    std::vector<std::uint8_t> kinds;
    std::vector<Digest> hashes, parents;
    for (const TierEvent &event : events) {
        kinds.push_back(static_cast<std::uint8_t>(event.kind));
        hashes.push_back(event.hash);
        parents.push_back(event.parent);
    }
    return {to_numpy<std::uint8_t>(std::move(kinds)), hashes_to_numpy(std::move(hashes)),
            hashes_to_numpy(std::move(parents))};
}

// (kind, seconds or priority, first block, block after the last, only those that nobody else has)
using SaidHint = std::tuple<HintKind, double, std::size_t, std::size_t, bool>;

// Reads hints of fdcache.hints about a request: at the end of each request, so attribute by attribute here.
std::vector<SaidHint> read_hints(nb::handle hints, std::size_t prompt_tokens, std::size_t block_size,
                                 std::size_t blocks, std::size_t records) {
    static constexpr std::pair<const char *, HintKind> kinds[] = {{"once", HintKind::kOnce},
                                                                  {"release", HintKind::kRelease},
                                                                  {"retain", HintKind::kRetain},
                                                                  {"return", HintKind::kReturn},
                                                                  {"priority", HintKind::kPriority}};
    static const auto names = [](auto... name) { return std::array{PyUnicode_InternFromString(name)...}; }(
                                  "kind", "seconds", "priority", "start", "end", "output");
    std::vector<SaidHint> said;
    for (const nb::handle hint : hints) {
        const auto field = [&](std::size_t at) { return nb::object(hint.attr(nb::handle(names[at]))); };
        const nb::object kind = field(0), seconds = field(1), priority = field(2), start = field(3),
                         end = field(4);
        const std::string_view name = PyUnicode_AsUTF8(kind.ptr());
        const bool output = nb::cast<bool>(field(5));
        const auto tokens = output ? prompt_tokens : nb::cast<std::size_t>(start);
        const bool has_range = output || tokens || !end.is_none();
        const std::size_t stop =
            end.is_none() ? blocks : std::min(nb::cast<std::size_t>(end) / block_size, blocks);
        const std::size_t first = std::min((tokens + block_size - 1) / block_size, stop);
        const nb::object &value = seconds.is_none() ? priority : seconds;
        said.emplace_back(std::ranges::find(kinds, name, [](auto &each) { return each.first; })->second,
                          value.is_none() ? 0.0 : nb::cast<double>(value), first * records, stop * records,
                          !has_range);
    }
    return said;
}

std::tuple<nb::bytes, nb::bytes, nb::bytes> take_event_bytes(Tier &tier) {
    const std::vector<TierEvent> events = tier.take_events();
    std::string kinds, hashes, parents;
    const auto append = [](std::string &to, const Digest &digest) {
        to.append(reinterpret_cast<const char *>(digest.bytes.data()), sizeof digest);
    };
    for (const TierEvent &event : events) {
        kinds.push_back(static_cast<char>(event.kind));
        append(hashes, event.hash);
        append(parents, event.parent);
    }
    const auto bytes = [](const std::string &text) { return nb::bytes(text.data(), text.size()); };
    return {bytes(kinds), bytes(hashes), bytes(parents)};
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
    bind_reuse(module);
    module.def(
        "read_hints", &read_hints, "hints"_a, "prompt_tokens"_a, "block_size"_a, "num_blocks"_a,
        "num_records"_a,
        nb::sig("def read_hints(hints: collections.abc.Sequence[object], prompt_tokens: int, block_size: int,"
                " num_blocks: int, num_records: int) -> list[tuple[HintKind, float, int, int, bool]]"),
        "Return what hints say of the records of a request's blocks, as ``Tier.hint`` takes it.");
    nb::class_<Tier, HostIndex>(
        module, "Tier",
        "Slots, the entries in them and their users; any thread may call.\n\n"
        "Hash arrays have shape (n, 32); a parent of 32 zero bytes stands for the root. Every\n"
        "operation is all or nothing. Raises IndexError for a slot that is not in use, ValueError\n"
        "for other bad arguments, and StaleLeaseError for a lease that was released or, unless\n"
        "noted, opened before a reset.")
        .def(nb::init<std::uint32_t, std::string_view, std::uint32_t, double>(), "slots"_a,
             "eviction"_a = "lru", "extent"_a = 0, "spare"_a = 0.0,
             "``extent``: runs of slots cross no multiple of it; 0: there is one extent. ``spare``:\n"
             "reservations evict ahead of need, for longer runs, while less than this share of the slots\n"
             "(0 to 0.5) is free.")
        .def("set_below", &Tier::set_below, "below"_a, "is_always_copied"_a, nb::keep_alive<1, 2>(),
             "Tell the eviction order of the tier below: that of this process, or the runs of a service.\n\n"
             "``learned`` then weighs a block by what its eviction loses: less if the tier below keeps it.\n"
             "``is_always_copied``: every evicted block is copied there, and no other; so the tiers hold\n"
             "different blocks.")
        .def("set_above", &Tier::set_above,
             "Tell the eviction order that there is a tier above: both together may lose to last use what\n"
             "one alone may.")
        .def("set_states", &Tier::set_states, "page_records"_a, "states"_a,
             "Tell the eviction order that prefixes end where a page, of ``page_records`` records, has "
             "``states``\n"
             "of them below it: ``learned`` then weighs states by the pages that they save for the slots "
             "that\n"
             "are free without them. Nothing changes if either number is 0.")
        .def("set_clock", &Tier::set_clock, "milliseconds"_a,
             "Take the time from the caller from now on: it is what the last call said, but never goes back.")
        .def("open_lease", &Tier::open_lease,
             "Open a lease, which owns pins and reserved slots until ``release``.")
        .def(
            "finish",
            [](Tier &tier, LeaseId lease, std::optional<std::uint64_t> prompt_tokens,
               std::uint64_t output_tokens, std::uint32_t block_tokens) {
                if (!prompt_tokens) return tier.finish(lease);
                const RequestEnd end{*prompt_tokens, output_tokens, block_tokens};
                return tier.finish(lease, &end);
            },
            "lease"_a, "prompt_tokens"_a = nb::none(), "output_tokens"_a = 0, "block_tokens"_a = 0,
            "Release a lease whose entries were used, and let the eviction order learn from it.\n\n"
            "The numbers are of the request, if they are known.")
        .def(
            "match",
            [](Tier &tier, LeaseId lease, const HashesIn &hashes, std::size_t start, std::size_t known) {
                return tier.match(lease, digests_of(hashes), start, known);
            },
            "lease"_a, "hashes"_a, "start"_a = 0, "known"_a = 0,
            "Pin the leading run of ready blocks from ``start`` on; ``hashes`` are one path from the\n"
            "root, or the end of one.\n\n"
            "Adds a hit to each block except the first ``known``.")
        .def("reserve", nb::overload_cast<LeaseId, std::uint32_t>(&Tier::reserve), "lease"_a, "count"_a,
             "Reserve anonymous slots to compute into.")
        .def(
            "evict_copied",
            [](Tier &tier, std::uint32_t count) -> std::optional<BlockList> {
                BlockList evicted;
                if (!tier.evict_copied(count, &evicted)) return std::nullopt;
                return evicted;
            },
            "count"_a,
            "Evict all that can be, and of the blocks that copies read as many as keep ``count`` others.\n\n"
            "Return the blocks evicted; None, and change nothing, if there are not as many above copies. "
            "The\n"
            "slots that copies read are free once these end.")
        .def(
            "reserve_copies",
            [](Tier &tier, LeaseId lease, const HashesIn &parents, const HashesIn &hashes, bool below_pending,
               Tenant tenant) {
                require_equal(parents.shape(0), hashes.shape(0));
                return tier.reserve_copies(lease, digests_of(parents), digests_of(hashes), below_pending,
                                           tenant);
            },
            "lease"_a, "parents"_a, "hashes"_a, "below_pending"_a = false, "tenant"_a = 0,
            "Reserve slots for copies into this tier. They are pending until ``complete``.\n\n"
            "Reserves a slot for each hash that is absent and whose parent is ready or reserved earlier\n"
            "in this call. Never evicts a block that the result calls ready. Lease 0: no lease owns the\n"
            "slots. ``below_pending``: also below parents whose copies are in flight; a block is dropped in\n"
            "the end unless its parent's copy has succeeded before. ``tenant``: of the blocks, unless the\n"
            "first one is below a block of another; beyond its limit it evicts its own, and what there is\n"
            "no room for then is missing.")
        .def(
            "commit",
            [](Tier &tier, LeaseId lease, const nb::bytes &parent, const HashesIn &hashes,
               const VectorIn<std::int32_t> &slots) {
                require_equal(slots.shape(0), hashes.shape(0));
                return to_numpy<std::uint8_t>(
                    tier.commit(lease, digest_of("parent", parent), digests_of(hashes), slots_of(slots)));
            },
            "lease"_a, "parent"_a, "hashes"_a, "slots"_a,
            "Make slots that the lease reserved matchable below ``parent``, in path order. Per block: 0\n"
            "stored, 1 duplicate.\n\n"
            "Stops at the first block that cannot be committed yet: its parent is not ready, its hash\n"
            "is pending or below another parent, or a copy uses its slot. For a duplicate, pins the\n"
            "existing entry; the slot stays with the lease.")
        .def(
            "publish",
            [](Tier &tier, LeaseId lease, const HashesIn &parents, const HashesIn &hashes,
               const VectorIn<std::int32_t> &slots, const VectorIn<std::uint8_t> &copied,
               const VectorIn<std::uint64_t> &checksums,
               const std::optional<VectorIn<std::uint32_t>> &tenants) {
                for (const auto size :
                     {parents.shape(0), slots.shape(0), copied.shape(0), checksums.shape(0)})
                    require_equal(size, hashes.shape(0));
                return to_numpy<std::uint8_t>(
                    tier.publish(lease, digests_of(parents), digests_of(hashes), slots_of(slots),
                                 span_of(copied), span_of(checksums), tenants_of(tenants, hashes.shape(0))));
            },
            "lease"_a, "parents"_a, "hashes"_a, "slots"_a, "copied"_a, "checksums"_a,
            "tenants"_a = nb::none(),
            "Make slots that the lease reserved, and others filled, matchable. Per block: 0 stored, 1\n"
            "duplicate, 2 no parent, 3 dropped, 4 over limit.\n\n"
            "The lease gives up all these slots. A lease from before a reset drops them all.\n"
            "``tenants``: of the blocks below the root, inherited by the blocks below them. A tenant at\n"
            "its limit evicts its own coldest leaves.")
        .def("set_tenant_limit", &Tier::set_tenant_limit, "tenant"_a, "most"_a,
             "Limit the entries of a tenant. The first call enables tenants; ValueError if there are\n"
             "entries.")
        .def(
            "tenant_entries", [](const Tier &tier) { return to_numpy<std::uint32_t>(tier.tenant_entries()); },
            "Number of entries by tenant.")
        .def(
            "drop",
            [](Tier &tier, const HashesIn &hashes) {
                return without_gil(hashes, [&](auto given) { return tier.drop(given); });
            },
            "hashes"_a,
            "Remove entries and blocks that are being copied, and everything below them; return their slots.")
        .def(
            "below",
            [](const Tier &tier, const HashesIn &hashes) {
                return without_gil(hashes, [&](auto given) { return tier.below(given); });
            },
            "hashes"_a, "Return the slots that ``drop`` would remove.")
        .def(
            "free_among",
            [](const Tier &tier, const VectorIn<std::int32_t> &slots) {
                return to_numpy<std::int32_t>(tier.free_among(slots_of(slots)));
            },
            "slots"_a, "Return those of these slots that are free.")
        .def(
            "hold", [](Tier &tier, const VectorIn<std::int32_t> &slots) { tier.hold(slots_of(slots)); },
            "slots"_a, "Keep slots while a copy reads them, without a change to the eviction order.")
        .def(
            "hold_ready",
            [](Tier &tier, const HashesIn &hashes, std::size_t most) {
                return tier.hold_ready(digests_of(hashes), most);
            },
            "hashes"_a, "most"_a, "Hold the ready ones of these blocks, at most ``most``; return them.")
        .def(
            "unhold", [](Tier &tier, const VectorIn<std::int32_t> &slots) { tier.unhold(slots_of(slots)); },
            "slots"_a, "End a ``hold``.")
        .def(
            "find", [](const Tier &tier, const HashesIn &hashes) { return tier.find(digests_of(hashes)); },
            "hashes"_a, "Return the blocks that are ready, in the order of ``hashes``.")
        .def(
            "ancestry",
            [](const Tier &tier, const VectorIn<std::int32_t> &slots, std::uint32_t levels) {
                return tier.ancestry(slots_of(slots), levels);
            },
            "slots"_a, "levels"_a = UINT32_MAX,
            "Return the entries in ``slots`` and their ancestors, each once, parents first.\n\n"
            "A walk up ends ``levels`` above the last of ``slots`` that it met, or at an entry listed\n"
            "before.")
        .def(
            "coldest",
            [](const Tier &tier, std::uint32_t count) {
                if (count < kLongListing) return tier.coldest(count);
                const nb::gil_scoped_release release;
                return tier.coldest(count);
            },
            "count"_a, "Return the next entries to be evicted, in order.")
        .def("hottest", &Tier::hottest, "count"_a, ReleaseGil(), "Return the entries with the most hits.")
        .def(
            "idle",
            [](const Tier &tier, double seconds, std::optional<Tenant> tenant) {
                constexpr double kMost = 1e18;
                const double milliseconds = std::clamp(seconds * 1000.0, 0.0, kMost);
                const nb::gil_scoped_release release;
                return tier.idle(static_cast<std::uint64_t>(milliseconds), tenant ? &*tenant : nullptr);
            },
            "seconds"_a, "tenant"_a = nb::none(),
            "Return the entries not used for this long, of one tenant or all.")
        .def(
            "starting_with",
            [](const Tier &tier, const nb::bytes &prefix) {
                const auto *bytes = reinterpret_cast<const std::uint8_t *>(prefix.c_str());
                const nb::gil_scoped_release release;
                return tier.starting_with({bytes, prefix.size()});
            },
            "prefix"_a, "Return the entries whose hash starts with ``prefix``.")
        .def(
            "restore",
            [](Tier &tier, const VectorIn<std::int32_t> &slots, const VectorIn<std::uint32_t> &generations,
               const HashesIn &hashes, const HashesIn &parents, const VectorIn<std::uint64_t> &checksums,
               const std::optional<VectorIn<std::uint64_t>> &times, std::uint32_t generation,
               const std::optional<VectorIn<std::uint32_t>> &tenants, bool keep_orphans) {
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
                    const nb::gil_scoped_release release;
                    restored = tier.restore(found, generation, keep_orphans);
                }
                return to_numpy<std::uint8_t>(std::move(restored));
            },
            "slots"_a, "generations"_a, "hashes"_a, "parents"_a, "checksums"_a, "times"_a = nb::none(),
            "generation"_a = 0, "tenants"_a = nb::none(), "keep_orphans"_a = false,
            "Create entries for blocks whose bytes are there already, in free slots and any order; 1\n"
            "for each one created.\n\n"
            "Of equal hashes the newest by ``times`` counts, or the first. Later content of any slot\n"
            "gets a generation above ``generation`` and all those given. ``keep_orphans``: blocks without\n"
            "a parent keep their slots and become entries once it is there. Releases the GIL: do not\n"
            "change the arrays meanwhile.")
        .def(
            "discard",
            [](Tier &tier, const VectorIn<std::int32_t> &slots, bool quarantine, bool keep_orphans) {
                const auto given = slots_of(slots);
                const std::vector<Slot> discarded(given.begin(), given.end());
                const nb::gil_scoped_release release;
                return tier.discard(discarded, quarantine, keep_orphans);
            },
            "slots"_a, "quarantine"_a = false, "keep_orphans"_a = false,
            "Remove READY entries and everything below them. ``quarantine`` takes the slots out of use\n"
            "for good. ``keep_orphans``: blocks below become orphans, which keep their slots until room is\n"
            "needed and are entries again once their parent is.")
        .def(
            "awaited", [](Tier &tier, std::size_t count) { return hashes_to_numpy(tier.awaited(count)); },
            "count"_a,
            "Return up to ``count`` missing blocks that orphans wait for; the next call goes on with others.")
        .def_prop_ro("num_orphans", &Tier::num_orphans, "Number of orphans.")
        .def(
            "drop_orphans", [](Tier &tier) { return to_numpy<std::int32_t>(tier.drop_orphans()); },
            "Evict every orphan; return the slots.")
        .def(
            "quarantine",
            [](Tier &tier, const VectorIn<std::int32_t> &slots) { tier.quarantine(slots_of(slots)); },
            "slots"_a, "Take slots in use out of use for good, once nothing uses them.")
        .def(
            "withhold",
            [](Tier &tier, const VectorIn<std::int32_t> &slots) { tier.withhold(slots_of(slots)); },
            "slots"_a, "Take slots in use out of use until ``give_back``, once nothing uses them.")
        .def(
            "give_back",
            [](Tier &tier, const VectorIn<std::int32_t> &slots) { tier.give_back(slots_of(slots)); },
            "slots"_a, "Return withheld slots to use.")
        .def(
            "hint",
            [](Tier &tier, const HashesIn &hashes, const std::vector<SaidHint> &hints, std::size_t sample) {
                std::vector<HintRange> ranges;
                ranges.reserve(hints.size());
                for (const auto &[kind, value, start, stop, own] : hints)
                    ranges.push_back({{kind, value}, start, stop, own});
                const std::span<const Digest> path = digests_of(hashes);
                std::vector<std::tuple<int, std::uint32_t, std::uint32_t, nb::bytes>> answers;
                const std::vector<HintTaken> taken = tier.hint(path, ranges);
                answers.reserve(taken.size());
                for (std::size_t i = 0; i < taken.size(); ++i) {
                    const auto &[answer, first, blocks] = taken[i];
                    const bool has_sample = answer == HintAnswer::kTaken && ranges[i].hint.keeps();
                    answers.emplace_back(static_cast<int>(answer), first, blocks,
                                         sample_of(path.subspan(first, blocks), has_sample ? sample : 0));
                }
                return answers;
            },
            "hashes"_a, "hints"_a, "sample"_a = 0,
            "Take what a client says of blocks of one path, until their next use. A hint is (kind, seconds "
            "or\n"
            "a priority of 1 to 100, first block, block after the last, True: only of those that nobody "
            "else\n"
            "has). The last one about a block holds. Return for each its ``HintAnswer``, its first block, "
            "their\n"
            "number, and if it keeps them the hashes of up to ``sample`` of them, from the last one on.")
        .def(
            "hint_fates",
            [](const Tier &tier, const HashesIn &hashes) {
                std::vector<std::uint8_t> codes;
                for (const HintFate fate : tier.hint_fates(digests_of(hashes)))
                    codes.push_back(static_cast<std::uint8_t>(fate));
                return to_numpy<std::uint8_t>(std::move(codes));
            },
            "hashes"_a, "Return what became of blocks that a hint was taken for, as a ``HintFate`` each.")
        .def("reuse", &Tier::reuse,
             "Return a copy of what the eviction order has learned; None for one that does not learn.")
        .def(
            "save_reuse",
            [](const Tier &tier) {
                const std::vector<std::uint8_t> saved = tier.save_reuse();
                return nb::bytes(saved.data(), saved.size());
            },
            "Return what was learned, for ``load_reuse`` of a later process; empty if nothing is.")
        .def(
            "load_reuse",
            [](Tier &tier, const nb::bytes &saved) {
                return tier.load_reuse({reinterpret_cast<const std::uint8_t *>(saved.c_str()), saved.size()});
            },
            "saved"_a,
            "Go on from what was learned before. Return False, and change nothing, for other bytes.")
        .def("reset", &Tier::reset, ReleaseGil(),
             "Remove all entries. Slots in use stay with their leases and copies.")
        .def("resize", &Tier::resize, "slots"_a, ReleaseGil(),
             "Change the number of slots. If slots to remove are in use, return how many and change\n"
             "nothing.\n\n"
             "Raises MemoryError if there is no room to grow.")
        .def(
            "mirror",
            [](Tier &tier, nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> memory) {
                const PresenceTable table(memory.data(), memory.shape(0));
                const nb::gil_scoped_release release;
                tier.mirror(table);
            },
            "memory"_a, nb::keep_alive<1, 2>(),
            "Keep a presence table of the READY blocks in ``memory``, which may be shared.")
        .def("record_events", &Tier::record_events, "capacity"_a,
             "Keep up to ``capacity`` events for ``take_events``; 0 keeps none.")
        .def("take_events", &take_events,
             "Return kinds (0 stored, 1 removed, 2 cleared, 3 lost: some are missing), hashes and\n"
             "parents, oldest first.")
        .def("take_event_bytes", &take_event_bytes, "``take_events`` in bytes, which costs less for few.")
        .def("stats", &Tier::stats)
        .def("node", &Tier::node, "slot"_a, "Return the state of a slot.")
        .def_prop_ro("available", &Tier::available,
                     "Number of slots that ``reserve`` can provide: free or evictable.")
        .def_prop_ro("above_copies", &Tier::above_copies,
                     "Number of further slots that ``reserve`` can provide after ``evict_copied``.")
        .def("check_integrity", &Tier::check_integrity, ReleaseGil(),
             "Return the invariants that do not hold, in words.");
}

}  // namespace fdcache
