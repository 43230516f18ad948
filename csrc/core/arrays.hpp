// NumPy arrays in and out of the bindings, without copies.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/digest.hpp"
#include "core/eviction.hpp"

namespace fdcache {

namespace nb = nanobind;

using HashesIn = nb::ndarray<const std::uint8_t, nb::shape<-1, 32>, nb::c_contig, nb::device::cpu>;
template <typename T>
using VectorIn = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline std::span<const Digest> digests_of(const HashesIn &hashes) {
    return {reinterpret_cast<const Digest *>(hashes.data()), hashes.shape(0)};
}

template <typename T>
std::span<const T> span_of(const VectorIn<T> &values) {
    return {values.data(), values.shape(0)};
}

// Slots are int32 on the Python side.
inline std::span<const Slot> slots_of(const VectorIn<std::int32_t> &slots) {
    return {reinterpret_cast<const Slot *>(slots.data()), slots.shape(0)};
}

// A NumPy array that owns the vector's memory, seen as elements of type Out in `columns` columns (0: a
// vector).
template <typename Out, typename T>
nb::object to_numpy(std::vector<T> &&values, std::size_t columns = 0) {
    auto owned = std::make_unique<std::vector<T>>(std::move(values));
    nb::capsule owner(owned.get(), [](void *pointer) noexcept {
        std::unique_ptr<std::vector<T>>(static_cast<std::vector<T> *>(pointer));
    });
    const std::size_t count = owned->size() * sizeof(T) / sizeof(Out);
    Out *data = reinterpret_cast<Out *>(owned.release()->data());
    if (columns) return nb::cast(nb::ndarray<nb::numpy, Out>(data, {count / columns, columns}, owner));
    return nb::cast(nb::ndarray<nb::numpy, Out>(data, {count}, owner));
}

}  // namespace fdcache
