// Requests as Python has them, and what the bindings of their manager share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "bindings.hpp"
#include "hash/python_tokens.hpp"
#include "scheduler/block_manager.hpp"

namespace fdcache {

using SlotRow = nb::ndarray<nb::numpy, const std::int32_t, nb::ndim<1>>;

// A request as Python sees it. `prompt` is what the caller gave; it is read once, and not freed in a step.
struct PythonRequest : RequestState {
    PythonRequest(nb::str id, nb::object prompt, std::size_t prompt_tokens, std::optional<std::string> tenant,
                  ExtraKeys extra_keys);

    nb::str request_id;
    nb::object prompt;
};

// The requests of a list or tuple, which keeps them alive.
struct Requests {
    nb::object sequence;
    std::vector<PythonRequest *> all;
};

// Throws nb::type_error.
PythonRequest &request_of(nb::handle value);
Requests requests_of(nb::handle values);

// The number of tokens or blocks that `value` is. Throws RequestStateError naming it for anything but an int
// from 0 to 2^64 - 1.
std::uint64_t count_of(const std::string &name, nb::handle value);

// Slots `first` to `last` of the block table.
SlotRow table_rows(const RequestState &request, std::size_t first, std::size_t last);

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

StepTokens step_tokens(nb::handle values);

// A native object that uses others, which have to outlive it. The garbage collector sees them, because they
// may be part of a cycle.
template <typename T>
struct WithParts : T {
    using T::T;

    std::vector<nb::object> parts;
};
using PythonBlockManager = WithParts<BlockManager>;

template <typename T>
nb::type_slots traversed() {
    static PyType_Slot slots[] = {
        {Py_tp_traverse, reinterpret_cast<void *>(+[](PyObject *self, visitproc visit, void *arg) {
             Py_VISIT(Py_TYPE(self));
             if (nb::inst_ready(self))
                 for (const nb::object &part : nb::inst_ptr<T>(self)->parts) Py_VISIT(part.ptr());
             return 0;
         })},
        {0, nullptr}};
    return nb::type_slots(slots);
}

void bind_block_manager(nb::module_ &module);
void bind_plan_reports(nb::module_ &module);

}  // namespace fdcache
