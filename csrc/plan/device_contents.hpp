// The known blocks of a device cache that an engine owns, by device block. Nothing here holds one: the engine
// says which ones it gives away.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "hash/digest.hpp"

namespace fdcache {

// The number of a device block. `kNoBlock` stands for one that the engine does not have any more.
using DeviceBlock = std::int32_t;
constexpr DeviceBlock kNoBlock = -1;

// The blocks of one request on the device, growing at the end: the block with `hashes[i]` lies in `ids[i]`.
struct DevicePath {
    // Appends blocks, which have as many ids as hashes.
    void extend(std::span<const Digest> more_hashes, std::span<const DeviceBlock> more_ids);
    // Of the block at a position. Zero: it is the root; nothing: it is unknown.
    std::optional<Digest> parent_of(std::size_t i) const;

    std::optional<Digest> parent;  // of the first block
    std::vector<Digest> hashes;
    std::vector<DeviceBlock> ids;
};

// Blocks `start` to `stop` of a path, whose request has counted as a hit of those before `counted` already.
struct Offer {
    std::shared_ptr<const DevicePath> path;
    std::size_t start, stop, counted;
};

class DeviceContents {
  public:
    struct Block {
        Digest hash, parent;
        std::shared_ptr<const DevicePath> path;
        std::uint32_t depth = 0;    // position in the path
        std::uint32_t hits = 0;     // requests that have offered the block
        std::uint64_t read_by = 0;  // the last plan that copies out of the device block
        std::uint64_t listed = 0;   // the last round that it was listed in
        bool is_known = false;
        bool is_queued = false;   // for a copy
        bool is_dropped = false;  // it was counted as one that the host had no room for
    };

    DeviceContents() = default;
    DeviceContents(DeviceContents &&) = default;

    // Number of device blocks that were offered at any time.
    std::size_t num_blocks() const { return num_blocks_; }
    std::size_t num_known() const;

    // Of a device block that was seen.
    Block &operator[](DeviceBlock id) {
        const auto i = static_cast<std::size_t>(id);
        return (*parts_[i / kPart])[i % kPart];
    }
    const Block &operator[](DeviceBlock id) const { return const_cast<DeviceContents &>(*this)[id]; }

    // Enters offered blocks and returns their device blocks, each once.
    std::vector<DeviceBlock> add(std::span<const Offer> offers);
    // The device blocks whose content is known, each once, in order. Others may be unknown or never seen.
    std::vector<DeviceBlock> known_of(std::span<const DeviceBlock> ids);
    bool has_seen(DeviceBlock id) const {
        const std::size_t part = static_cast<std::size_t>(id) / kPart;
        return part < parts_.size() && parts_[part];
    }
    // These device blocks have another content now.
    void forget(std::span<const DeviceBlock> ids);
    // Copies in flight still read the device blocks.
    void forget_all();
    // The device blocks of a block's path above it, parents first, from below the last one that has left.
    std::vector<DeviceBlock> ancestors(DeviceBlock id) const;

  private:
    // An engine may offer any number: a large one takes a table of 4 MiB at most, and one part.
    static constexpr std::size_t kPart = 4096;
    using Part = std::array<Block, kPart>;

    void enter(const Offer &offer, std::vector<DeviceBlock> &entered);
    Block &seen(DeviceBlock id);
    bool is_first(Block &block) const { return std::exchange(block.listed, round_) != round_; }

    std::vector<std::unique_ptr<Part>> parts_;
    std::size_t num_blocks_ = 0;
    std::uint64_t round_ = 0;
};

}  // namespace fdcache
