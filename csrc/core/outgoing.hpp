// Copies into a tier of another process: the slots granted for them, and what the tier's table does not show
// yet.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/digest.hpp"
#include "core/presence.hpp"
#include "core/tier.hpp"

namespace fdcache {

// A block that is copied is pending. Once it has arrived it is ready here, until the tier has answered: from
// then on its table speaks for it.
class OutgoingCopies {
  public:
    explicit OutgoingCopies(PresenceTable table) : table_(table) {}

    // The stock: slots to copy into, used in the order granted.
    void grant(std::span<const Slot> slots, std::span<const std::uint32_t> generations);
    // Gives up those slots of the stock that are `first` or above.
    std::vector<Slot> give_up_stock(Slot first);
    std::size_t stock() const;

    std::vector<Presence> contains(std::span<const Digest> hashes) const;
    std::size_t run(std::span<const Digest> path, std::size_t start) const { return table_.run(path, start); }
    // As Tier::reserve_copies, out of the stock; `missing` is what it lacks, and nothing is taken then.
    CopyReservation reserve(std::span<const Digest> parents, std::span<const Digest> hashes);

    struct Ended {
        std::vector<Digest> parents, hashes;
    };
    // Copies into reserved slots have ended. `told`: the tier will hear of it, and answer.
    Ended end(std::span<const Slot> slots, std::span<const std::uint8_t> copied, bool told);
    void answered(std::span<const Digest> hashes);
    // No answer will come.
    void forget_answers();
    std::size_t under_way() const;

  private:
    struct Granted {
        Slot slot;
        std::uint32_t generation;
        friend auto operator<=>(const Granted &, const Granted &) = default;
    };
    struct Target {
        Digest parent, hash;
    };
    struct DigestHash {
        std::size_t operator()(const Digest &digest) const { return digest.word(0); }
    };

    Presence presence(const Digest &hash) const;

    mutable std::mutex mutex_;
    PresenceTable table_;
    std::deque<Granted> stock_;
    std::unordered_map<Slot, Target> targets_;
    std::unordered_map<Digest, Presence, DigestHash> state_;
};

}  // namespace fdcache
