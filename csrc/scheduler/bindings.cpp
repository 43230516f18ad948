#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hash/python_tokens.hpp"
#include "scheduler/block_manager.hpp"

namespace fdcache {
namespace {

using SlotRow = nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<1>>;

// For messages: any text, lone surrogates too.
std::string text_of(const nb::str &value) {
    const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(value.ptr(), "utf-8", "backslashreplace"));
    if (!bytes.is_valid()) nb::raise_python_error();
    return {PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
}

// A request as Python sees it. `prompt` is what the caller gave; it is read once, and not freed in a step.
struct PythonRequest : RequestState {
    PythonRequest(nb::str id, nb::object prompt, std::size_t prompt_tokens, std::optional<std::string> tenant,
                  ExtraKeys extra_keys)
        : RequestState(text_of(id), prompt_tokens, std::move(tenant), std::move(extra_keys)),
          request_id(std::move(id)),
          prompt(std::move(prompt)) {}

    nb::str request_id;
    nb::object prompt;
};

// The requests of a list or tuple, which keeps them alive.
struct Requests {
    nb::object sequence;
    std::vector<PythonRequest *> all;
};
using RequestSequence = nb::typed<nb::sequence, PythonRequest>;
using Live = nb::typed<nb::dict, nb::str, nb::any>;  // the requests between match and end, by id

PythonRequest &request_of(nb::handle value) {
    static PyTypeObject *const type = reinterpret_cast<PyTypeObject *>(nb::type<PythonRequest>().ptr());
    if (!PyObject_TypeCheck(value.ptr(), type))
        throw nb::type_error(
            ("expected a Request, got " + std::string(nb::type_name(value.type()).c_str())).c_str());
    if (!nb::inst_ready(value)) throw nb::type_error("a Request whose __init__ was not called");
    return *nb::inst_ptr<PythonRequest>(value);
}

Requests requests_of(nb::handle values) {
    Requests requests{nb::steal(PySequence_Fast(values.ptr(), "expected a list of requests")), {}};
    if (!requests.sequence.is_valid()) nb::raise_python_error();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(requests.sequence.ptr());
    requests.all.reserve(static_cast<std::size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i)
        requests.all.push_back(&request_of(PySequence_Fast_GET_ITEM(requests.sequence.ptr(), i)));
    return requests;
}

// --- hashing -----------------------------------------------------------------------------------------------

// Hashes the tokens of a request that `manager` must bind. Another thread may be doing so: then waits for it.
void bind_request(const BlockManager &manager, PythonRequest &request, bool release_gil) {
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
        if (release_gil) {
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
        release_gil = false;
    }
}

// --- match and end -----------------------------------------------------------------------------------------

void check_match(const BlockManager &manager, const RequestSequence &requests, const Live &live) {
    for (nb::handle each : requests) manager.check_idle(request_of(each));
    for (nb::handle each : requests) bind_request(manager, request_of(each), false);
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

bool match(BlockManager &manager, nb::handle handle, std::size_t limit, Live &live) {
    PythonRequest &request = request_of(handle);
    manager.check_idle(request);
    if (PyDict_SetItem(live.ptr(), request.request_id.ptr(), handle.ptr())) nb::raise_python_error();
    return manager.match(request, limit);
}

template <void (BlockManager::*End)(RequestState &)>
bool end(BlockManager &manager, PythonRequest &request, Live &live) {
    if (!manager.owns(request)) return false;
    (manager.*End)(request);
    if (PyDict_DelItem(live.ptr(), request.request_id.ptr())) nb::raise_python_error();
    return true;
}

// --- advance -----------------------------------------------------------------------------------------------

// The accepted tokens of a step: those of request i end at ends[i].
struct StepTokens {
    std::vector<std::int32_t> tokens;
    std::vector<std::size_t> ends;

    void add(nb::handle value) {
        if (PyLong_Check(value.ptr()) || !PySequence_Check(value.ptr())) {
            tokens.push_back(token_from(value.ptr(), 0));
        } else {
            const std::size_t before = tokens.size();
            read_tokens(value, [&](std::size_t count) {
                tokens.resize(before + count);
                return tokens.data() + before;
            });
        }
        ends.push_back(tokens.size());
    }
};

StepTokens step_tokens(nb::handle values) {
    StepTokens step;
    if (!PyList_Check(values.ptr()) && !PyTuple_Check(values.ptr())) {
        read_tokens(values, [&](std::size_t count) {  // an array: one token for each request
            step.tokens.resize(count);
            return step.tokens.data();
        });
        for (std::size_t i = 1; i <= step.tokens.size(); ++i) step.ends.push_back(i);
        return step;
    }
    const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(values.ptr()));
    step.tokens.reserve(count);
    step.ends.reserve(count);
    // An __index__ may run any code, and even shorten the list.
    for (std::size_t i = 0; i < count && static_cast<Py_ssize_t>(i) < PySequence_Fast_GET_SIZE(values.ptr());
         ++i)
        step.add(nb::borrow(PySequence_Fast_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i))));
    return step;
}

