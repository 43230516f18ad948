#include "tier/lru_shadow.hpp"

#include <algorithm>

namespace fdcache {

void LruShadow::leave(std::uint32_t last_ms) {
    if (!count_ || last_ms < begin_) return;
    const std::size_t end = first_ + count_;
    if (found_ < first_ || found_ >= end || places_[found_].last_ms != last_ms) {
        const auto is_older = [](const Place &place, std::uint32_t time) { return place.last_ms < time; };
        const auto found =
            std::lower_bound(places_.begin() + first_, places_.begin() + end, last_ms, is_older);
        found_ = static_cast<std::size_t>(found - places_.begin());
    }
    if (found_ == end || !places_[found_].blocks) return;
    --places_[found_].blocks;
    --size_;
}

void LruShadow::add_place(std::uint32_t now) {
    if (!count_) begin_ = oldest_ = now;
    if (first_ + count_ == kPlaces) make_room();
    places_[first_ + count_++] = {now, 0};
}

void LruShadow::trim(std::size_t capacity) {
    while (count_ > 1 && size_ - places_[first_].blocks >= capacity) {
        size_ -= places_[first_].blocks;
        begin_ = places_[first_].last_ms + 1;
        ++first_;
        --count_;
    }
    if (!count_) return;
    const Place &oldest = places_[first_];
    const std::size_t beyond = size_ > capacity ? size_ - capacity : 0;
    oldest_ = oldest.last_ms;
    share_ = beyond < oldest.blocks ? 1 - static_cast<double>(beyond) / oldest.blocks : !beyond;
}

void LruShadow::move_begin(std::uint64_t time) {
    const auto move = [time](std::uint32_t &each) {
        each = each > time ? static_cast<std::uint32_t>(each - time) : 0;
    };
    for (Place &place : places_) move(place.last_ms);
    move(begin_);
    move(oldest_);
    for (; count_ > 1 && !places_[first_ + 1].last_ms; ++first_, --count_)
        places_[first_ + 1].blocks += places_[first_].blocks;
}

// Moves the places to the front, without those that have no blocks left.
void LruShadow::make_room() {
    const auto begin = places_.begin();
    const auto moved = std::copy(begin + first_, begin + first_ + count_, begin);
    const auto kept = std::remove_if(begin, moved, [](const Place &place) { return !place.blocks; });
    first_ = found_ = 0;
    count_ = static_cast<std::size_t>(kept - begin);
    if (count_ <= kPlaces / 2) return;
    for (std::size_t i = 0; i < count_ / 2; ++i)
        places_[i] = {places_[2 * i + 1].last_ms, places_[2 * i].blocks + places_[2 * i + 1].blocks};
    if (count_ % 2) places_[count_ / 2] = places_[count_ - 1];
    count_ -= count_ / 2;
}

}  // namespace fdcache
