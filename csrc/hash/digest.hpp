// A 256-bit block hash: the key of every tier.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace fdcache {

struct Digest {
    std::array<std::uint8_t, 32> bytes{};

    friend bool operator==(const Digest &, const Digest &) = default;

    bool is_zero() const { return *this == Digest{}; }

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
