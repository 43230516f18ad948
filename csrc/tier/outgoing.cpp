#include "tier/outgoing.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace fdcache {

void OutgoingCopies::grant(std::span<const Slot> slots, std::span<const std::uint32_t> generations) {
    std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < slots.size(); ++i) stock_.push_back({slots[i], generations[i]});
}

std::vector<Slot> OutgoingCopies::give_up_stock(Slot first) {
    std::lock_guard lock(mutex_);
    std::vector<Slot> slots;
    slots.reserve(stock_.size());
    for (const Granted &each : stock_)
        if (each.slot >= first) slots.push_back(each.slot);
    std::erase_if(stock_, [first](const Granted &each) { return each.slot >= first; });
    return slots;
}

std::size_t OutgoingCopies::stock() const {
    std::lock_guard lock(mutex_);
    return stock_.size();
}

std::size_t OutgoingCopies::take_asked() {
    std::lock_guard lock(mutex_);
    return std::exchange(asked_, 0);
}

Presence OutgoingCopies::presence(const Digest &hash) const {
    const auto own = state_.find(hash);
    if (own != state_.end()) return own->second;
    return table_.holds(hash) ? Presence::kReady : Presence::kAbsent;
}

std::vector<Presence> OutgoingCopies::contains(std::span<const Digest> hashes) const {
    std::lock_guard lock(mutex_);
    std::vector<Presence> seen;
    seen.reserve(hashes.size());
    for (const Digest &hash : hashes) seen.push_back(presence(hash));
    return seen;
}

std::uint64_t OutgoingCopies::holds(std::span<const Digest *const> hashes) const {
    std::lock_guard lock(mutex_);
    for (const Digest *const hash : hashes) table_.prefetch_tags(*hash);
    std::uint64_t held = 0;
    for (std::size_t i = 0; i < hashes.size(); ++i)
        held |= std::uint64_t{table_.holds(*hashes[i]) || state_.contains(*hashes[i])} << i;
    return held;
}

CopyReservation OutgoingCopies::reserve(std::span<const Digest> parents, std::span<const Digest> hashes,
                                        bool below_pending) {
    std::lock_guard lock(mutex_);
    const auto may_be_parent = [&](const Digest &hash) {
        const Presence known = presence(hash);
        return known == Presence::kReady || (below_pending && known == Presence::kPending);
    };
    CopyReservation out;
    std::vector<std::size_t> chosen;
    std::unordered_map<Digest, Presence, DigestHash> fresh;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        const Presence known = fresh.contains(hashes[i]) ? Presence::kPending : presence(hashes[i]);
        if (known != Presence::kAbsent) {
            out.status.push_back(known == Presence::kReady ? ReserveStatus::kReady : ReserveStatus::kPending);
        } else if (parents[i].is_no_block() || fresh.contains(parents[i]) || may_be_parent(parents[i])) {
            out.status.push_back(ReserveStatus::kReserved);
            fresh.emplace(hashes[i], Presence::kPending);
            chosen.push_back(i);
        } else {
            out.status.push_back(ReserveStatus::kNoParent);
        }
    }
    asked_ = std::max(asked_, chosen.size());
    if (chosen.size() > stock_.size()) {
        out.missing = static_cast<std::uint32_t>(chosen.size() - stock_.size());
        return out;
    }
    // Ascending, so that the blocks of a path form runs.
    std::sort(stock_.begin(), stock_.begin() + static_cast<std::ptrdiff_t>(chosen.size()));
    for (const std::size_t i : chosen) {
        const Granted &granted = stock_.front();
        targets_[granted.slot] = {parents[i], hashes[i]};
        out.slots.push_back(granted.slot);
        out.generations.push_back(granted.generation);
        stock_.pop_front();
    }
    state_.merge(fresh);
    return out;
}

OutgoingCopies::Ended OutgoingCopies::end(std::span<const Slot> slots, std::span<const std::uint8_t> copied,
                                          bool reported) {
    std::lock_guard lock(mutex_);
    for (const Slot slot : slots)
        if (!targets_.contains(slot))
            throw std::out_of_range("no copy into slot " + std::to_string(slot) + " is in flight");
    Ended ended;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const auto found = targets_.find(slots[i]);
        const auto &[parent, hash] = found->second;
        if (reported && copied[i])
            state_[hash] = Presence::kReady;
        else
            state_.erase(hash);
        ended.parents.push_back(parent);
        ended.hashes.push_back(hash);
        targets_.erase(found);
    }
    return ended;
}

void OutgoingCopies::acknowledge(std::span<const Digest> hashes) {
    std::lock_guard lock(mutex_);
    for (const Digest &hash : hashes)
        if (const auto own = state_.find(hash); own != state_.end() && own->second == Presence::kReady)
            state_.erase(own);
}

void OutgoingCopies::drop_unacknowledged() {
    std::lock_guard lock(mutex_);
    std::erase_if(state_, [](const auto &own) { return own.second == Presence::kReady; });
}

std::size_t OutgoingCopies::in_flight() const {
    std::lock_guard lock(mutex_);
    return targets_.size();
}

}  // namespace fdcache
