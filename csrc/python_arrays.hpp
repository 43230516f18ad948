// Arrays in and out for calls that come once a step: they run as little code as possible, because after a
// pause all of it has to be fetched from memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "bindings.hpp"

namespace fdcache {

// A read-only NumPy array over the values in a bytes object; with `Digest`, uint8 of shape (n, 32).
template <typename T, typename Out = T>
nb::object array_over(nb::handle memory, std::size_t count) {
    static PyObject *const type = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
    static PyObject *const dtype = [] {
        constexpr bool is_digest = std::is_same_v<T, Digest>;
        const std::string name =
            (std::is_signed_v<Out> ? "int" : "uint") + std::to_string(is_digest ? 8 : 8 * sizeof(Out));
        return nb::module_::import_("numpy").attr("dtype")(name.c_str()).release().ptr();
    }();
    nb::object shape = nb::int_(count);
    if constexpr (std::is_same_v<T, Digest>) shape = nb::make_tuple(shape, sizeof(Digest));
    PyObject *const arguments[] = {shape.ptr(), dtype, memory.ptr()};
    nb::object array = nb::steal(PyObject_Vectorcall(type, arguments, 3, nullptr));
    if (!array.is_valid()) nb::raise_python_error();
    return array;
}

// One with a copy of these values.
template <typename T, typename Out = T>
nb::object copied_array(std::span<const T> values) {
    return array_over<T, Out>(nb::bytes(values.data(), values.size_bytes()), values.size());
}

// The values of a contiguous, one-dimensional array of the CPU, while this exists; with `Digest`, the rows of
// one of uint8 with shape (n, 32).
template <typename T>
class ArrayValues {
  public:
    explicit ArrayValues(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT))
            nb::raise_python_error();
        constexpr bool is_digest = std::is_same_v<T, Digest>;
        constexpr std::string_view formats = is_digest ? "B" : std::is_signed_v<T> ? "bhilq" : "BHILQ";
        const bool has_shape = is_digest
                                   ? view_.ndim == 2 && view_.shape[1] == sizeof(T) && view_.itemsize == 1
                                   : view_.ndim == 1 && view_.itemsize == sizeof(T);
        const bool is_same = has_shape && view_.format &&
                             formats.find(view_.format[0]) != std::string_view::npos && !view_.format[1];
        if (is_same) return;
        PyBuffer_Release(&view_);
        throw nb::type_error("expected an array of another type");
    }
    ArrayValues(const ArrayValues &) = delete;
    ArrayValues &operator=(const ArrayValues &) = delete;
    ~ArrayValues() { PyBuffer_Release(&view_); }

    std::span<const T> span() const {
        return {static_cast<const T *>(view_.buf), static_cast<std::size_t>(view_.len) / sizeof(T)};
    }

  private:
    Py_buffer view_{};
};

}  // namespace fdcache
