// The known blocks of a device cache that an engine owns, by device block. Nothing here holds one: the engine
// says which ones it gives away, and the step that overwrites one waits for the plans that read it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "hash/digest.hpp"
#include "tier/device_index.hpp"

namespace fdcache {

// The blocks of one request on the device, growing at the end: the block with `hashes[i]` lies in `slots[i]`,
// `kNoSlot` if the engine does not have it any more.
struct DevicePath {
    // Appends blocks, which have as many slots as hashes.
    void extend(std::span<const Digest> more_hashes, std::span<const Slot> more_slots);
    // Of the block at a position. Zero: it is the root; nothing: it is unknown.
    std::optional<Digest> parent_of(std::size_t i) const;

    std::optional<Digest> parent;  // of the first block
    std::vector<Digest> hashes;
    std::vector<Slot> slots;
};

class DeviceContents : public DeviceIndex {
  public:
    DeviceContents() = default;
    DeviceContents(DeviceContents &&) = default;

    // Number of device blocks whose content is known.
    std::size_t num_known() const;
    bool has_offers() const { return !offers_.empty() || !entered_.empty(); }

    // Takes an offer of the blocks of a path from `start` on, whose request has counted as a hit of those
    // before `counted`. Offers are looked at together, once they matter.
    void offered(const std::shared_ptr<const DevicePath> &path, std::size_t start, std::size_t counted);
    // These device blocks have another content now.
    void forget(std::span<const Slot> slots);
    // Forgets these blocks, and all below them, wherever they lie.
    void drop(std::span<const Digest> hashes);
    // Copies in flight still read the device blocks.
    void forget_told() override;
    // Which blocks the engine gives away next, coldest first.
    void next_evicted(std::span<const Slot> slots);
    // Notes which device blocks a plan reads.
    void sent(std::uint64_t plan, std::span<const Slot> slots);
    // The plans in flight that read these device blocks, ascending.
    std::vector<std::uint64_t> readers(std::span<const Slot> slots,
                                       const std::function<bool(std::uint64_t)> &is_in_flight);

    // Number of device blocks that were offered at any time.
    std::uint32_t num_slots() const override { return num_slots_; }
    BlockList entries_in(std::span<const Slot> slots) const override;
    BlockList above(const BlockList &blocks, std::span<const std::size_t> which,
                    std::uint32_t levels) const override;
    std::uint32_t depth(Slot slot) const override { return find(slot)->depth; }
    BlockList coldest(std::uint32_t count) const override;
    std::vector<Slot> take_offered() override;
    void hold(std::span<const Slot>) override {}
    void unhold(std::span<const Slot>) override {}
    std::size_t most_held() const override { return SIZE_MAX; }

  private:
    struct Block {
        Digest hash, parent;
        std::shared_ptr<const DevicePath> path;  // null: the content is unknown
        std::uint32_t depth = 0;                 // position in the path
        std::uint32_t hits = 0;                  // requests that have offered the block
        std::uint32_t generation = 0;            // number of the content
        std::uint64_t read_by = 0;               // the last plan that copies out of the device block
    };
    // Blocks `start` to `stop` of a path.
    struct Offer {
        std::shared_ptr<const DevicePath> path;
        std::size_t start, stop, counted;
    };
    // An engine may offer any number: a large one takes a table of 4 MiB at most, and one part.
    static constexpr std::size_t kPart = 4096;
    using Part = std::array<Block, kPart>;

    void enter_offers();
    void enter(const Offer &offer);
    Block &made(Slot slot);
    // Null for one that was never offered.
    Block *find(Slot slot) const;
    bool is_known(Slot slot) const { return slot < is_known_.size() && is_known_[slot]; }
    // Null without a known content.
    const Block *known(Slot slot) const { return is_known(slot) ? find(slot) : nullptr; }
    static void append(BlockList &list, Slot slot, const Block &block);

    std::vector<std::unique_ptr<Part>> parts_;
    // By slot, 1: its block has a path. Most slots that are given away have none: one byte of each is read.
    std::vector<std::uint8_t> is_known_;
    std::uint32_t num_slots_ = 0;
    std::vector<Offer> offers_;
    std::vector<Slot> entered_;
    std::vector<std::pair<Slot, std::uint32_t>> coldest_;  // with the generation
    std::vector<std::uint64_t> reading_;                   // plans that read the device and may be in flight
};

}  // namespace fdcache
