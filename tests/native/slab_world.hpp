// A slab file in memory, and host records to move to and from it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "slab/slab_file.hpp"

namespace fdcache::tests {

inline const SlabLimits kNoLimits{std::chrono::steady_clock::time_point::max(), nullptr};

inline bool is_none(SlabFault fault) {
    return fault == SlabFault::kNone;
}

// Records of a page, with a gap between two parts and one at the end.
class SlabWorld {
  public:
    static constexpr std::size_t kRecordBytes = 4096;
    static constexpr std::size_t kPayloadBytes = 900;

    SlabWorld(std::uint32_t slots, unsigned threads);
    ~SlabWorld();
    SlabWorld(const SlabWorld &) = delete;
    SlabWorld &operator=(const SlabWorld &) = delete;

    const SlabShape &shape() const { return shape_; }
    SlabFile &file() { return *file_; }
    int descriptor() const { return descriptor_; }
    // Opens the same bytes with a new object, which knows no slot yet.
    void reopen();

  private:
    SlabShape shape_;
    unsigned threads_;
    int descriptor_;
    std::unique_ptr<SlabFile> file_;
};

// Record i has the content of a seed, which gives its hash, too.
class SlabRecords {
  public:
    SlabRecords(const SlabWorld &world, std::uint32_t count);

    void fill(std::uint32_t i, std::uint32_t seed);
    bool has(std::uint32_t i, std::uint32_t seed) const;
    // Forgets the bytes, not the hashes.
    void clear();
    // Record i for `slots[i]`, with this generation of the slot.
    std::vector<SlabBlock> blocks(std::span<const std::uint32_t> slots, std::uint32_t generation);

  private:
    static constexpr std::uint32_t kHostGeneration = 7;

    std::uint8_t *record(std::uint32_t i) { return bytes_.data() + i * SlabWorld::kRecordBytes; }
    static std::vector<std::uint8_t> content(const SlabShape &shape, std::uint32_t seed);

    const SlabShape shape_;
    std::vector<std::uint8_t> bytes_;
    std::vector<SlotHeader> headers_;
    std::vector<Digest> hashes_;
};

}  // namespace fdcache::tests