AdvanceResult advance(BlockManager &manager, nb::handle requests, nb::handle tokens, std::uint64_t uncomputed,
                      bool grow) {
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
    manager.advance(states, uncomputed, grow, result);
    return result;
}

// --- Python classes ----------------------------------------------------------------------------------------

SlotRow table_rows(const RequestState &request, std::size_t first, std::size_t last) {
    const auto &table = request.table();
    return SlotRow(table.data() + first, {last - first}, keeper(table.share()));
}

// A prompt may be any list, which may refer to its request again: the garbage collector has to see it.
int traverse_request(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<PythonRequest>(self)->prompt.ptr());
    return 0;
}

int clear_request(PyObject *self) {
    nb::inst_ptr<PythonRequest>(self)->prompt = nb::none();
    return 0;
}

PyType_Slot request_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(traverse_request)},
                               {Py_tp_clear, reinterpret_cast<void *>(clear_request)},
                               {0, nullptr}};

void bind_request_state(nb::module_ &module) {
    nb::class_<PythonRequest>(module, "RequestState", nb::type_slots(request_slots),
                              "Tokens, block hashes and device blocks of one request: the state that\n"
                              "``fdcache.manager.Request`` documents.")
        .def(
            "__init__",
            [](PythonRequest *self, nb::str request_id, nb::object prompt,
               const std::optional<nb::bytes> &tenant, const std::optional<ExtraKeys> &extra_keys,
               bool use_cache, bool device_only, std::optional<std::uint64_t> max_cached_tokens) {
                const std::size_t count = nb::len(prompt);
                std::optional<std::string> name;
                if (tenant) name.emplace(tenant->c_str(), tenant->size());
                new (self) PythonRequest(std::move(request_id), std::move(prompt), count, std::move(name),
                                         extra_keys ? *extra_keys : ExtraKeys());
                self->use_cache = use_cache;
                self->device_only = device_only;
                self->max_cached_tokens = max_cached_tokens;
            },
            "request_id"_a, "prompt"_a, "tenant"_a.none() = nb::none(), "extra_keys"_a.none() = nb::none(),
            "use_cache"_a = true, "device_only"_a = false, "max_cached_tokens"_a.none() = nb::none())
        .def_ro("request_id", &PythonRequest::request_id)
        .def_prop_ro("num_prompt_tokens", &RequestState::prompt_tokens)
        .def_prop_ro("num_tokens", &RequestState::num_tokens, "Number of prompt and appended tokens.")
        .def_ro("num_cached_tokens", &PythonRequest::num_cached_tokens,
                "Length of the matched prefix; 0 unless the request is matched.")
        .def_rw("use_cache", &PythonRequest::use_cache)
        .def_rw("device_only", &PythonRequest::device_only)
        .def_rw("max_cached_tokens", &PythonRequest::max_cached_tokens)
        .def_ro("is_loading", &PythonRequest::is_loading,
                "True from the planning of a load to the ``LoadOutcome`` of ``CacheManager.apply``.")
        .def_prop_ro(
            "lease", &RequestState::lease,
            "Lease of the request's device blocks, another one after each match; 0 unless it is live.")
        .def_prop_ro(
            "num_blocks", [](const PythonRequest &self) { return self.table().size(); },
            "Length of the block table.")
        .def_prop_ro("is_live", &RequestState::is_live, "True between the request's match and its end.")
        .def_prop_ro(
            "block_table", [](const PythonRequest &self) { return table_rows(self, 0, self.table().size()); },
            nb::rv_policy::automatic,
            "Device slots in path order, shape (blocks,); empty unless the request is matched.")
        .def_prop_ro(
            "tokens",
            [](const PythonRequest &self) {
                if (!self.is_bound()) return TokenRow(nullptr, {0});
                const auto &tokens = self.blocks().tokens();
                return TokenRow(tokens.data(), {tokens.size()}, keeper(tokens.share()));
            },
            nb::rv_policy::automatic,
            "Prompt and appended tokens, int32, shape (tokens,); empty before they are hashed.")
        .def_prop_ro(
            "block_hashes",
            [](const PythonRequest &self) {
                if (!self.is_bound()) return hash_rows(nullptr, 0);
                return hash_rows(self.blocks().hashes().share(), self.num_hashes());
            },
            nb::rv_policy::automatic,
            "Hashes of the full blocks so far, shape (blocks, 32); empty before they are made.\n\n"
            "With look-ahead tokens the last full blocks have no hash until the tokens after them are\n"
            "known.")
        .def(
            "append_tokens",
            [](PythonRequest &self, nb::handle tokens) {
                if (!self.is_bound())
                    throw RequestStateError("request '" + self.id() +
                                            "' has to be matched before it gets tokens");
                StepTokens step;
                step.add(tokens);  // may run Python code
                TokenBlocks &blocks = self.blocks();
                std::copy_n(step.tokens.data(), step.tokens.size(), blocks.extend(step.tokens.size()));
                blocks.commit(step.tokens.size());
            },
            "tokens"_a.none(), nb::sig("def append_tokens(self, tokens: int | " FDCACHE_TOKENS ") -> None"),
            "Append accepted generated tokens. Raises ``RequestStateError`` before the first match.");
}

