// Tokens as Python gives them: an int, a list or tuple of them, or an int32 or int64 buffer.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace fdcache {

// The int at `position` of the caller's tokens. Throws HashingError naming the position.
std::int32_t token_from(PyObject *value, Py_ssize_t position);

// All tokens. Throws HashingError for what is not tokens, naming the first that does not fit an int32.
std::vector<std::int32_t> read_tokens(nanobind::handle tokens);

}  // namespace fdcache
