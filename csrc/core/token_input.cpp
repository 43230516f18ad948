#include "core/token_input.hpp"

#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "core/block_hash.hpp"

namespace nb = nanobind;

namespace fdcache {
namespace {

using Allocate = std::function<std::int32_t *(std::size_t)>;

[[noreturn]] void refuse(Py_ssize_t position, nb::handle value, const char *why) {
    throw HashingError("tokens[" + std::to_string(position) + "] is " + nb::repr(value).c_str() + ": " + why);
}

template <typename Int>
std::int32_t narrow(Int value, Py_ssize_t position) {
    const auto token = static_cast<std::int32_t>(value);
    if (token != value) refuse(position, nb::int_(value), "a token must fit a 32-bit signed integer");
    return token;
}

// Anything with __index__, such as a NumPy integer; kept apart so that plain ints stay fast.
std::int32_t token_from_index(PyObject *value, Py_ssize_t position) {
    if (PyBool_Check(value) || !PyIndex_Check(value)) refuse(position, value, "a token must be an integer");
    const nb::object keep = nb::borrow(value);
    const nb::object index = nb::steal(PyNumber_Index(value));
    if (!index.is_valid()) nb::raise_python_error();
    int overflow;
    const long number = PyLong_AsLongAndOverflow(index.ptr(), &overflow);
    if (overflow) refuse(position, index, "a token must fit a 32-bit signed integer");
    return narrow(number, position);
}

template <typename Int>
void narrow_all(const Py_buffer &buffer, const Allocate &allocate) {
    const Py_ssize_t size = buffer.ndim == 0 ? 1 : buffer.shape[0];
    const Py_ssize_t stride = buffer.ndim == 0 ? 0 : buffer.strides[0];
    const auto *data = static_cast<const std::uint8_t *>(buffer.buf);
    std::int32_t *out = allocate(static_cast<std::size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
        Int value;
        std::memcpy(&value, data + i * stride, sizeof value);
        out[i] = narrow(value, i);
    }
}

bool is_signed_integer(const Py_buffer &buffer) {
    std::string_view format = buffer.format ? buffer.format : "B";
    if (format.starts_with('<') || format.starts_with('=') || format.starts_with('@'))
        format.remove_prefix(1);
    return (format == "i" || format == "l" || format == "q") &&
           (buffer.itemsize == 4 || buffer.itemsize == 8);
}

void read_buffer(nb::handle tokens, const Allocate &allocate) {
    const auto release = [](Py_buffer *buffer) { PyBuffer_Release(buffer); };
    Py_buffer buffer;
    if (PyObject_GetBuffer(tokens.ptr(), &buffer, PyBUF_RECORDS_RO)) nb::raise_python_error();
    const std::unique_ptr<Py_buffer, decltype(release)> guard(&buffer);
    if (buffer.ndim > 1 || !is_signed_integer(buffer))
        throw HashingError("tokens must be a one-dimensional int32 or int64 array, got " +
                           std::to_string(buffer.ndim) + " dimensions of format '" +
                           (buffer.format ? buffer.format : "B") + "'");
    if (buffer.itemsize == 8) return narrow_all<std::int64_t>(buffer, allocate);
    narrow_all<std::int32_t>(buffer, allocate);
}

void read_sequence(const nb::object &sequence, const Allocate &allocate) {
    PyObject *fast = sequence.ptr();
    const auto size = PySequence_Fast_GET_SIZE(fast);
    std::int32_t *out = allocate(static_cast<std::size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
        // An __index__ may run any code, even shorten the list that is being read.
        if (i >= PySequence_Fast_GET_SIZE(fast))
            throw HashingError("tokens became fewer while they were read");
        out[i] = token_from(PySequence_Fast_GET_ITEM(fast, i), i);
    }
}

}  // namespace

std::int32_t token_from(PyObject *value, Py_ssize_t position) {
    if (!PyLong_CheckExact(value)) [[unlikely]]
        return token_from_index(value, position);
#if PY_VERSION_HEX >= 0x030c0000
    const auto *number = reinterpret_cast<const PyLongObject *>(value);
    if (PyUnstable_Long_IsCompact(number)) return narrow(PyUnstable_Long_CompactValue(number), position);
#endif
    int overflow;
    const long number_or_overflow = PyLong_AsLongAndOverflow(value, &overflow);
    if (overflow) refuse(position, value, "a token must fit a 32-bit signed integer");
    return narrow(number_or_overflow, position);
}

void read_tokens(nb::handle tokens, const Allocate &allocate) {
    if (PyList_Check(tokens.ptr())) return read_sequence(nb::borrow(tokens), allocate);
    if (PyObject_CheckBuffer(tokens.ptr())) return read_buffer(tokens, allocate);
    if (!PySequence_Check(tokens.ptr()) || PyUnicode_Check(tokens.ptr()))
        throw HashingError("tokens must be an int32 or int64 array or a sequence of int, got " +
                           std::string(nb::type_name(tokens.type()).c_str()));
    const nb::object sequence = nb::steal(PySequence_Fast(tokens.ptr(), "tokens must be a sequence of int"));
    if (!sequence.is_valid()) nb::raise_python_error();
    read_sequence(sequence, allocate);
}

}  // namespace fdcache
