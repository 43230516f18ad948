// Segmented LRU with ghosts: blocks that were used twice outlive those that were used once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tier/ghosts.hpp"
#include "tier/leaf_order.hpp"

namespace fdcache {

// A block that is used again, or comes back soon after its eviction, is *protected*. The protected block that
// was used longest ago loses that place while they are more than their share of the tier.
class SlruOrder final : public LeafOrder {
  public:
    bool learns() const override { return true; }
    void arrive(std::span<const Slot> path, std::span<const Digest> digests, std::uint32_t depth) override;
    void leave(Slot slot, const Digest &digest, bool evicted) override;
    void use(std::span<const Slot> path, const RequestEnd *end) override;
    void prefetch(Slot, const Digest &digest) const override { ghosts_.prefetch(digest); }
    void resize(std::uint32_t slots) override;
    void clear() override;
    std::size_t bytes() const override;

  private:
    static constexpr double kShare = 0.8;         // of the slots, for protected blocks
    static constexpr double kFirst = 1ull << 52;  // rank above that of every block which is not protected

    struct Block {
        std::uint64_t ticket = 0;  // of the last use; 0: none since it arrived
        Slot previous = kNoSlot;   // in the list of protected blocks
        Slot next = kNoSlot;
        bool is_known = false;  // used, now or when it was an entry before
        bool is_protected = false;
    };

    void rank(std::span<const Slot> slots, std::span<double> ranks) const override;
    void before_add(Slot slot) override;
    void touch(Slot slot);
    void protect(Slot slot);
    void unprotect(Slot slot);
    void demote();

    Ghosts ghosts_;
    LargeVector<Block> blocks_;
    std::uint64_t ticket_ = 0;
    std::uint32_t protected_ = 0;
    Slot oldest_ = kNoSlot;
    Slot newest_ = kNoSlot;
};

}  // namespace fdcache
