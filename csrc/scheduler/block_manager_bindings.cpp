#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <mutex>
#include <string_view>
#include <unordered_set>
#include <variant>

#include "plan/copy_out.hpp"
#include "python_arrays.hpp"
#include "scheduler/block_manager.hpp"
#include "scheduler/python_loads.hpp"
#include "scheduler/python_request.hpp"

namespace fdcache {
namespace {

using AnyList = nb::typed<nb::list, nb::any>;
using RequestSequence = nb::typed<nb::sequence, PythonRequest>;
using Live = nb::typed<nb::dict, nb::str, nb::any>;  // the requests between match and end, by id

// --- hashing -----------------------------------------------------------------------------------------------

// Tokens from which on a request is hashed without the GIL even in the thread that computes. Fewer are hashed
// in a fraction of a millisecond, and to get the GIL back from a busy thread takes up to five.
constexpr std::size_t many_tokens = 1 << 17;
constexpr std::size_t never = std::numeric_limits<std::size_t>::max();

// Hashes the tokens of a request that `manager` must bind, `least_without_gil` or more of them without the
// GIL. Another thread may be doing so: then waits for it.
void bind_request(const PythonBlockManager &manager, PythonRequest &request, std::size_t least_without_gil) {
    while (manager.must_bind(request)) {
        const BlockKeys keys = manager.keys();
        const TokenBlocks *const before = request.is_bound() ? &request.blocks() : nullptr;
        auto blocks = request.make_blocks(keys);
        std::size_t count = 0;
        const auto allocate = [&](std::size_t size) { return blocks->extend(count = size); };
        if (before) {
            const auto &tokens = before->tokens();
            std::copy_n(tokens.data(), tokens.size(), allocate(tokens.size()));
        } else {
            read_tokens(nb::object(request.prompt), allocate);
        }
        std::unique_lock lock(request.binding(), std::try_to_lock);
        if (!lock) {
            const nb::gil_scoped_release release;
            lock.lock();
        }
        if (!manager.must_bind(request)) return;
        if (count >= least_without_gil) {
            const nb::gil_scoped_release release;
            blocks->commit(count);
        } else {
            blocks->commit(count);
        }
        // Other threads may have matched or bound the request, appended tokens, or changed the revision. Then
        // it is hashed again, with the GIL, so that it ends.
        const TokenBlocks *const now = request.is_bound() ? &request.blocks() : nullptr;
        const bool is_same =
            now == before && (!now || now->tokens().size() == count) && manager.keys() == keys;
        if (is_same && !request.is_live()) return request.bind(keys, std::move(blocks));
        least_without_gil = never;
    }
}

// --- match and end -----------------------------------------------------------------------------------------

void check_match(const PythonBlockManager &manager, const RequestSequence &requests, const Live &live) {
    for (nb::handle each : requests) manager.check_idle(request_of(each));
    for (nb::handle each : requests) bind_request(manager, request_of(each), never);
    // Hashing may have run Python code; nothing does from here on.
    std::unordered_set<std::string_view> seen;
    for (nb::handle each : requests) {
        const PythonRequest &request = request_of(each);
        manager.check_idle(request);
        const bool is_twice = nb::len(requests) > 1 && !seen.insert(request.id()).second;
        if (is_twice || PyDict_Contains(live.ptr(), request.request_id.ptr()))
            throw RequestStateError("another request with the id '" + request.id() + "' is running");
    }
}

void remove_from(const Live &live, const PythonRequest &request) {
    if (PyDict_DelItem(live.ptr(), request.request_id.ptr())) nb::raise_python_error();
}

template <void (BlockManager::*End)(RequestState &)>
bool end(PythonBlockManager &manager, PythonRequest &request, const Live &live) {
    if (!manager.owns(request)) return false;
    (manager.*End)(request);
    remove_from(live, request);
    return true;
}

// How Python is told of matches and allocations: its classes, and terms that stay the same.
struct MatchForms {
    std::size_t cell;
    double defer_timeout;
    nb::object result, matched, deferred;
};

struct AllocationForms {
    nb::object result, no_blocks, deferred;
};

nb::object match_result(const MatchForms &forms, const PythonRequest &request, const Matched &found) {
    if (found.end == MatchEnd::kDeferred) return forms.result(request.request_id, forms.deferred);
    const std::size_t from_storage = request.host_run().from_storage;
    return forms.result(request.request_id, forms.matched, found.on_device, found.on_host - from_storage,
                        from_storage, request.num_cached_tokens);
}

MatchTerms terms_of(const MatchForms &forms, nb::handle clock, nb::handle is_reading,
                    nb::handle worth_loading) {
    MatchTerms terms{forms.cell, forms.defer_timeout, [clock] { return nb::cast<double>(clock()); }, {}, {}};
    if (!worth_loading.is_none())
        terms.worth_loading = [worth_loading](const RequestState &request, std::size_t on_device,
                                              std::size_t on_host) {
            const auto &id = static_cast<const PythonRequest &>(request).request_id;
            const nb::bytes last = digest_to_bytes(request.blocks().hashes().data()[on_device + on_host - 1]);
            return nb::cast<std::size_t>(worth_loading(id, request.num_tokens(), on_device, on_host, last));
        };
    if (!is_reading.is_none())
        terms.is_reading = [is_reading](const Digest &hash) {
            return nb::cast<bool>(is_reading(digest_to_bytes(hash)));
        };
    return terms;
}

AnyList match(PythonBlockManager &manager, const RequestSequence &requests, const Live &live,
              const MatchForms &forms, nb::handle clock, nb::handle is_reading,
              const std::optional<std::vector<int>> &storage_use, nb::handle worth_loading) {
    check_match(manager, requests, live);
    if (storage_use) require_equal(nb::len(requests), storage_use->size());
    const MatchTerms terms = terms_of(forms, clock, is_reading, worth_loading);
    AnyList results;
    std::size_t position = 0;
    for (nb::handle each : requests) {
        PythonRequest &request = request_of(each);
        manager.check_idle(request);
        if (PyDict_SetItem(live.ptr(), request.request_id.ptr(), each.ptr())) nb::raise_python_error();
        const auto use = storage_use ? static_cast<StorageUse>((*storage_use)[position]) : StorageUse::kNone;
        const Matched found = manager.match(request, terms, use);
        ++position;
        if (found.end == MatchEnd::kDeferred) remove_from(live, request);
        if (found.end == MatchEnd::kUnanswered)
            results.append(nb::make_tuple(found.on_device, found.ask_for));
        else
            results.append(match_result(forms, request, found));
    }
    return results;
}

nb::object answer(PythonBlockManager &manager, PythonRequest &request, const Live &live,
                  const MatchForms &forms, nb::handle clock, const HostRun &run,
                  std::pair<std::size_t, std::size_t> from_storage, nb::handle worth_loading) {
    const Matched found = manager.answer(request, terms_of(forms, clock, nb::none(), worth_loading), run);
    if (found.end == MatchEnd::kDeferred) {
        remove_from(live, request);
    } else {
        const auto [first, stop] = from_storage;
        manager.set_from_storage(request, std::min(stop, found.on_host) - std::min(first, found.on_host));
    }
    return match_result(forms, request, found);
}

// --- allocate ----------------------------------------------------------------------------------------------

// Requests, each with a number of tokens.
using Counted = std::vector<std::pair<nb::typed<nb::object, PythonRequest>, nb::typed<nb::object, nb::int_>>>;

std::vector<std::pair<PythonRequest *, std::uint64_t>> read_counts(const Counted &pairs, const char *name) {
    std::vector<std::pair<PythonRequest *, std::uint64_t>> read;
    read.reserve(pairs.size());
    for (const auto &[request, tokens] : pairs)
        read.emplace_back(&request_of(request),
                          count_of("request '" + request_of(request).id() + "': " + name, tokens));
    return read;
}

nb::object added_blocks(const RequestState &request, std::size_t first, std::size_t last) {
    return copied_array<std::int32_t>({request.table().data() + first, last - first});
}

AnyList allocate(PythonBlockManager &manager, const Counted &demands, BlockCopies &loads, const Live &live,
                 const AllocationForms &forms) {
    const auto read = read_counts(demands, "num_tokens");
    for (const auto &[request, tokens] : read) manager.check_allocate(*request, tokens);
    AnyList results;
    for (const auto &[each, tokens] : read) {
        PythonRequest &request = *each;
        manager.check_allocate(request, tokens);  // a request named twice may have been released
        const Allocated given = manager.allocate(request, tokens, &loads);
        if (given.end == AllocationEnd::kDone) {
            const auto [first, last] = manager.take_added(request);
            results.append(forms.result(request.request_id, added_blocks(request, first, last)));
        } else if (given.end == AllocationEnd::kNoBlocks) {
            results.append(forms.result(request.request_id, "failure"_a = forms.no_blocks,
                                        "shortfall"_a = given.missing));
        } else {
            remove_from(live, request);
            results.append(forms.result(request.request_id, "failure"_a = forms.deferred));
        }
    }
    return results;
}

// --- loads -------------------------------------------------------------------------------------------------

nb::list take_outcomes(PythonBlockManager &manager, const LoadForms &forms) {
    nb::list outcomes;
    for (const LoadPointer &load : manager.take_ended())
        outcomes.append(
            forms.outcome_of(*load, static_cast<PythonRequest *>(load->waiting)->request_id, nb::tuple()));
    return outcomes;
}

// (request id, lease, part, slots, generations) of the fetches planned since the last call.
nb::list take_fetches(PythonBlockManager &manager) {
    nb::list fetches;
    for (PlannedFetch &each : manager.take_fetches()) {
        auto *const request = static_cast<PythonRequest *>(each.part.load->waiting);
        if (!request) continue;
        std::vector<std::int32_t> slots(each.slots.begin(), each.slots.end());
        fetches.append(nb::make_tuple(request->request_id, request->lease(), std::move(each.part),
                                      to_numpy<std::int32_t>(std::move(slots)),
                                      to_numpy<std::uint32_t>(std::move(each.generations))));
    }
    return fetches;
}

// --- advance -----------------------------------------------------------------------------------------------

AdvanceResult advance(PythonBlockManager &manager, nb::handle requests, nb::handle tokens,
                      nb::handle uncomputed, bool grow) {
    const std::uint64_t uncomputed_tokens = count_of("uncomputed_tokens", uncomputed);
    const StepTokens step = step_tokens(tokens);
    const Requests found = requests_of(requests);  // from here on no Python code runs
    if (found.all.size() != step.ends.size())
        throw RequestStateError("advance: " + std::to_string(step.ends.size()) +
                                " tokens or lists of tokens for " + std::to_string(found.all.size()) +
                                " requests");
    for (const PythonRequest *request : found.all) manager.check_advance(*request);
    std::vector<RequestState *> states(found.all.begin(), found.all.end());
    std::size_t at = 0;
    for (std::size_t i = 0; i < states.size(); ++i) {
        const std::size_t count = step.ends[i] - at;
        TokenBlocks &blocks = states[i]->blocks();
        std::copy_n(step.tokens.data() + at, count, blocks.extend(count));
        blocks.commit(count);
        at += count;
    }
    AdvanceResult result;
    manager.advance(states, uncomputed_tokens, grow, result);
    return result;
}

// The policy's news but what `queue_followed` has taken.
nb::tuple take_followed(PythonBlockManager &manager) {
    Followed followed = manager.take_followed();
    nb::object evicted = nb::none();
    if (!followed.evicted.slots.empty()) evicted = nb::cast(std::move(followed.evicted));
    nb::list owners;
    for (const auto &[block, tenant] : followed.owners)
        owners.append(nb::make_tuple(digest_to_bytes(block), nb::str(tenant.c_str(), tenant.size())));
    return nb::make_tuple(evicted, owners);
}

void bind_forms(nb::module_ &module) {
    nb::class_<MatchForms>(
        module, "MatchForms",
        "How ``BlockManager`` tells of matches, and their terms: ``cell`` blocks are a cell of\n"
        "the reuse grid; a request waits ``defer_timeout`` seconds for another's copy.")
        .def(nb::init<std::size_t, double, nb::object, nb::object, nb::object>(), "cell"_a, "defer_timeout"_a,
             "result"_a, "matched"_a, "deferred"_a)
        .def_ro("cell", &MatchForms::cell);
    nb::class_<AllocationForms>(module, "AllocationForms", "How ``BlockManager`` tells of allocations.")
        .def(nb::init<nb::object, nb::object, nb::object>(), "result"_a, "no_blocks"_a, "deferred"_a);
}

}  // namespace

void bind_block_manager(nb::module_ &module) {
    bind_forms(module);
    nb::class_<BlockManagerStats>(module, "BlockManagerStats", "Totals since the manager was made.")
        .def_ro("lookups", &BlockManagerStats::lookups)
        .def_ro("lookup_tokens", &BlockManagerStats::lookup_tokens)
        .def_ro("device_hit_tokens", &BlockManagerStats::device_hit_tokens)
        .def_ro("host_hit_tokens", &BlockManagerStats::host_hit_tokens)
        .def_ro("storage_hit_tokens", &BlockManagerStats::storage_hit_tokens)
        .def_ro("deferred", &BlockManagerStats::deferred)
        .def_ro("allocation_failures", &BlockManagerStats::allocation_failures);
    nb::class_<PythonBlockManager>(
        module, "BlockManager", traversed<PythonBlockManager>(),
        "The device blocks of the requests of one scheduler.\n\n"
        "``live`` are the requests between match and end by id, a dictionary that the caller keeps. With\n"
        "``follow_*`` the manager keeps what write policies need to know until ``take_followed``. Raises\n"
        "RequestStateError for requests in another state; nothing is changed then.")
        .def(
            "__init__",
            [](PythonBlockManager *self, nb::typed<nb::object, Tier> tier, std::int64_t block_size,
               const nb::bytes &fingerprint, std::int64_t lookahead, bool caches_prefixes, bool follow_stored,
               bool follow_evicted, bool follow_owners, std::uint32_t follow_hits,
               nb::typed<nb::object, HostIndex> host) {
                const BlockKeys keys{block_size, digest_of<HashingError>("fingerprint", fingerprint),
                                     lookahead};
                new (self) PythonBlockManager(nb::cast<Tier &>(tier), keys, caches_prefixes,
                                              {follow_stored, follow_evicted, follow_owners, follow_hits},
                                              nb::cast<HostIndex *>(host));
                self->parts = {tier, host};
            },
            "tier"_a, "block_size"_a, "fingerprint"_a, "lookahead"_a = 0, "caches_prefixes"_a = true,
            "follow_stored"_a = false, "follow_evicted"_a = false, "follow_owners"_a = false,
            "follow_hits"_a = 0, "host"_a.none() = nb::none())
        .def(
            "prepare",
            [](const PythonBlockManager &self, PythonRequest &request, bool keeps_gil) {
                bind_request(self, request, keeps_gil ? many_tokens : 0);
            },
            "request"_a, "keeps_gil"_a = false,
            "Hash the tokens of a request, without the GIL, unless they are. Any thread may call. With\n"
            "``keeps_gil`` the GIL is kept for all but very long ones. Raises HashingError for tokens that\n"
            "cannot be hashed.")
        .def(
            "change_fingerprint",
            [](PythonBlockManager &self, const nb::bytes &fingerprint) {
                self.change_fingerprint(digest_of<HashingError>("fingerprint", fingerprint));
            },
            "fingerprint"_a, "Hash with another layout from now on. Live requests publish no more.")
        .def(
            "stop_publishing", [](PythonBlockManager &self) { self.stop_publishing(); },
            "Stop live requests from publishing; they keep their blocks.")
        .def(
            "publishes",
            [](const PythonBlockManager &self, const PythonRequest &request) {
                return self.publishes(request);
            },
            "request"_a)
        .def(
            "owns",
            [](const PythonBlockManager &self, const PythonRequest &request) { return self.owns(request); },
            "request"_a, "Return True between the request's match and its end.")
        .def("check_match", &check_match, "requests"_a, "live"_a,
             "Check that the requests can be matched, and hash those that are not yet.")
        .def(
            "matchable",
            [](const PythonBlockManager &self, const PythonRequest &request) {
                return self.matchable(request);
            },
            "request"_a,
            "How many leading blocks a match may find: not the last token's, nor any above the request's\n"
            "limit.")
        .def("match", &match, "requests"_a, "live"_a, "forms"_a, "clock"_a,
             "is_reading"_a.none() = nb::none(), "storage_use"_a.none() = nb::none(),
             "worth_loading"_a.none() = nb::none(),
             "Pin the longest cached prefix of each request, on the device and then on the host, or defer "
             "it.\n"
             "Return a ``result`` for each, or (first block, blocks) where the service has to be asked for "
             "as\n"
             "many leading blocks: see ``answer``. Blocks for which ``is_reading`` are not waited for.\n"
             "``storage_use``, for a service with storage: 1 if blocks may be read for a request, 2 if they "
             "are.\n"
             "``worth_loading(request_id, num_tokens, on_device, on_host, last_hash)`` returns how many of "
             "the blocks "
             "on the\n"
             "host to load.")
        .def("answer", &answer, "request"_a, "live"_a, "forms"_a, "clock"_a, "run"_a, "from_storage"_a,
             "worth_loading"_a.none() = nb::none(),
             "End a match with the run that the service has pinned for it; ``from_storage`` are the first "
             "block of\n"
             "the run that was read from storage for the request, and the one after the last.")
        .def(
            "wait_for_reads",
            [](PythonBlockManager &self, PythonRequest &request, const Live &live) {
                const bool is_live = self.owns(request);
                self.wait_for_reads(request);
                if (is_live) remove_from(live, request);
            },
            "request"_a, "live"_a, "Release a request that waits for its reads from storage.")
        .def(
            "set_from_storage",
            [](PythonBlockManager &self, PythonRequest &request, std::uint32_t blocks) {
                self.set_from_storage(request, blocks);
            },
            "request"_a, "blocks"_a, "Count blocks of a matched request's host run as read from storage.")
        .def(
            "set_loaded_ahead",
            [](PythonBlockManager &self, PythonRequest &request, std::uint32_t from_host,
               std::uint32_t from_storage) { self.set_loaded_ahead(request, from_host, from_storage); },
            "request"_a, "from_host"_a, "from_storage"_a,
            "Count blocks of a matched request on the device as hits of the tier that they were loaded from\n"
            "for it. Raises RequestStateError for more than it has there.")
        .def("allocate", &allocate, "demands"_a, "loads"_a, "live"_a, "forms"_a,
             "Extend the block table of each (request, number of tokens), and plan the loads of its host "
             "run.\n"
             "Return a ``result`` for each.")
        .def(
            "commit",
            [](PythonBlockManager &self, const Counted &progress) {
                const auto read = read_counts(progress, "cannot commit: the number of tokens");
                for (const auto &[request, tokens] : read)
                    self.check_commit(*request, static_cast<std::int64_t>(tokens));
                for (const auto &[request, tokens] : read) self.commit(*request, tokens);
            },
            "progress"_a, "Publish the full blocks of the first tokens of each (request, number of tokens).")
        .def("advance", &advance, "requests"_a, "tokens"_a, "uncomputed_tokens"_a = 1, "grow"_a = true,
             "Append tokens, extend the block tables and publish full blocks: a whole decode step.")
        .def_prop_ro(
            "loads", [](PythonBlockManager &self) -> Loads & { return self.loads(); }, "What requests load.")
        .def("take_outcomes", &take_outcomes, "forms"_a,
             nb::sig("def take_outcomes(self, forms: LoadForms) -> list[typing.Any]"),
             "Return the ends of loads that a request waits for, each once; publish what waited for them.")
        .def(
            "expect_from_peer",
            [](PythonBlockManager &self, PythonRequest &request) { return self.expect_from_peer(request); },
            "request"_a, "Extend a match by the blocks that only a peer has; return their number.")
        .def("take_fetches", &take_fetches,
             nb::sig("def take_fetches(self) -> list[tuple[str, int, LoadPart, "
                     "numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.uint32]]]"),
             "Return (request id, lease, part of its load, slots, generations) of the fetches that "
             "allocations\n"
             "have planned since the last call.")
        .def("release", &end<&BlockManager::release>, "request"_a, "live"_a,
             "Release every block of a live request; return False if it is not live.")
        .def(
            "finish",
            [](PythonBlockManager &self, const RequestSequence &requests, const Live &live) {
                for (nb::handle each : requests) {
                    PythonRequest &request = request_of(each);
                    end<&BlockManager::finish>(self, request, live);
                    self.forget_hits(request);
                }
            },
            "requests"_a, "live"_a,
            "Release requests at their end: the eviction order learns how their blocks were used, and their\n"
            "next match counts as another hit.")
        .def_prop_ro(
            "has_followed", [](const PythonBlockManager &self) { return self.has_followed(); },
            "True if ``take_followed`` has something.")
        .def(
            "queue_followed",
            [](PythonBlockManager &self, CopyOut &copies) { self.queue_followed(copies.queue()); },
            "copies"_a, "Queue the blocks that became entries or reached ``follow_hits`` for a backup.")
        .def("take_followed", &take_followed,
             nb::sig("def take_followed(self) -> tuple[BlockList | None, list[tuple[bytes, str]]]"),
             "Return blocks evicted and (first block, tenant) of requests that published, and forget all "
             "news.")
        .def_prop_ro("stats", [](const PythonBlockManager &self) -> const BlockManagerStats & {
            return self.stats();
        });
}

}  // namespace fdcache