void bind_advance_result(nb::module_ &module) {
    const auto rows = [](auto member) {
        return [member](nb::handle self) {
            const auto &values = nb::cast<const AdvanceResult &>(self).*member;
            return SlotRow(reinterpret_cast<const std::int32_t *>(values.data()), {values.size()}, self);
        };
    };
    using State =
        std::tuple<std::vector<std::uint32_t>, std::vector<Slot>, std::vector<std::uint32_t>, std::uint32_t>;
    nb::class_<AdvanceResult>(
        module, "AdvanceResult",
        "The blocks that a decode step added to its requests.\n\n"
        "::\n\n"
        "    result = manager.advance(requests, sampled_tokens)\n"
        "    for position, block in result:       # or the arrays, for a copy to the GPU\n"
        "        print(requests[position].request_id, block)\n"
        "    for position in result.failed:\n"
        "        preempt(requests[position])\n\n"
        "``positions`` and ``block_ids`` are parallel int32 arrays, shape (blocks,), ascending\n"
        "by request: views, which keep the result alive.")
        .def_prop_ro("positions", rows(&AdvanceResult::positions), nb::rv_policy::automatic,
                     "Position in the call of the request of each block.")
        .def_prop_ro("block_ids", rows(&AdvanceResult::blocks), nb::rv_policy::automatic,
                     "Device slot of each block.")
        .def_prop_ro("failed", rows(&AdvanceResult::failed), nb::rv_policy::automatic,
                     "Positions of the requests that got no blocks; preempt them, or allocate again.")
        .def_ro("shortfall", &AdvanceResult::shortfall, "Blocks that the first of them lacks; 0 without one.")
        .def_prop_ro(
            "ok", [](const AdvanceResult &self) { return self.failed.empty(); },
            "True if every block table holds all tokens.")
        .def("__len__", [](const AdvanceResult &self) { return self.blocks.size(); })
        .def(
            "__getitem__",
            [](const AdvanceResult &self, Py_ssize_t index) {
                const auto size = static_cast<Py_ssize_t>(self.blocks.size());
                if (index < -size || index >= size) throw nb::index_error("no such block");
                const auto at = static_cast<std::size_t>(index < 0 ? index + size : index);
                return std::pair(self.positions[at], self.blocks[at]);
            },
            "index"_a, "Return (position of the request, device slot).")
        .def(
            "__iter__",
            [](const AdvanceResult &self) {
                nb::list pairs;
                for (std::size_t i = 0; i < self.blocks.size(); ++i)
                    pairs.append(nb::make_tuple(self.positions[i], self.blocks[i]));
                return nb::iter(pairs);
            },
            nb::sig("def __iter__(self) -> collections.abc.Iterator[tuple[int, int]]"))
        .def(
            "__eq__",
            [](const AdvanceResult &self, nb::handle other) {
                return nb::isinstance<AdvanceResult>(other) && self == nb::cast<const AdvanceResult &>(other);
            },
            "other"_a, nb::sig("def __eq__(self, other: object, /) -> bool"))
        .def("__hash__",
             [](const AdvanceResult &self) {
                 std::size_t hash = self.failed.size() + 31 * self.shortfall;
                 for (const Slot slot : self.blocks) hash = 31 * hash + slot;
                 return hash >> 2;  // of a Python int's size
             })
        .def("__repr__",
             [](const AdvanceResult &self) {
                 std::string text = "AdvanceResult(";
                 for (std::size_t i = 0; i < self.blocks.size(); ++i) {
                     if (i == 8) {
                         text += ", ...";
                         break;
                     }
                     text += (i ? ", " : "") + std::to_string(self.positions[i]) + ": " +
                             std::to_string(self.blocks[i]);
                 }
                 if (!self.failed.empty()) text += "; failed: " + std::to_string(self.failed.size());
                 return text + ")";
             })
        .def("__getstate__",
             [](const AdvanceResult &self) {
                 return State(self.positions, self.blocks, self.failed, self.shortfall);
             })
        .def("__setstate__", [](AdvanceResult &self, const State &state) {
            require_equal(std::get<0>(state).size(), std::get<1>(state).size());
            new (&self)
                AdvanceResult{std::get<0>(state), std::get<1>(state), std::get<2>(state), std::get<3>(state)};
        });
}

