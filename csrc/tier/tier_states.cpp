// Prefixes that end at states: what these save.
#include "tier/tier.hpp"

namespace fdcache {

void Tier::set_states(std::uint8_t page_records, std::uint8_t states) {
    std::lock_guard lock(mutex_);
    if (!page_records || !states) return;
    page_records_ = page_records;
    states_ = states;
    order_->set_values([this](Slot slot) { return value_of(slot); });
}

// The last record of the page whose states this entry completes; kNoSlot for any other entry.
Slot Tier::page_of_states(Slot slot) const {
    const Slot page = find_ready(digests_[slot].marked(page_records_));
    if (page == kNoSlot || entries_[page].depth % page_records_ != page_records_ - 1u) return kNoSlot;
    for (std::uint8_t i = 0; i < states_ && slot < kRoot; ++i) slot = entries_[slot].parent;
    return slot == page ? page : kNoSlot;
}

// Without the states a prefix ends at those before, and the pages between are of use to nobody who has no
// others below them.
EndValue Tier::value_of(Slot slot) const {
    Slot last = page_of_states(slot);
    if (last == kNoSlot) return {};
    std::uint32_t pages = 0, freed = states_;
    bool is_own = true;  // nothing else is below
    do {
        ++pages;
        for (std::uint8_t i = 0; i < page_records_ && last < kRoot; ++i) {
            is_own = is_own && entries_[last].children == 1;
            freed += is_own;
            last = entries_[last].parent;
        }
    } while (last < kRoot && pages < kMostSaved && !has_states(last));
    const auto saved = static_cast<float>(pages * page_records_);
    return {saved, saved / static_cast<float>(freed)};
}

}  // namespace fdcache
