#include "hash/sha256.hpp"

#include <bit>

namespace fdcache::sha256 {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as little-endian and swapped");

FDCACHE_INLINE std::uint32_t load_word(const std::uint8_t *data) {
    return __builtin_bswap32(lanes::load<std::uint32_t>(data));
}

}  // namespace

FDCACHE_UNSANITIZED void link_portable(const Links &links) {
    using lanes::rotate_right;
    if (links.count == 0) return;
    std::uint32_t state[8];
    for (int i = 0; i < 8; ++i) state[i] = load_word(links.first->bytes.data() + 4 * i);
    for (std::size_t link = 0; link < links.count; ++link) {
        std::uint32_t words[16];
        for (int t = 0; t < 16; ++t) words[t] = load_word(links.pieces + link * piece_bytes + 4 * t);
        auto [a, b, c, d, e, f, g, h] = state;
        // Sixteen rounds a turn: all 64 unrolled are too much code to stay beside a caller's other loops.
#pragma GCC unroll 1
        for (int turn = 0; turn < 64; turn += 16) {
            if (turn > 0) {
#pragma GCC unroll 16
                for (int t = 0; t < 16; ++t) {
                    const std::uint32_t w15 = words[(t + 1) & 15], w2 = words[(t + 14) & 15];
                    words[t] += (rotate_right<7>(w15) ^ rotate_right<18>(w15) ^ (w15 >> 3)) +
                                words[(t + 9) & 15] +
                                (rotate_right<17>(w2) ^ rotate_right<19>(w2) ^ (w2 >> 10));
                }
            }
#pragma GCC unroll 16
            for (int t = 0; t < 16; ++t) {
                const std::uint32_t t1 = h +
                                         (rotate_right<6>(e) ^ rotate_right<11>(e) ^ rotate_right<25>(e)) +
                                         (g ^ (e & (f ^ g))) + round_constants[turn + t] + words[t];
                const std::uint32_t t2 = (rotate_right<2>(a) ^ rotate_right<13>(a) ^ rotate_right<22>(a)) +
                                         ((a & b) | (c & (a | b)));
                h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
            }
        }
        const std::uint32_t result[8] = {a, b, c, d, e, f, g, h};
        for (int i = 0; i < 8; ++i) {
            state[i] += result[i];
            lanes::store(links.out[link].bytes.data() + 4 * i, __builtin_bswap32(state[i]));
        }
    }
}

}  // namespace fdcache::sha256
