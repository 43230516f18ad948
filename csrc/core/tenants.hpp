// Tenants of a tier: whose each entry is, how many entries each may have, and the order of its idle ones.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "core/eviction.hpp"

namespace fdcache {

using Tenant = std::uint32_t;

// Off, and free of cost, until a limit is set. Numbers are small: there is one record for each up to the
// largest.
class Tenants {
  public:
    static constexpr std::uint32_t kNoLimit = std::numeric_limits<std::uint32_t>::max();

    bool on() const { return on_; }

    void turn_on(std::uint32_t slots) {
        links_.resize(slots);
        on_ = true;
    }

    void set_limit(Tenant tenant, std::uint32_t most) {
        if (tenant >= owners_.size()) owners_.resize(tenant + std::size_t{1});
        owners_[tenant].most = most;
    }

    void resize(std::uint32_t slots) {
        if (on_) links_.resize(slots);
    }

    Tenant of(Slot slot) const { return on_ ? links_[slot].tenant : 0; }
    std::uint32_t entries(Tenant tenant) const {
        return tenant < owners_.size() ? owners_[tenant].entries : 0;
    }
    bool known(Tenant tenant) const { return tenant < owners_.size(); }
    bool full(Tenant tenant) const { return on_ && owners_[tenant].entries >= owners_[tenant].most; }
    std::size_t size() const { return owners_.size(); }

    // An entry appears in the table, below its parent's tenant; leaves it.
    void join(Slot slot, Tenant tenant) {
        if (!on_) return;
        links_[slot].tenant = tenant;
        ++owners_[tenant].entries;
    }

    void leave(Slot slot) {
        if (on_) --owners_[links_[slot].tenant].entries;
    }

    // An entry joins the eviction order of its tenant as it joins that of the tier; leaves it.
    void add(Slot slot) {
        if (!on_) return;
        Owner &owner = owners_[links_[slot].tenant];
        links_[slot].previous = owner.tail;
        links_[slot].next = kNoSlot;
        (owner.tail == kNoSlot ? owner.head : links_[owner.tail].next) = slot;
        owner.tail = slot;
    }

    void remove(Slot slot) {
        if (!on_) return;
        const Link &link = links_[slot];
        Owner &owner = owners_[link.tenant];
        (link.previous == kNoSlot ? owner.head : links_[link.previous].next) = link.next;
        (link.next == kNoSlot ? owner.tail : links_[link.next].previous) = link.previous;
    }

    Slot coldest(Tenant tenant) const { return owners_[tenant].head; }
    Slot after(Slot slot) const { return links_[slot].next; }

    void clear() {
        for (Owner &owner : owners_) owner = {owner.most, 0, kNoSlot, kNoSlot};
    }

    std::size_t bytes() const {
        return links_.capacity() * sizeof(Link) + owners_.capacity() * sizeof(Owner);
    }

  private:
    struct Link {
        Tenant tenant = 0;
        Slot previous = kNoSlot;
        Slot next = kNoSlot;
    };
    struct Owner {
        std::uint32_t most = kNoLimit;
        std::uint32_t entries = 0;
        Slot head = kNoSlot;
        Slot tail = kNoSlot;
    };

    std::vector<Link> links_;
    std::vector<Owner> owners_;
    bool on_ = false;
};

}  // namespace fdcache
