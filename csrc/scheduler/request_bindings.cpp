#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "scheduler/block_manager.hpp"
#include "scheduler/described.hpp"
#include "scheduler/python_loads.hpp"
#include "scheduler/python_request.hpp"

namespace fdcache {
namespace {

// For messages: any text, lone surrogates too.
std::string text_of(const nb::str &value) {
    const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(value.ptr(), "utf-8", "backslashreplace"));
    if (!bytes.is_valid()) nb::raise_python_error();
    return {PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
}

}  // namespace

PythonRequest::PythonRequest(nb::str id, nb::object prompt, std::size_t prompt_tokens,
                             std::optional<std::string> tenant, ExtraKeys extra_keys)
    : RequestState(text_of(id), prompt_tokens, std::move(tenant), std::move(extra_keys)),
      request_id(std::move(id)),
      prompt(std::move(prompt)) {}

std::uint64_t count_of(const std::string &name, nb::handle value) {
    const auto number = nb::steal(PyNumber_Index(value.ptr()));
    const unsigned long long count = number.is_valid() ? PyLong_AsUnsignedLongLong(number.ptr()) : 0;
    if (!PyErr_Occurred()) return count;
    PyErr_Clear();
    throw RequestStateError(name + " has to be an int from 0 to 2**64 - 1, got " + nb::repr(value).c_str());
}

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

SlotRow table_rows(const RequestState &request, std::size_t first, std::size_t last) {
    const auto &table = request.table();
    return SlotRow(table.data() + first, {last - first}, keeper(table.share()));
}

namespace {

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

std::optional<std::uint64_t> cached_limit(nb::handle value) {
    if (value.is_none()) return std::nullopt;
    return count_of("max_cached_tokens", value);
}

void bind_request_state(nb::module_ &module) {
    nb::class_<PythonRequest>(module, "RequestState", nb::type_slots(request_slots),
                              "Tokens, block hashes and device blocks of one request: the state that\n"
                              "``fdcache.manager.Request`` documents.")
        .def(
            "__init__",
            [](PythonRequest *self, nb::str request_id, nb::object prompt,
               const std::optional<nb::bytes> &tenant, const std::optional<ExtraKeys> &extra_keys,
               bool use_cache, bool device_only, nb::handle max_cached_tokens) {
                const std::size_t count = nb::len(prompt);
                std::optional<std::string> name;
                if (tenant) name.emplace(tenant->c_str(), tenant->size());
                new (self) PythonRequest(std::move(request_id), std::move(prompt), count, std::move(name),
                                         extra_keys ? *extra_keys : ExtraKeys());
                self->use_cache = use_cache;
                self->device_only = device_only;
                self->max_cached_tokens = cached_limit(max_cached_tokens);
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
        .def_prop_rw(
            "max_cached_tokens", [](const PythonRequest &self) { return self.max_cached_tokens; },
            [](PythonRequest &self, nb::handle value) { self.max_cached_tokens = cached_limit(value); },
            nb::for_setter(nb::sig("def max_cached_tokens(self, value: int | None, /) -> None")))
        .def_prop_ro("is_loading", &PythonRequest::is_loading,
                     "True from the planning of a load to the ``LoadOutcome`` of ``CacheManager.apply``.")
        .def_prop_ro(
            "load", [](const PythonRequest &self) { return self.load() ? self.load()->number : 0; },
            "Number of the load that the request waits for, by which its outcome names it; 0 for none.")
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

void bind_described_blocks(nb::module_ &module) {
    nb::class_<DescribedBlocks>(
        module, "DescribedBlocks",
        "Blocks of requests that were described to another process, up to ``capacity``; older\n"
        "ones are described again.")
        .def(nb::init<std::size_t>(), "capacity"_a)
        .def(
            "describe",
            [](DescribedBlocks &self, nb::handle requests) {
                const Requests given = requests_of(requests);
                nb::list runs;
                for (std::size_t i = 0; i < given.all.size(); ++i) {
                    const PythonRequest &request = *given.all[i];
                    if (!request.is_bound()) continue;
                    const auto &blocks = request.blocks();
                    const std::span<const Digest> path(blocks.hashes().data(), request.num_hashes());
                    const std::size_t first = self.add(path), size = blocks.block_size();
                    if (first == path.size()) continue;
                    runs.append(nb::make_tuple(
                        i, first, first ? digest_to_bytes(path[first - 1]) : nb::bytes("", 0),
                        nb::bytes(path[first].bytes.data(), sizeof(Digest) * (path.size() - first)),
                        nb::bytes(blocks.tokens().data() + first * size,
                                  sizeof(std::int32_t) * size * (path.size() - first))));
                }
                return runs;
            },
            "requests"_a,
            nb::sig("def describe(self, requests: collections.abc.Sequence[RequestState])"
                    " -> list[tuple[int, int, bytes, bytes, bytes]]"),
            "Return for each request with blocks that were not described: its position, its first such "
            "block,\n"
            "the hash of the one before it or nothing, and hashes and tokens of all from there on.")
        .def("clear", &DescribedBlocks::clear, "Forget all.");
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

}  // namespace

void bind_scheduler(nb::module_ &module) {
    nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        const auto raise = [](const char *name, const std::exception &error) {
            PyErr_SetString(nb::module_::import_("fdcache.errors").attr(name).ptr(), error.what());
        };
        try {
            std::rethrow_exception(thrown);
        } catch (const RequestStateError &error) {
            raise("RequestStateError", error);
        } catch (const BrokenPromise &error) {
            raise("IntegrityError", error);
        }
    });
    bind_request_state(module);
    bind_described_blocks(module);
    bind_advance_result(module);
    bind_loads(module);
    bind_block_manager(module);
    bind_plan_reports(module);
}

}  // namespace fdcache