// The policy's news as arrays: None where there is nothing.
nb::tuple take_followed(BlockManager &manager) {
    Followed followed = manager.take_followed();
    nb::object stored = nb::none(), hit = nb::none(), evicted = nb::none();
    if (!followed.stored.empty()) stored = nb::cast(hashes_to_numpy(std::move(followed.stored)));
    if (!followed.hit.empty()) hit = nb::cast(hashes_to_numpy(std::move(followed.hit)));
    if (!followed.evicted.slots.empty()) evicted = nb::cast(std::move(followed.evicted));
    nb::list owners;
    for (const auto &[block, tenant] : followed.owners)
        owners.append(nb::make_tuple(digest_to_bytes(block), nb::str(tenant.c_str(), tenant.size())));
    return nb::make_tuple(stored, hit, evicted, owners);
}

void bind_block_manager(nb::module_ &module) {
    nb::class_<BlockManagerStats>(module, "BlockManagerStats", "Totals since the manager was made.")
        .def_ro("lookups", &BlockManagerStats::lookups)
        .def_ro("lookup_tokens", &BlockManagerStats::lookup_tokens)
        .def_ro("device_hit_tokens", &BlockManagerStats::device_hit_tokens)
        .def_ro("allocation_failures", &BlockManagerStats::allocation_failures);
    nb::class_<BlockManager>(
        module, "BlockManager",
        "The device blocks of the requests of one scheduler.\n\n"
        "``live`` are the requests between match and end by id, a dictionary that the caller keeps. With\n"
        "``follow_*`` the manager keeps what write policies need to know until ``take_followed``. Raises\n"
        "RequestStateError for requests in another state; nothing is changed then.")
        .def(
            "__init__",
            [](BlockManager *self, Tier &tier, std::int64_t block_size, const nb::bytes &fingerprint,
               std::int64_t lookahead, bool caches_prefixes, bool follow_stored, bool follow_evicted,
               bool follow_owners, std::uint32_t follow_hits) {
                const BlockKeys keys{block_size, digest_of<HashingError>("fingerprint", fingerprint),
                                     lookahead};
                new (self) BlockManager(tier, keys, caches_prefixes,
                                        {follow_stored, follow_evicted, follow_owners, follow_hits});
            },
            "tier"_a, "block_size"_a, "fingerprint"_a, "lookahead"_a = 0, "caches_prefixes"_a = true,
            "follow_stored"_a = false, "follow_evicted"_a = false, "follow_owners"_a = false,
            "follow_hits"_a = 0, nb::keep_alive<1, 2>())
        .def(
            "prepare",
            [](const BlockManager &self, PythonRequest &request) { bind_request(self, request, true); },
            "request"_a,
            "Hash the tokens of a request, without the GIL, unless they are. Any thread may call. Raises\n"
            "HashingError for tokens that cannot be hashed.")
        .def(
            "change_fingerprint",
            [](BlockManager &self, const nb::bytes &fingerprint) {
                self.change_fingerprint(digest_of<HashingError>("fingerprint", fingerprint));
            },
            "fingerprint"_a, "Hash with another layout from now on. Live requests publish no more.")
        .def("stop_publishing", &BlockManager::stop_publishing,
             "Let live requests keep their blocks and publish no more.")
        .def(
            "publishes",
            [](const BlockManager &self, const PythonRequest &request) { return self.publishes(request); },
            "request"_a)
        .def(
            "owns", [](const BlockManager &self, const PythonRequest &request) { return self.owns(request); },
            "request"_a, "Return True between the request's match and its end.")
        .def("check_match", &check_match, "requests"_a, "live"_a,
             "Check that the requests can be matched, and hash those that are not yet.")
        .def(
            "matchable",
            [](const BlockManager &self, const PythonRequest &request) { return self.matchable(request); },
            "request"_a,
            "How many leading blocks a match may find: not the last token's, nor any above the request's\n"
            "limit.")
        .def("match", &match, "request"_a, "limit"_a, "live"_a,
             "Pin the leading run of the first ``limit`` blocks of a request that ``check_match`` has seen.\n"
             "Return True if the block after the run is on its way to the device.")
        .def(
            "match_all",
            [](BlockManager &self, const RequestSequence &requests, Live &live) {
                check_match(self, requests, live);
                bool pending = false;
                for (nb::handle each : requests)
                    pending |= match(self, each, self.matchable(request_of(each)), live);
                return pending;
            },
            "requests"_a, "live"_a,
            "``check_match`` and ``match`` all requests as far as they may be. Return True if a block after\n"
            "some run is on its way to the device.")
        .def(
            "match_more",
            [](BlockManager &self, PythonRequest &request, std::size_t limit) {
                return self.match_more(request, limit);
            },
            "request"_a, "limit"_a, "Pin blocks that came to the device after the match; as ``match``.")
        .def(
            "shorten",
            [](BlockManager &self, PythonRequest &request, std::size_t limit) {
                return self.shorten(request, limit);
            },
            "request"_a, "limit"_a, "Shorten a match to ``limit`` blocks.")
        .def(
            "accept",
            [](BlockManager &self, PythonRequest &request, std::size_t blocks) {
                self.accept(request, blocks);
            },
            "request"_a, "blocks"_a, "Count ``blocks`` as found, some of them still to be loaded.")
        .def(
            "check_allocate",
            [](const BlockManager &self, const PythonRequest &request, std::uint64_t num_tokens) {
                self.check_allocate(request, num_tokens);
            },
            "request"_a, "num_tokens"_a)
        .def(
            "allocate",
            [](BlockManager &self, PythonRequest &request, std::uint64_t num_tokens) {
                return self.allocate(request, num_tokens);
            },
            "request"_a, "num_tokens"_a,
            "Extend the block table to ``num_tokens`` tokens. Return how many blocks are missing; none is\n"
            "added unless that is 0.")
        .def(
            "reserve_copies",
            [](BlockManager &self, PythonRequest &request, const HashesIn &parents, const HashesIn &hashes) {
                require_equal(parents.shape(0), hashes.shape(0));
                return self.reserve_copies(request, digests_of(parents), digests_of(hashes));
            },
            "request"_a, "parents"_a, "hashes"_a,
            "Extend the block table by slots for copies of the next blocks.")
        .def(
            "count_hits", [](BlockManager &self, PythonRequest &request) { return self.count_hits(request); },
            "request"_a, "Count the look-up and the device hits of a request, once; return False later.")
        .def(
            "take_added",
            [](BlockManager &self, PythonRequest &request) {
                const auto [first, last] = self.take_added(request);
                return table_rows(request, first, last);
            },
            "request"_a, nb::rv_policy::automatic, "Return the slots added since the match or the last call.")
        .def(
            "commit",
            [](BlockManager &self, const std::vector<std::pair<nb::object, std::int64_t>> &progress) {
                for (const auto &[request, tokens] : progress) self.check_commit(request_of(request), tokens);
                for (const auto &[request, tokens] : progress)
                    self.commit(request_of(request), static_cast<std::uint64_t>(tokens));
            },
            "progress"_a, "Publish the full blocks of the first tokens of each (request, number of tokens).")
        .def("advance", &advance, "requests"_a, "tokens"_a, "uncomputed_tokens"_a = 1, "grow"_a = true,
             "Append tokens, extend the block tables and publish full blocks: a whole decode step.")
        .def(
            "end_load",
            [](BlockManager &self, PythonRequest &request, std::uint32_t copied, std::uint32_t planned) {
                self.end_load(request, copied, planned);
            },
            "request"_a, "copied"_a, "planned"_a,
            "Count the leading blocks of a load that were copied; publish what waited for all of them.")
        .def("release", &end<&BlockManager::release>, "request"_a, "live"_a,
             "Release every block of a live request; return False if it is not live.")
        .def("finish", &end<&BlockManager::finish>, "request"_a, "live"_a,
             "As ``release``, at the end of a request: the eviction order learns how its blocks were used.")
        .def(
            "forget_hits", [](BlockManager &self, PythonRequest &request) { self.forget_hits(request); },
            "request"_a, "Let the next match of the request count as another hit.")
        .def_prop_ro("has_followed", &BlockManager::has_followed, "True if ``take_followed`` has something.")
        .def("take_followed", &take_followed,
             nb::sig("def take_followed(self) -> tuple[numpy.typing.NDArray[numpy.uint8] | None, "
                     "numpy.typing.NDArray[numpy.uint8] | None, BlockList | None, list[tuple[bytes, str]]]"),
             "Return hashes stored, hashes that reached ``follow_hits``, blocks evicted, and (first block,\n"
             "tenant) of requests that published; forget them.")
        .def_prop_ro("stats", &BlockManager::stats);
}

}  // namespace

void bind_scheduler(nb::module_ &module) {
    nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const RequestStateError &error) {
            PyErr_SetString(nb::module_::import_("fdcache.errors").attr("RequestStateError").ptr(),
                            error.what());
        }
    });
    bind_request_state(module);
    bind_advance_result(module);
    bind_block_manager(module);
}

}  // namespace fdcache
