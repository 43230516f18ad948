// Copies into the tier of another process: the slots granted for them, and the blocks that the tier's
// presence table does not show yet.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "hash/digest.hpp"
#include "tier/block_list.hpp"
#include "tier/presence.hpp"

namespace fdcache {

// A block in flight is pending. Once copied it is ready here until the tier acknowledges it; from then on the
// tier's table is the source of truth.
class OutgoingCopies {
  public:
    explicit OutgoingCopies(PresenceTable table) : table_(table) {}

    // Adds slots to the stock, from which copies take theirs.
    void grant(std::span<const Slot> slots, std::span<const std::uint32_t> generations);
    // Removes and returns the slots of the stock from `first` on.
    std::vector<Slot> give_up_stock(Slot first);
    std::size_t stock() const;
    // Slots of the whole tier, as the service has told last.
    std::atomic<std::size_t> tier_slots = 0;
    // The most slots that one reservation since the last call has asked for.
    std::size_t take_asked();

    std::vector<Presence> contains(std::span<const Digest> hashes) const;
    // A bit for each of up to 64 blocks that is not absent.
    std::uint64_t holds(std::span<const Digest *const> hashes) const;
    // About how many blocks the tier's table shows.
    std::size_t blocks() const { return table_.estimated_size(); }
    // As HostIndex::reserve: takes slots from the stock.
    CopyReservation reserve(std::span<const Digest> parents, std::span<const Digest> hashes,
                            bool below_pending = false);

    struct Ended {
        std::vector<Digest> parents, hashes;
    };
    // Ends copies into reserved slots. `reported`: the tier gets a report and will acknowledge it.
    Ended end(std::span<const Slot> slots, std::span<const std::uint8_t> copied, bool reported);
    void acknowledge(std::span<const Digest> hashes);
    // Forgets pending acknowledgements: none will come.
    void drop_unacknowledged();
    std::size_t in_flight() const;

  private:
    struct Granted {
        Slot slot;
        std::uint32_t generation;
        friend auto operator<=>(const Granted &, const Granted &) = default;
    };
    struct Target {
        Digest parent, hash;
    };

    Presence presence(const Digest &hash) const;

    mutable std::mutex mutex_;
    PresenceTable table_;
    std::deque<Granted> stock_;
    std::size_t asked_ = 0;
    std::unordered_map<Slot, Target> targets_;
    std::unordered_map<Digest, Presence, DigestHash> state_;
};

}  // namespace fdcache
