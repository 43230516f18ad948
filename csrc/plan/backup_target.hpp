// The host tier that blocks are copied to: one of this process, or that of a service. Without a tier it is a
// service that cannot be reached: nothing is there, and there is no room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hash/digest.hpp"
#include "tier/outgoing.hpp"
#include "tier/tier.hpp"

namespace fdcache {

class BackupTarget {
  public:
    BackupTarget() = default;
    explicit BackupTarget(Tier &tier) : tier_(&tier) {}
    explicit BackupTarget(OutgoingCopies &service) : service_(&service) {}

    explicit operator bool() const { return tier_ || service_; }

    // True if slots are granted in the background: what finds no room now may find some soon.
    bool is_granted_slots() const { return service_; }
    // The longest path that there can ever be room for, as far as that is known.
    std::size_t longest_path() const { return tier_ ? tier_->num_slots() : SIZE_MAX; }
    std::vector<Presence> contains(std::span<const Digest> hashes) const {
        if (tier_) return tier_->contains(hashes);
        return service_ ? service_->contains(hashes) : std::vector(hashes.size(), Presence::kAbsent);
    }
    // Reserves slots for copies of absent blocks, also below blocks that are being copied.
    CopyReservation reserve(std::span<const Digest> parents, std::span<const Digest> hashes) {
        if (tier_) return tier_->reserve_copies(0, parents, hashes, true);
        if (service_) return service_->reserve(parents, hashes, true);
        CopyReservation none;
        none.missing = static_cast<std::uint32_t>(hashes.size());
        return none;
    }

  private:
    Tier *tier_ = nullptr;
    OutgoingCopies *service_ = nullptr;
};

}  // namespace fdcache
