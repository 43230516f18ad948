// Tokens as Python gives them, and arrays of tokens and hashes as Python gets them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "bindings.hpp"
#include "hash/block_hash.hpp"

// The types that read_tokens accepts, for signatures.
#define FDCACHE_TOKENS \
    "collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.int32 | numpy.int64] | array.array[int]"

namespace fdcache {

using AllocateTokens = std::function<std::int32_t *(std::size_t)>;
using HashRows = nb::ndarray<nb::numpy, const std::uint8_t, nb::shape<-1, 32>>;
using TokenRow = nb::ndarray<nb::numpy, const std::int32_t, nb::shape<-1>>;

// The int at `position` of the caller's tokens. Throws HashingError naming the position.
std::int32_t token_from(PyObject *value, Py_ssize_t position);
// Reads an int32 or int64 buffer or a sequence of ints into the memory that `allocate(count)` returns. Throws
// HashingError naming the first element that does not fit an int32; the memory is garbage then.
void read_tokens(nb::handle tokens, const AllocateTokens &allocate);
// Appends an int or tokens and hashes the blocks that they complete. Changes nothing if it throws.
void append_tokens(TokenBlocks &blocks, nb::handle tokens);

// A capsule that keeps `store` alive as long as an array refers to it.
template <typename T>
nb::capsule keeper(std::shared_ptr<T[]> store) {
    auto holder = std::make_unique<std::shared_ptr<T[]>>(std::move(store));
    nb::capsule capsule(holder.get(),
                        [](void *p) noexcept { delete static_cast<std::shared_ptr<T[]> *>(p); });
    holder.release();
    return capsule;
}

HashRows hash_rows(std::shared_ptr<Digest[]> store, std::size_t rows);

}  // namespace fdcache
