// The blocks of a device cache by slot, as those see them who copy them to the host.
//
// `Tier` implements it for a device cache of the scheduler, `DeviceContents` for one that an engine owns and
// tells of. The engine may overwrite any slot: nothing there is held, and the steps that overwrite one wait
// for the plans that read it. Callers hold the manager's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tier/block_list.hpp"

namespace fdcache {

class DeviceIndex {
  public:
    virtual ~DeviceIndex() = default;

    // Number of slots that may have blocks.
    virtual std::uint32_t num_slots() const = 0;
    // The blocks in these slots, in this order. Slots without a block are left out.
    virtual BlockList entries_in(std::span<const Slot> slots) const = 0;
    // The blocks on the device above `blocks[i]` for each i in `which`, each once, parents first: their
    // parents, and at most `levels` blocks above these. `blocks` themselves may just have been evicted.
    virtual BlockList above(const BlockList &blocks, std::span<const std::size_t> which,
                            std::uint32_t levels) const = 0;
    // Position of a block in its path.
    virtual std::uint32_t depth(Slot slot) const = 0;
    // The next `count` blocks to be evicted, in order, as far as they are known.
    virtual BlockList coldest(std::uint32_t count) const = 0;
    // The slots of blocks that came since the last call. Nothing if others say which blocks came.
    virtual std::vector<Slot> take_offered() { return {}; }
    // Forgets what others have told of the blocks. Nothing if nobody tells.
    virtual void forget_told() {}

    // Starts and ends copies out of slots.
    virtual void hold(std::span<const Slot> slots) = 0;
    virtual void unhold(std::span<const Slot> slots) = 0;
    // How many slots copies may keep from requests.
    virtual std::size_t most_held() const = 0;
};

}  // namespace fdcache
