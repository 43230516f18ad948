#include "hash/sha256.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define FDCACHE_X86 1
#endif

namespace fdcache::sha256 {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as little-endian and swapped");

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(64) constexpr std::uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// One 32-bit word of each of `Lanes` messages; the compiler maps it to the vectors the target has.
template <std::size_t Lanes>
struct WordVector {
    using type __attribute__((vector_size(4 * Lanes))) = std::uint32_t;
};

template <>
struct WordVector<1> {
    using type = std::uint32_t;
};

#define FDCACHE_INLINE inline __attribute__((always_inline))
// The lane functions are always inlined, so that no vector is ever passed by a calling convention.
#pragma GCC diagnostic ignored "-Wpsabi"

template <typename Word>
FDCACHE_INLINE Word rotate_right(const Word &x, int n) {
    return (x >> n) | (x << (32 - n));
}

FDCACHE_INLINE std::uint32_t load_word(const std::uint8_t *data) {
    std::uint32_t word;
    std::memcpy(&word, data, sizeof word);
    return __builtin_bswap32(word);
}

// FIPS 180-4, 6.2.2, on `Lanes` messages at once: one chunk of lane l at data[l].
template <std::size_t Lanes>
FDCACHE_INLINE void compress_lanes(State *states, const std::uint8_t *data, std::size_t stride) {
    using Word = typename WordVector<Lanes>::type;
    Word schedule[16];
    Word variables[8];
    if constexpr (Lanes == 1) {
        for (int t = 0; t < 16; ++t) schedule[t] = load_word(data + 4 * t);
        for (int v = 0; v < 8; ++v) variables[v] = states[0][v];
    } else {
        for (int t = 0; t < 16; ++t)
            for (std::size_t lane = 0; lane < Lanes; ++lane)
                schedule[t][lane] = load_word(data + lane * stride + 4 * t);
        for (int v = 0; v < 8; ++v)
            for (std::size_t lane = 0; lane < Lanes; ++lane) variables[v][lane] = states[lane][v];
    }
    auto [a, b, c, d, e, f, g, h] = variables;
    // Sixteen rounds a turn: all 64 unrolled are too much code to stay beside a caller's other loops.
#pragma GCC unroll 1
    for (int turn = 0; turn < 64; turn += 16) {
        if (turn > 0) {
#pragma GCC unroll 16
            for (int t = 0; t < 16; ++t) {
                const Word w15 = schedule[(t + 1) & 15], w2 = schedule[(t + 14) & 15];
                schedule[t] += (rotate_right(w15, 7) ^ rotate_right(w15, 18) ^ (w15 >> 3)) +
                               schedule[(t + 9) & 15] +
                               (rotate_right(w2, 17) ^ rotate_right(w2, 19) ^ (w2 >> 10));
            }
        }
#pragma GCC unroll 16
        for (int t = 0; t < 16; ++t) {
            const Word t1 = h + (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25)) +
                            (g ^ (e & (f ^ g))) + round_constants[turn + t] + schedule[t];
            const Word t2 =
                (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22)) + ((a & b) | (c & (a | b)));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
    }
    const Word result[8] = {a, b, c, d, e, f, g, h};
    for (int v = 0; v < 8; ++v) {
        if constexpr (Lanes == 1)
            states[0][v] += result[v];
        else
            for (std::size_t lane = 0; lane < Lanes; ++lane) states[lane][v] += result[v][lane];
    }
}

void compress_portable(State &state, const std::uint8_t *data, std::size_t chunks) {
    for (; chunks > 0; --chunks, data += chunk_bytes) compress_lanes<1>(&state, data, 0);
}

template <std::size_t Lanes>
FDCACHE_INLINE void compress_groups(std::span<State> states, const std::uint8_t *data, std::size_t stride,
                                    std::size_t chunks) {
    std::size_t i = 0;
    for (; i + Lanes <= states.size(); i += Lanes)
        for (std::size_t chunk = 0; chunk < chunks; ++chunk)
            compress_lanes<Lanes>(&states[i], data + i * stride + chunk * chunk_bytes, stride);
    for (; i < states.size(); ++i) compress_portable(states[i], data + i * stride, chunks);
}

void compress_many_portable(std::span<State> states, const std::uint8_t *data, std::size_t stride,
                            std::size_t chunks) {
    compress_groups<4>(states, data, stride, chunks);
}

#ifdef FDCACHE_X86

__attribute__((target("avx2"))) void compress_many_avx2(std::span<State> states, const std::uint8_t *data,
                                                        std::size_t stride, std::size_t chunks) {
    compress_groups<8>(states, data, stride, chunks);
}

#define FDCACHE_SHA_TARGET __attribute__((target("sha,sse4.1,ssse3")))

