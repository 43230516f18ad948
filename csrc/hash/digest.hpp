// A 256-bit block hash: the key of every tier.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace fdcache {

struct Digest {
    std::array<std::uint8_t, 32> bytes{};

    // In the registers: the default one calls memcmp, at each look-up.
    friend bool operator==(const Digest &a, const Digest &b) {
        return ((a.word(0) ^ b.word(0)) | (a.word(1) ^ b.word(1)) | (a.word(2) ^ b.word(2)) |
                (a.word(3) ^ b.word(3))) == 0;
    }

    bool is_zero() const { return (word(0) | word(1) | word(2) | word(3)) == 0; }
    bool is_unknown() const { return (word(0) & word(1) & word(2) & word(3)) == ~std::uint64_t{0}; }
    // The parent of a block without one in its tier: that of the beginning of a prompt, or an unknown one.
    bool is_no_block() const { return is_zero() || is_unknown(); }

    // The key of another record of the same page: see `record_keys` of fdcache/groups.py.
    Digest marked(std::uint8_t mark) const {
        Digest digest = *this;
        for (std::uint8_t &byte : digest.bytes) byte ^= mark;
        return digest;
    }

    // Stands for the parent of a run of which nobody has told what precedes it.
    static Digest unknown() {
        Digest digest;
        digest.bytes.fill(0xff);
        return digest;
    }

    // Any word of a digest is uniformly distributed, so it serves as a table hash.
    std::uint64_t word(std::size_t index) const {
        std::uint64_t value;
        std::memcpy(&value, bytes.data() + 8 * index, sizeof value);
        return value;
    }
};

static_assert(sizeof(Digest) == 32);

// For unordered containers keyed by digests.
struct DigestHash {
    std::size_t operator()(const Digest &digest) const { return digest.word(0); }
};

}  // namespace fdcache
