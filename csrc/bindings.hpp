// Shared by all bindings: arrays in and out without copies, digests, argument checks.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hash/digest.hpp"

namespace fdcache {

namespace nb = nanobind;
using namespace nb::literals;

// Arguments: contiguous arrays of the CPU. HashesIn has shape (n, 32).
template <typename T>
using VectorIn = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HashesIn = nb::ndarray<const std::uint8_t, nb::shape<-1, 32>, nb::c_contig, nb::device::cpu>;
// Results: NumPy arrays. HashesOut has shape (n, 32).
template <typename T>
using VectorOut = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
using HashesOut = nb::ndarray<nb::numpy, std::uint8_t, nb::shape<-1, 32>>;
using HashesView = nb::ndarray<nb::numpy, const std::uint8_t, nb::shape<-1, 32>>;

template <typename T>
std::span<const T> span_of(const VectorIn<T> &values) {
    return {values.data(), values.shape(0)};
}

// Slots are int32 in Python and uint32 here.
inline std::span<const std::uint32_t> slots_of(const VectorIn<std::int32_t> &slots) {
    return {reinterpret_cast<const std::uint32_t *>(slots.data()), slots.shape(0)};
}

inline std::span<const Digest> digests_of(const HashesIn &hashes) {
    return {reinterpret_cast<const Digest *>(hashes.data()), hashes.shape(0)};
}

// A capsule that owns the vector, which stays where it is.
template <typename T>
std::pair<T *, nb::capsule> own(std::vector<T> &&values) {
    auto owned = std::make_unique<std::vector<T>>(std::move(values));
    nb::capsule owner(owned.get(), [](void *pointer) noexcept {
        std::unique_ptr<std::vector<T>>(static_cast<std::vector<T> *>(pointer));
    });
    return {owned.release()->data(), std::move(owner)};
}

// An array that owns the vector's memory. `T` has the size of `Out`: slots are int32 in Python.
template <typename Out, typename T>
VectorOut<Out> to_numpy(std::vector<T> &&values) {
    static_assert(sizeof(T) == sizeof(Out));
    const std::size_t count = values.size();
    auto [data, owner] = own(std::move(values));
    return VectorOut<Out>(reinterpret_cast<Out *>(data), {count}, owner);
}

inline HashesOut hashes_to_numpy(std::vector<Digest> &&digests) {
    const std::size_t count = digests.size();
    auto [data, owner] = own(std::move(digests));
    return HashesOut(reinterpret_cast<std::uint8_t *>(data), {count, sizeof(Digest)}, owner);
}

// The bytes of a vector of enumerators or numbers.
template <typename T>
nb::bytes vector_to_bytes(const std::vector<T> &values) {
    return nb::bytes(reinterpret_cast<const char *>(values.data()), values.size() * sizeof(T));
}

// Throws Error naming the argument unless `value` has 32 bytes.
template <typename Error = std::invalid_argument>
Digest digest_of(const char *argument, const nb::bytes &value) {
    Digest digest;
    if (value.size() != sizeof digest)
        throw Error(std::string(argument) + " must have 32 bytes, got " + std::to_string(value.size()));
    std::memcpy(digest.bytes.data(), value.data(), sizeof digest);
    return digest;
}

inline nb::bytes digest_to_bytes(const Digest &digest) {
    return nb::bytes(digest.bytes.data(), sizeof digest);
}

// The first 16 bytes, which headers carry. Throws std::invalid_argument if there are fewer.
inline std::array<std::uint8_t, 16> fingerprint_of(const nb::bytes &value) {
    std::array<std::uint8_t, 16> prefix;
    if (value.size() < prefix.size()) throw std::invalid_argument("fingerprint must have at least 16 bytes");
    std::memcpy(prefix.data(), value.c_str(), prefix.size());
    return prefix;
}

// Throws std::invalid_argument unless parallel arrays have the same length.
inline void require_equal(std::size_t left, std::size_t right) {
    if (left != right) throw std::invalid_argument("parallel arrays differ in length");
}

// Throws nb::index_error for a slot that is not one of `num_blocks`.
inline void require_slots(std::span<const std::int32_t> slots, std::int32_t num_blocks) {
    if (std::ranges::any_of(slots, [&](auto slot) { return slot < 0 || slot >= num_blocks; }))
        throw nb::index_error("slot out of range");
}

// Each adds one concept to the module; defined beside the concept.
void bind_hashing(nb::module_ &module);
void bind_presence(nb::module_ &module);
void bind_shared_host(nb::module_ &module);
void bind_tier_results(nb::module_ &module);
void bind_tier(nb::module_ &module);
void bind_scheduler(nb::module_ &module);
void bind_plans(nb::module_ &module);
void bind_ledger(nb::module_ &module);
void bind_copy_out(nb::module_ &module);
void bind_records(nb::module_ &module);
void bind_transfers(nb::module_ &module);
void bind_copies(nb::module_ &module);
void bind_plane_copies(nb::module_ &module);
void bind_slab(nb::module_ &module);
void bind_swap_plan(nb::module_ &module);
void bind_cuda(nb::module_ &module);
void bind_pattern(nb::module_ &module);

}  // namespace fdcache
