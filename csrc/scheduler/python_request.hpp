// Requests as Python has them, and what the bindings of their manager share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "hash/python_tokens.hpp"
#include "scheduler/request_state.hpp"

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

void bind_block_manager(nb::module_ &module);

}  // namespace fdcache
