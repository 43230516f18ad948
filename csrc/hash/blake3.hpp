// BLAKE3's keyed hash of several messages side by side, each hashed as one chunk, however long
// (docs/format.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "hash/digest.hpp"
#include "hash/lanes.hpp"

namespace fdcache::blake3 {

inline constexpr std::uint32_t piece_bytes = 64;
inline constexpr std::size_t max_lanes = 8;

using Key = std::array<std::uint32_t, 8>;

// Messages of the same length of at least one byte, at most as many as the implementation has lanes.
struct Messages {
    std::size_t count, bytes;
    std::array<const Key *, 2> keys;  // of even messages, and of odd ones
    std::array<const std::uint8_t *, max_lanes>
        rows;  // each followed by zeros up to a multiple of piece_bytes
};

inline constexpr std::uint32_t initial[4] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a};
inline constexpr std::uint32_t chunk_start = 1, chunk_end = 2, is_root = 8, keyed_hash = 16;

// The words of a piece in the order in which each round takes them.
inline constexpr auto schedule = [] {
    constexpr std::uint8_t permutation[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    std::array<std::array<std::uint8_t, 16>, 7> rounds{};
    for (std::uint8_t i = 0; i < 16; ++i) rounds[0][i] = i;
    for (std::size_t round = 1; round < 7; ++round)
        for (std::size_t i = 0; i < 16; ++i) rounds[round][i] = rounds[round - 1][permutation[i]];
    return rounds;
}();

// Work to be done beside the digests. Its 16 steps are called while one piece is compressed.
struct Nothing {
    template <int Step>
    FDCACHE_INLINE void step() {}
};

template <typename W>
FDCACHE_INLINE void mix(W &a, W &b, W &c, W &d, const W &x, const W &y) {
    a = a + x + b;
    d = lanes::rotate_right<16>(d ^ a);
    c += d;
    b = lanes::rotate_right<12>(b ^ c);
    a = a + y + b;
    d = lanes::rotate_right<8>(d ^ a);
    c += d;
    b = lanes::rotate_right<7>(b ^ c);
}

template <int Round, typename W, typename Beside>
FDCACHE_INLINE void round(W *v, const W *m, Beside &beside) {
    constexpr auto &s = schedule[Round];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    beside.template step<2 * Round + 2>();
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
    beside.template step<2 * Round + 3>();
}

// Folds one piece of each message into `state`.
template <std::size_t Lanes, typename Beside>
FDCACHE_INLINE void compress(lanes::Words<Lanes> *state, const std::uint8_t *const *rows, std::size_t offset,
                             std::uint32_t bytes, std::uint32_t flags, Beside &beside) {
    using W = lanes::Words<Lanes>;
    W m[16], v[16];
#pragma GCC unroll 4
    for (std::size_t quarter = 0; quarter < 4; ++quarter) {
#pragma GCC unroll 4
        for (std::size_t row = 0; row < 4; ++row)
            m[4 * quarter + row] = lanes::load_quarter<Lanes>(rows + row, offset + 16 * quarter);
        lanes::transpose<Lanes>(m + 4 * quarter);
    }
    beside.template step<0>();
    for (int i = 0; i < 8; ++i) v[i] = state[i];
    for (int i = 0; i < 4; ++i) v[8 + i] = lanes::all<Lanes>(initial[i]);
    v[12] = v[13] = W{};
    v[14] = lanes::all<Lanes>(bytes);
    v[15] = lanes::all<Lanes>(flags);
    beside.template step<1>();
    [&]<int... Round>(std::integer_sequence<int, Round...>)
        __attribute__((always_inline)) FDCACHE_UNSANITIZED {
            (round<Round>(v, m, beside), ...);
        }(std::make_integer_sequence<int, 7>());
    for (int i = 0; i < 8; ++i) state[i] = v[i] ^ v[i + 8];
}

// Calls `compress_piece(offset, bytes, flags)` for each piece of the messages.
template <typename CompressPiece>
FDCACHE_INLINE void for_pieces(const Messages &messages, CompressPiece compress_piece) {
    const std::size_t last = (messages.bytes - 1) / piece_bytes * piece_bytes;
    for (std::size_t offset = 0; offset < last; offset += piece_bytes)
        compress_piece(offset, piece_bytes, keyed_hash | (offset == 0 ? chunk_start : 0));
    compress_piece(last, static_cast<std::uint32_t>(messages.bytes - last),
                   keyed_hash | chunk_end | is_root | (last == 0 ? chunk_start : 0));
}

// Writes the digest of each message to `out`, and bytes without meaning up to `Lanes` digests. The steps of
// `beside` run with the first piece.
template <std::size_t Lanes, typename Beside>
FDCACHE_INLINE void digest_lanes(const Messages &messages, Digest *out, Beside &beside) {
    using W = lanes::Words<Lanes>;
    W odd{};
    for (std::size_t lane = 1; lane < Lanes; lane += 2) odd[lane] = ~0u;
    W state[8];
    for (int i = 0; i < 8; ++i)
        state[i] = (lanes::all<Lanes>((*messages.keys[0])[i]) & ~odd) |
                   (lanes::all<Lanes>((*messages.keys[1])[i]) & odd);
    const std::uint8_t *rows[Lanes];
    for (std::size_t lane = 0; lane < Lanes; ++lane)
        rows[lane] = messages.rows[lane < messages.count ? lane : 0];
    Nothing nothing;
    for_pieces(messages, [&](std::size_t offset, std::uint32_t bytes, std::uint32_t flags)
                             __attribute__((always_inline)) FDCACHE_UNSANITIZED {
                                 if (offset == 0)
                                     compress<Lanes>(state, rows, offset, bytes, flags, beside);
                                 else
                                     compress<Lanes>(state, rows, offset, bytes, flags, nothing);
                             });
    lanes::transpose<Lanes>(state);
    lanes::transpose<Lanes>(state + 4);
    for (std::size_t lane = 0; lane < Lanes; ++lane) {
        std::uint8_t *to = out[lane].bytes.data();
        std::memcpy(to, reinterpret_cast<const std::uint8_t *>(&state[lane % 4]) + lane / 4 * 16, 16);
        std::memcpy(to + 16, reinterpret_cast<const std::uint8_t *>(&state[4 + lane % 4]) + lane / 4 * 16,
                    16);
    }
}

// --- two messages, which are ready sooner with the four words of a row side by side
// ---------------------------

using Rows = lanes::Words<8>;  // four words of each message

template <int A, int B, int C, int D>
FDCACHE_INLINE Rows pick(const Rows &x, const Rows &y) {
    constexpr auto second = [](int i) { return i < 4 ? i + 4 : i + 8; };
    constexpr auto first = [](int i) { return i < 4 ? i : i + 4; };
    return __builtin_shufflevector(x, y, first(A), first(B), first(C), first(D), second(A), second(B),
                                   second(C), second(D));
}

FDCACHE_INLINE Rows load_two(const std::uint8_t *even, const std::uint8_t *odd) {
    return __builtin_shufflevector(lanes::load<lanes::Words<4>>(even), lanes::load<lanes::Words<4>>(odd), 0,
                                   1, 2, 3, 4, 5, 6, 7);
}

// Folds one piece of each of two messages into the state's rows.
FDCACHE_INLINE void compress_two(Rows *state, const std::uint8_t *even, const std::uint8_t *odd,
                                 std::uint32_t bytes, std::uint32_t flags) {
    const Rows m0 = load_two(even, odd), m1 = load_two(even + 16, odd + 16);
    const Rows m2 = load_two(even + 32, odd + 32), m3 = load_two(even + 48, odd + 48);
    // The words for the columns and for the diagonals. Rows a, c and d are turned to bring the diagonals into
    // columns, because row b is the last to be ready; so the second pair starts with the fourth diagonal.
    Rows x = pick<0, 2, 4, 6>(m0, m1), y = pick<1, 3, 5, 7>(m0, m1);
    Rows z = pick<6, 0, 2, 4>(m2, m3), w = pick<7, 1, 3, 5>(m2, m3);
    Rows a = state[0], b = state[1];
    Rows c{initial[0], initial[1], initial[2], initial[3], initial[0], initial[1], initial[2], initial[3]};
    Rows d{0, 0, bytes, flags, 0, 0, bytes, flags};
#pragma GCC unroll 7
    for (int round = 0; round < 7; ++round) {
        mix(a, b, c, d, x, y);
        a = pick<3, 0, 1, 2>(a, a), d = pick<2, 3, 0, 1>(d, d), c = pick<1, 2, 3, 0>(c, c);
        mix(a, b, c, d, z, w);
        a = pick<1, 2, 3, 0>(a, a), d = pick<2, 3, 0, 1>(d, d), c = pick<3, 0, 1, 2>(c, c);
        const Rows next_x = pick<1, 5, 7, 2>(x, y);
        const Rows next_y = pick<3, 4, 0, 7>(x, pick<2, 2, 7, 7>(z, w));
        const Rows next_z = pick<0, 4, 7, 1>(w, pick<0, 0, 7, 7>(y, z));
        const Rows next_w = pick<1, 6, 7, 0>(z, pick<2, 2, 6, 2>(y, w));
        x = next_x, y = next_y, z = next_z, w = next_w;
    }
    state[0] = a ^ c;
    state[1] = b ^ d;
}

// Writes the digests of one or two messages to `out`, and bytes without meaning in place of a second one.
FDCACHE_INLINE void digest_two(const Messages &messages, Digest *out) {
    const auto *even_key = reinterpret_cast<const std::uint8_t *>(messages.keys[0]->data());
    const auto *odd_key = reinterpret_cast<const std::uint8_t *>(messages.keys[1]->data());
    Rows state[2] = {load_two(even_key, odd_key), load_two(even_key + 16, odd_key + 16)};
    const std::uint8_t *even = messages.rows[0], *odd = messages.rows[messages.count - 1];
    for_pieces(messages, [&](std::size_t offset, std::uint32_t bytes, std::uint32_t flags)
                             __attribute__((always_inline)) FDCACHE_UNSANITIZED {
                                 compress_two(state, even + offset, odd + offset, bytes, flags);
                             });
    for (int half = 0; half < 2; ++half) {
        std::memcpy(out[0].bytes.data() + 16 * half, &state[half], 16);
        std::memcpy(out[1].bytes.data() + 16 * half,
                    reinterpret_cast<const std::uint8_t *>(&state[half]) + 16, 16);
    }
}

}  // namespace fdcache::blake3