// The SHA extensions keep the working variables as (a, b, e, f) and (c, d, g, h), high word first. A round
// instruction waits four cycles for the one before it but two can be in flight, hence `Lanes` messages at
// once.
template <std::size_t Lanes>
FDCACHE_SHA_TARGET FDCACHE_INLINE void compress_sha(std::array<State *, Lanes> states,
                                                    std::array<const std::uint8_t *, Lanes> data,
                                                    std::size_t chunks) {
    const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef[Lanes], cdgh[Lanes];
    for (std::size_t lane = 0; lane < Lanes; ++lane) {
        const auto *words = reinterpret_cast<const __m128i *>(states[lane]->data());
        const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1);
        const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
        abef[lane] = _mm_alignr_epi8(badc, hgfe, 8);
        cdgh[lane] = _mm_blend_epi16(hgfe, badc, 0xf0);
    }
    for (; chunks > 0; --chunks) {
        __m128i schedule[Lanes][4], abef_before[Lanes], cdgh_before[Lanes];
        for (std::size_t lane = 0; lane < Lanes; ++lane) {
            abef_before[lane] = abef[lane];
            cdgh_before[lane] = cdgh[lane];
        }
#pragma GCC unroll 16
        for (int quad = 0; quad < 16; ++quad) {
            const __m128i constants =
                _mm_load_si128(reinterpret_cast<const __m128i *>(round_constants + 4 * quad));
#pragma GCC unroll 2
            for (std::size_t lane = 0; lane < Lanes; ++lane) {
                __m128i(&w)[4] = schedule[lane];
                __m128i &now = w[quad & 3];
                if (quad < 4) {
                    const auto *chunk = reinterpret_cast<const __m128i *>(data[lane]);
                    now = _mm_shuffle_epi8(_mm_loadu_si128(chunk + quad), byte_swap);
                } else {
                    const __m128i last = w[(quad + 3) & 3];
                    now = _mm_sha256msg1_epu32(now, w[(quad + 1) & 3]);
                    now = _mm_add_epi32(now, _mm_alignr_epi8(last, w[(quad + 2) & 3], 4));
                    now = _mm_sha256msg2_epu32(now, last);
                }
                const __m128i sum = _mm_add_epi32(now, constants);
                cdgh[lane] = _mm_sha256rnds2_epu32(cdgh[lane], abef[lane], sum);
                abef[lane] = _mm_sha256rnds2_epu32(abef[lane], cdgh[lane], _mm_shuffle_epi32(sum, 0x0e));
            }
        }
        for (std::size_t lane = 0; lane < Lanes; ++lane) {
            abef[lane] = _mm_add_epi32(abef[lane], abef_before[lane]);
            cdgh[lane] = _mm_add_epi32(cdgh[lane], cdgh_before[lane]);
            data[lane] += chunk_bytes;
        }
    }
    for (std::size_t lane = 0; lane < Lanes; ++lane) {
        auto *words = reinterpret_cast<__m128i *>(states[lane]->data());
        const __m128i feba = _mm_shuffle_epi32(abef[lane], 0x1b);
        const __m128i dchg = _mm_shuffle_epi32(cdgh[lane], 0xb1);
        _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xf0));
        _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
    }
}

FDCACHE_SHA_TARGET void compress_one_sha(State &state, const std::uint8_t *data, std::size_t chunks) {
    compress_sha<1>({&state}, {data}, chunks);
}

FDCACHE_SHA_TARGET void compress_many_sha(std::span<State> states, const std::uint8_t *data,
                                          std::size_t stride, std::size_t chunks) {
    std::size_t i = 0;
    for (; i + 2 <= states.size(); i += 2) {
        const std::uint8_t *message = data + i * stride;
        compress_sha<2>({&states[i], &states[i + 1]}, {message, message + stride}, chunks);
    }
    if (i < states.size()) compress_one_sha(states[i], data + i * stride, chunks);
}

bool has_sha_instructions() {
    unsigned eax, ebx = 0, ecx, edx;
    const bool sha = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx >> 29 & 1);
    return sha && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
}

#endif

std::vector<Backend> find_backends() {
    std::vector<Backend> found;
#ifdef FDCACHE_X86
    if (has_sha_instructions()) found.push_back({"sha", compress_one_sha, compress_many_sha});
    if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", compress_portable, compress_many_avx2});
#endif
    found.push_back({"portable", compress_portable, compress_many_portable});
    return found;
}

}  // namespace

std::span<const Backend> backends() {
    static const std::vector<Backend> found = find_backends();
    return found;
}

Digest finish(const Backend &backend, State state, std::span<const std::uint8_t> tail,
              std::uint64_t total_bytes) {
    const std::size_t whole = tail.size() / chunk_bytes;
    if (whole > 0) backend.compress(state, tail.data(), whole);
    const auto rest = tail.subspan(whole * chunk_bytes);
    std::array<std::uint8_t, 2 * chunk_bytes> padded{};
    std::copy(rest.begin(), rest.end(), padded.begin());
    padded[rest.size()] = 0x80;
    const std::size_t chunks = rest.size() + 9 > chunk_bytes ? 2 : 1;
    const std::uint64_t bits = __builtin_bswap64(total_bytes * 8);
    std::memcpy(padded.data() + chunks * chunk_bytes - 8, &bits, 8);
    backend.compress(state, padded.data(), chunks);
    Digest result;
    for (std::size_t word = 0; word < 8; ++word) {
        const std::uint32_t big_endian = __builtin_bswap32(state[word]);
        std::memcpy(result.bytes.data() + 4 * word, &big_endian, 4);
    }
    return result;
}

Digest digest(const Backend &backend, std::span<const std::uint8_t> message) {
    return finish(backend, initial_state, message, message.size());
}

}  // namespace fdcache::sha256
