#include "tier/orphans.hpp"

#include <algorithm>

namespace fdcache {

std::vector<Slot> Orphans::slots() const {
    std::vector<Slot> slots;
    slots.reserve(orphans_.size());
    for (const auto &[slot, entry] : orphans_) slots.push_back(slot);
    return slots;
}

std::vector<Digest> Orphans::parents() const {
    std::vector<Digest> parents;
    for (const auto &[slot, entry] : orphans_) parents.push_back(entry.parent);
    return parents;
}

bool Orphans::is_idle(Slot slot) const {
    const auto found = orphans_.find(slot);
    return found != orphans_.end() && found->second.idle;
}

Slot Orphans::find(const Digest &hash) const {
    const auto found = by_hash_.find(hash);
    return found == by_hash_.end() ? kNoSlot : found->second;
}

std::vector<Slot> Orphans::below(const Digest &parent) const {
    std::vector<Slot> slots;
    const auto [first, last] = by_parent_.equal_range(parent);
    for (auto each = first; each != last; ++each) slots.push_back(each->second);
    return slots;
}

void Orphans::add(std::span<const Orphan> orphans) {
    std::size_t added = 0;
    try {
        for (; added < orphans.size(); ++added) insert(orphans[added]);
    } catch (...) {
        for (const Orphan &orphan : orphans.first(added + 1)) remove(orphan.slot);
        throw;
    }
}

void Orphans::insert(const Orphan &orphan) {
    orphans_.emplace(orphan.slot, Entry{orphan.hash, orphan.parent, next_turn_, false});
    turns_.emplace(next_turn_++, orphan.slot);
    by_hash_.emplace(orphan.hash, orphan.slot);
    by_parent_.emplace(orphan.parent, orphan.slot);
    awaited_.erase(orphan.hash);
    if (!by_hash_.contains(orphan.parent)) awaited_.insert(orphan.parent);
}

void Orphans::remove(Slot slot) {
    const auto found = orphans_.find(slot);
    if (found == orphans_.end()) return;
    const Entry &entry = found->second;
    idle_ -= entry.idle;
    turns_.erase(entry.turn);
    by_hash_.erase(entry.hash);
    const auto [first, last] = by_parent_.equal_range(entry.parent);
    const auto own = std::find_if(first, last, [slot](const auto &each) { return each.second == slot; });
    if (own != last) by_parent_.erase(own);
    if (!by_parent_.contains(entry.parent)) awaited_.erase(entry.parent);
    if (by_parent_.contains(entry.hash)) awaited_.insert(entry.hash);
    orphans_.erase(found);
}

void Orphans::set_idle(Slot slot, bool idle) {
    Entry &entry = orphans_.at(slot);
    idle_ += idle - entry.idle;
    entry.idle = idle;
}

Slot Orphans::first() const {
    for (const auto &[turn, slot] : turns_)
        if (orphans_.at(slot).idle) return slot;
    return kNoSlot;
}

void Orphans::clear() {
    orphans_.clear();
    by_hash_.clear();
    by_parent_.clear();
    turns_.clear();
    awaited_.clear();
    idle_ = 0;
}

std::vector<Digest> Orphans::awaited(std::size_t count) {
    std::vector<Digest> digests;
    auto next = awaited_.upper_bound(last_);
    for (std::size_t left = std::min(count, awaited_.size()); left > 0; --left, ++next) {
        if (next == awaited_.end()) next = awaited_.begin();
        digests.push_back(*next);
    }
    if (!digests.empty()) last_ = digests.back();
    return digests;
}

}  // namespace fdcache
