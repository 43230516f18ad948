// The compression function of SHA-256 (FIPS 180-4), by which keys are chained.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hash/digest.hpp"
#include "hash/lanes.hpp"

namespace fdcache::sha256 {

inline constexpr std::size_t piece_bytes = 64;

// Compressions in a row: key i + 1 is that of key i and the 64 bytes of piece i.
struct Links {
    const Digest *first;         // key 0
    const std::uint8_t *pieces;  // of `count` links
    Digest *out;                 // keys 1 to `count`
    std::size_t count;
};

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(64) inline constexpr std::uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// FIPS 180-4, 6.2.2, in plain words.
void link_portable(const Links &links);

using Quad = lanes::Words<4>;

FDCACHE_INLINE Quad swap_bytes(Quad words) {
    using Bytes = lanes::Vector<4>::Bytes;
    const auto bytes = (Bytes)words;
    return (Quad)__builtin_shufflevector(bytes, bytes, 3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12);
}

#if defined(__x86_64__)

// The state between rounds, by the SHA instructions, without a requirement on the target of the calling
// function. They keep it as (f, e, b, a) and (h, g, d, c), low word first.
struct State {
    Quad abef, cdgh;

    FDCACHE_INLINE explicit State(const Digest &key) {
        const Quad abcd = swap_bytes(lanes::load<Quad>(key.bytes.data()));
        const Quad efgh = swap_bytes(lanes::load<Quad>(key.bytes.data() + 16));
        abef = __builtin_shufflevector(abcd, efgh, 5, 4, 1, 0);
        cdgh = __builtin_shufflevector(abcd, efgh, 7, 6, 3, 2);
    }

    FDCACHE_INLINE void four_rounds(const Quad &words) {
        two_rounds(cdgh, abef, words);
        two_rounds(abef, cdgh, __builtin_shufflevector(words, words, 2, 3, 2, 3));
    }

    FDCACHE_INLINE void add(const State &other) {
        abef += other.abef;
        cdgh += other.cdgh;
    }

    FDCACHE_INLINE void store(std::uint8_t *out) const {
        lanes::store(out, swap_bytes(__builtin_shufflevector(abef, cdgh, 3, 2, 7, 6)));
        lanes::store(out + 16, swap_bytes(__builtin_shufflevector(abef, cdgh, 1, 0, 5, 4)));
    }

  private:
    FDCACHE_INLINE static void two_rounds(Quad &cdgh, const Quad &abef, const Quad &words) {
        asm("sha256rnds2 %%xmm0, %1, %0" : "+x"(cdgh) : "x"(abef), "Yz"(words));
    }
};

FDCACHE_INLINE Quad next_words(Quad w0, const Quad &w1, const Quad &w2, const Quad &w3) {
    asm("sha256msg1 %1, %0" : "+x"(w0) : "x"(w1));
    w0 += __builtin_shufflevector(w2, w3, 1, 2, 3, 4);
    asm("sha256msg2 %1, %0" : "+x"(w0) : "x"(w3));
    return w0;
}

#elif defined(__aarch64__)

// The state between rounds, by the SHA instructions, without a requirement on the target of the calling
// function.
struct State {
    Quad abcd, efgh;

    FDCACHE_INLINE explicit State(const Digest &key)
        : abcd(swap_bytes(lanes::load<Quad>(key.bytes.data()))),
          efgh(swap_bytes(lanes::load<Quad>(key.bytes.data() + 16))) {}

    FDCACHE_INLINE void four_rounds(const Quad &words) {
        const Quad before = abcd;
        asm(".arch_extension sha2\n\tsha256h %q0, %q1, %2.4s" : "+w"(abcd) : "w"(efgh), "w"(words));
        asm(".arch_extension sha2\n\tsha256h2 %q0, %q1, %2.4s" : "+w"(efgh) : "w"(before), "w"(words));
    }

    FDCACHE_INLINE void add(const State &other) {
        abcd += other.abcd;
        efgh += other.efgh;
    }

    FDCACHE_INLINE void store(std::uint8_t *out) const {
        lanes::store(out, swap_bytes(abcd));
        lanes::store(out + 16, swap_bytes(efgh));
    }
};

FDCACHE_INLINE Quad next_words(Quad w0, const Quad &w1, const Quad &w2, const Quad &w3) {
    asm(".arch_extension sha2\n\tsha256su0 %0.4s, %1.4s" : "+w"(w0) : "w"(w1));
    asm(".arch_extension sha2\n\tsha256su1 %0.4s, %1.4s, %2.4s" : "+w"(w0) : "w"(w2), "w"(w3));
    return w0;
}

#endif

#if defined(__x86_64__) || defined(__aarch64__)

// Links with the SHA instructions, a quarter of a compression (16 rounds) at a time. A round waits four
// cycles for the one before it, so other work fits between.
class Chain {
  public:
    FDCACHE_INLINE explicit Chain(const Links &links)
        : piece_(links.pieces), out_(links.out), state_(*links.first), before_(state_) {}

    // Steps 0 to 15 are four links.
    template <int Step>
    FDCACHE_INLINE void step() {
        constexpr int quarter = Step % 4;
        if constexpr (quarter == 0) before_ = state_;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            if constexpr (quarter == 0)
                words_[i] = swap_bytes(lanes::load<Quad>(piece_ + 16 * i));
            else
                words_[i] =
                    next_words(words_[i], words_[(i + 1) & 3], words_[(i + 2) & 3], words_[(i + 3) & 3]);
            state_.four_rounds(words_[i] + lanes::load<Quad>(round_constants + 16 * quarter + 4 * i));
        }
        if constexpr (quarter == 3) finish();
    }

  private:
    FDCACHE_INLINE void finish() {
        state_.add(before_);
        state_.store(out_->bytes.data());
        ++out_;
        piece_ += piece_bytes;
    }

    const std::uint8_t *piece_;
    Digest *out_;
    State state_, before_;
    Quad words_[4];
};

FDCACHE_INLINE void link_with_instructions(const Links &links) {
    if (links.count == 0) return;
    Chain chain(links);
    for (std::size_t i = 0; i < links.count; ++i) {
        chain.step<0>();
        chain.step<1>();
        chain.step<2>();
        chain.step<3>();
    }
}

#endif

}  // namespace fdcache::sha256
