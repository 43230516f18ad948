// Tokens as Python gives them: an int, a sequence of ints, or a one-dimensional int32 or int64 buffer.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace fdcache {

// The int at `position` of the caller's tokens. Throws HashingError naming the position.
std::int32_t token_from(PyObject *value, Py_ssize_t position);

// Reads all tokens to where `allocate(count)` says. Throws HashingError for what is not tokens, naming the
// first that does not fit an int32; what was written by then is garbage.
void read_tokens(nanobind::handle tokens, const std::function<std::int32_t *(std::size_t)> &allocate);

}  // namespace fdcache
