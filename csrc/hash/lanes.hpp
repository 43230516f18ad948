// Vectors of 32-bit words, one word of each of several messages: the messages are hashed side by side.
//
// All functions are always inlined, so the vectors are those of the instruction set for which the calling
// function is compiled, and no vector is passed by a calling convention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// A sanitizer's checks of every word take compilers minutes here. The callers' memory is checked where it is
// laid out.
#define FDCACHE_UNSANITIZED __attribute__((no_sanitize("address", "undefined", "thread")))
#define FDCACHE_INLINE inline __attribute__((always_inline)) FDCACHE_UNSANITIZED
#pragma GCC diagnostic ignored "-Wpsabi"

namespace fdcache::lanes {

template <std::size_t Lanes>
struct Vector {
    typedef std::uint32_t Words __attribute__((vector_size(4 * Lanes)));
    typedef std::uint64_t Pairs __attribute__((vector_size(4 * Lanes)));
    typedef std::uint8_t Bytes __attribute__((vector_size(4 * Lanes)));
};

template <std::size_t Lanes>
using Words = typename Vector<Lanes>::Words;

template <std::size_t Lanes>
FDCACHE_INLINE Words<Lanes> all(std::uint32_t word) {
    return Words<Lanes>{} + word;
}

template <int Bits, typename W>
FDCACHE_INLINE W rotate_right(const W &x) {
    return (x >> Bits) | (x << (32 - Bits));
}

template <typename W>
FDCACHE_INLINE W load(const void *from) {
    W value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename W>
FDCACHE_INLINE void store(void *to, const W &value) {
    std::memcpy(to, &value, sizeof value);
}

// The 16 bytes at `offset` of row r, then those of row r + 4.
template <std::size_t Lanes>
FDCACHE_INLINE Words<Lanes> load_quarter(const std::uint8_t *const *rows, std::size_t offset) {
    const auto first = load<Words<4>>(rows[0] + offset);
    if constexpr (Lanes == 4)
        return first;
    else
        return __builtin_shufflevector(first, load<Words<4>>(rows[4] + offset), 0, 1, 2, 3, 4, 5, 6, 7);
}

// Transposes the 4 x 4 words in each 16 bytes of four vectors.
template <std::size_t Lanes>
FDCACHE_INLINE void transpose(Words<Lanes> *rows) {
    using Pairs = typename Vector<Lanes>::Pairs;
    Words<Lanes> mixed[4];
    for (int i = 0; i < 2; ++i) {
        const Words<Lanes> a = rows[2 * i], b = rows[2 * i + 1];
        if constexpr (Lanes == 4) {
            mixed[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            mixed[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        } else {
            mixed[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
            mixed[2 * i + 1] = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
        }
    }
    for (int i = 0; i < 2; ++i) {
        const auto a = (Pairs)mixed[i], b = (Pairs)mixed[2 + i];
        if constexpr (Lanes == 4) {
            rows[2 * i] = (Words<Lanes>)__builtin_shufflevector(a, b, 0, 2);
            rows[2 * i + 1] = (Words<Lanes>)__builtin_shufflevector(a, b, 1, 3);
        } else {
            rows[2 * i] = (Words<Lanes>)__builtin_shufflevector(a, b, 0, 4, 2, 6);
            rows[2 * i + 1] = (Words<Lanes>)__builtin_shufflevector(a, b, 1, 5, 3, 7);
        }
    }
}

}  // namespace fdcache::lanes
