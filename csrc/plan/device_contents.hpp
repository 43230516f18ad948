// The known blocks of a device cache that an engine owns, by device block. Nothing here holds one: the engine
// says which ones it gives away.
#pragma once

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
        bool is_known = false;
        bool is_queued = false;   // for a copy
        bool is_dropped = false;  // it was counted as one that the host had no room for
    };

    // Number of device blocks that there is room for: all that were offered at any time have it.
    std::size_t num_blocks() const { return blocks_.size(); }
    std::size_t num_known() const;

    Block &operator[](DeviceBlock id) { return blocks_[static_cast<std::size_t>(id)]; }
    const Block &operator[](DeviceBlock id) const { return blocks_[static_cast<std::size_t>(id)]; }

    // Enters offered blocks and returns their device blocks, each once.
    std::vector<DeviceBlock> add(std::span<const Offer> offers);
    // The device blocks whose content is known, each once, in order. Others may be unknown or never seen.
    std::vector<DeviceBlock> known_of(std::span<const DeviceBlock> ids);
    bool has_seen(DeviceBlock id) const { return static_cast<std::size_t>(id) < blocks_.size(); }
    // These device blocks have another content now.
    void forget(std::span<const DeviceBlock> ids);
    // Copies in flight still read the device blocks.
    void forget_all();
    // The device blocks of a block's path above it, parents first, from below the last one that has left.
    std::vector<DeviceBlock> ancestors(DeviceBlock id) const;

  private:
    void enter(const Offer &offer, std::vector<DeviceBlock> &entered);
    void grow(const Offer &offer);
    bool is_first(DeviceBlock id) {
        return std::exchange(last_[static_cast<std::size_t>(id)], round_) != round_;
    }

    std::vector<Block> blocks_;
    std::vector<std::uint64_t> last_;  // by device block: the round that it was listed in
    std::uint64_t round_ = 0;
};

}  // namespace fdcache
