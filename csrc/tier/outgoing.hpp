// Copies into the tier of another process: the slots granted for them, and the blocks that the tier's
// presence table does not show yet.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "hash/digest.hpp"
#include "tier/presence.hpp"
#include "tier/tier.hpp"

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

    std::vector<Presence> contains(std::span<const Digest> hashes) const;
    // A bit for each of up to 64 blocks that is not absent.
    std::uint64_t holds(std::span<const Digest *const> hashes) const;
    // About how many blocks the tier's table shows.
    std::size_t blocks() const { return table_.estimated_size(); }
    // Like Tier::reserve_copies, but takes slots from the stock. Takes none if `missing` is not 0.
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
    std::unordered_map<Slot, Target> targets_;
    std::unordered_map<Digest, Presence, DigestHash> state_;
};

}  // namespace fdcache
