#include "hash/checksum.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "hash/vector_clones.hpp"

namespace fdcache {
namespace {

static_assert(std::endian::native == std::endian::little, "records are little-endian");

constexpr std::uint64_t kPosition = 0x9E3779B97F4A7C15ULL;
constexpr std::uint64_t kFirst = 0xD6E8FEB86659FD93ULL;
constexpr std::uint64_t kSecond = 0xFF51AFD7ED558CCDULL;
constexpr std::uint64_t kLength = 0xC4CEB9FE1A85EC53ULL;
constexpr std::size_t kChunkBytes = 8192;

// A bijection. With one multiplication less, two flipped top bits cancel once in 2^23 pairs of words.
inline std::uint64_t mix(std::uint64_t word) {
    word ^= word >> 32;
    word *= kFirst;
    word ^= word >> 29;
    word *= kSecond;
    word ^= word >> 32;
    return word;
}

FDCACHE_VECTOR_CLONES std::uint64_t sum_words(const std::uint8_t *data, std::size_t words,
                                              std::uint64_t key) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < words; ++i) {
        std::uint64_t word;
        std::memcpy(&word, data + 8 * i, sizeof word);
        sum += mix(word + key);
        key += kPosition;
    }
    return sum;
}

}  // namespace

std::uint64_t checksum_part(const std::uint8_t *data, std::size_t nbytes, std::uint64_t first_word) {
    const std::size_t words = nbytes / 8;
    std::uint64_t sum = sum_words(data, words, kPosition * (first_word + 1));
    if (const std::size_t tail = nbytes % 8; tail != 0) {
        std::uint64_t word = 0;
        std::memcpy(&word, data + 8 * words, tail);
        sum += mix(word + kPosition * (first_word + words + 1));
    }
    return sum;
}

std::uint64_t copy_with_checksum(std::uint8_t *target, const std::uint8_t *source, std::size_t nbytes,
                                 std::uint64_t first_word) {
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < nbytes; at += kChunkBytes) {
        const std::size_t chunk = std::min(kChunkBytes, nbytes - at);
        std::memcpy(target + at, source + at, chunk);
        // Sum the copy, not the source: later checks read the record.
        sum += checksum_part(target + at, chunk, first_word + at / 8);
    }
    return sum;
}

std::uint64_t finish_checksum(std::uint64_t sum, std::uint64_t payload_bytes) {
    return mix(sum + kLength * (payload_bytes + 1));
}

}  // namespace fdcache
