// The header of a slot outside the device, the same in arenas and slab files (docs/format-record.md).
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>

#include "hash/checksum.hpp"
#include "hash/digest.hpp"

namespace fdcache {

enum class HeaderState : std::uint16_t { kEmpty = 0, kWriting = 1, kReady = 2 };

struct SlotHeader {
    static constexpr std::uint32_t kMagic = 0x4C534446;  // "FDSL"
    static constexpr std::uint16_t kVersion = 2;

    std::uint32_t magic = 0;
    std::uint16_t version = 0;
    HeaderState state = HeaderState::kEmpty;
    std::uint32_t generation = 0;
    std::uint32_t reserved = 0;
    std::uint64_t payload_bytes = 0;
    std::uint64_t payload_checksum = 0;
    Digest hash{};
    Digest parent{};
    std::array<std::uint8_t, 16> fingerprint{};
    std::uint64_t written_ms = 0;  // in a slab file: since 1970; in an arena: 0
    std::uint64_t header_checksum = 0;

    friend bool operator==(const SlotHeader &, const SlotHeader &) = default;

    std::uint64_t computed_checksum() const {
        constexpr std::size_t kCovered = 120;
        std::uint8_t bytes[kCovered];
        std::memcpy(bytes, this, kCovered);
        return finish_checksum(checksum_part(bytes, kCovered, 0), kCovered);
    }

    // True if magic, version and header checksum are right.
    bool is_valid() const {
        return magic == kMagic && version == kVersion && header_checksum == computed_checksum();
    }

    // True for an intact header of an earlier version. Its hashes are of another kind, so no block has its
    // key.
    bool is_outdated() const {
        return magic == kMagic && version < kVersion && header_checksum == computed_checksum();
    }

    // Sets magic, version and header checksum.
    void seal() {
        magic = kMagic;
        version = kVersion;
        header_checksum = computed_checksum();
    }
};

static_assert(sizeof(SlotHeader) == 128);

// Other threads and processes read and write headers at the same time. This needs no lock: single words are
// never torn, and a header of mixed words fails its checksum.
inline SlotHeader load_header(const SlotHeader *shared) {
    std::array<std::uint64_t, sizeof(SlotHeader) / 8> words;
    const auto *from = reinterpret_cast<const std::uint64_t *>(shared);
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
    return std::bit_cast<SlotHeader>(words);
}

inline void store_header(SlotHeader *shared, const SlotHeader &header) {
    const auto words = std::bit_cast<std::array<std::uint64_t, sizeof(SlotHeader) / 8>>(header);
    auto *to = reinterpret_cast<std::uint64_t *>(shared);
    for (std::size_t i = 0; i < words.size(); ++i) __atomic_store_n(to + i, words[i], __ATOMIC_RELAXED);
}

}  // namespace fdcache
