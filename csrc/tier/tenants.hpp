// Tenants of a tier: the tenant of each entry, and each tenant's limit and eviction order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tier/lru_order.hpp"

namespace fdcache {

using Tenant = std::uint32_t;

// Off, and without cost, until a limit is set. Tenant numbers are small: there is a record for each number up
// to the largest.
class Tenants {
  public:
    static constexpr std::uint32_t kNoLimit = std::numeric_limits<std::uint32_t>::max();

    bool on() const { return on_; }

    void turn_on(std::uint32_t slots) {
        links_.resize(slots);
        of_.resize(slots);
        on_ = true;
    }

    void set_limit(Tenant tenant, std::uint32_t most) {
        if (tenant >= owners_.size()) owners_.resize(tenant + std::size_t{1});
        owners_[tenant].most = most;
    }

    void resize(std::uint32_t slots) {
        if (!on_) return;
        for (Owner &owner : owners_) owner.order.forget_removed(links_);
        links_.resize(slots);
        of_.resize(slots);
    }

    Tenant of(Slot slot) const { return on_ ? of_[slot] : 0; }
    std::uint32_t entries(Tenant tenant) const {
        return tenant < owners_.size() ? owners_[tenant].entries : 0;
    }
    bool known(Tenant tenant) const { return tenant < owners_.size(); }
    std::size_t size() const { return owners_.size(); }
    // Of `count` more entries those that a tenant has no room for, its evictable entries gone.
    std::uint32_t beyond(Tenant tenant, std::uint32_t count) const {
        if (!on_) return 0;
        const Owner &owner = owners_[tenant];
        const std::uint64_t would_be = std::uint64_t{owner.entries} + count - owner.order.size();
        return would_be > owner.most
                   ? static_cast<std::uint32_t>(std::min<std::uint64_t>(would_be - owner.most, count))
                   : 0;
    }
    bool full(Tenant tenant, std::uint32_t count) const {
        return on_ && std::uint64_t{owners_[tenant].entries} + count > owners_[tenant].most;
    }

    // An entry joins the table, or leaves it.
    void join(Slot slot, Tenant tenant) {
        if (!on_) return;
        of_[slot] = tenant;
        ++owners_[tenant].entries;
    }

    void leave(Slot slot) {
        if (on_) --owners_[of_[slot]].entries;
    }

    // The same changes as in the tier's eviction order.
    void add(Slot slot, bool busy) {
        if (on_) order_of(slot).add(links_, slot, busy);
    }

    void remove(Slot slot) {
        if (on_) order_of(slot).remove(links_, slot);
    }

    void add_path(std::span<const Slot> path) {
        if (on_) order_of(path.front()).add_path(links_, path);
    }

    void remove_path(std::span<const Slot> path) {
        if (on_) order_of(path.front()).remove_path(links_, path);
    }

    void set_busy(Slot slot, bool busy) {
        if (on_) order_of(slot).set_busy(links_, slot, busy);
    }

    // Number of a tenant's evictable entries, and the entries in order.
    std::uint32_t idle(Tenant tenant) const { return owners_[tenant].order.size(); }
    std::vector<Slot> first(Tenant tenant) const { return owners_[tenant].order.first(links_, idle(tenant)); }

    // Removes the next evictable entry from the order.
    Slot take(Tenant tenant) {
        std::vector<Slot> taken;
        owners_[tenant].order.take(links_, 1, taken);
        return taken.front();
    }

    void clear() {
        std::fill(links_.begin(), links_.end(), LruLink{});
        for (Owner &owner : owners_) {
            owner.entries = 0;
            owner.order.clear();
        }
    }

    std::size_t bytes() const {
        std::size_t total = links_.capacity() * sizeof(LruLink) + of_.capacity() * sizeof(Tenant) +
                            owners_.capacity() * sizeof(Owner);
        for (const Owner &owner : owners_) total += owner.order.bytes();
        return total;
    }

  private:
    struct Owner {
        std::uint32_t most = kNoLimit;
        std::uint32_t entries = 0;
        LruLine order;
    };

    LruLine &order_of(Slot slot) { return owners_[of_[slot]].order; }

    LruLinks links_;
    std::vector<Tenant> of_;
    std::vector<Owner> owners_;
    bool on_ = false;
};

}  // namespace fdcache
