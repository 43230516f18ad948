// What a tier that evicts by last use would hold.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fdcache {

// Such a tier holds the blocks that were used last. So it is enough to know how many blocks were last used at
// each time: up to 1,024 places, newest last. When these are full, two neighbours become one.
class LruShadow {
  public:
    // The chance that a block is there which was last used at `last_ms`.
    double holds(std::uint32_t last_ms) const {
        if (!count_ || last_ms < begin_) return 0;
        return last_ms > oldest_ ? 1 : share_;
    }
    // A block is used for the first time, or again.
    void use(std::uint32_t now) {
        if (!count_ || places_[first_ + count_ - 1].last_ms != now) add_place(now);
        ++places_[first_ + count_ - 1].blocks;
        ++size_;
    }
    void leave(std::uint32_t last_ms);
    // Drops what is beyond `capacity` blocks. Of the oldest place a share stays.
    void trim(std::size_t capacity);
    void clear() { *this = LruShadow(); }
    // Times are counted from this time on; what was before becomes as old.
    void move_begin(std::uint64_t time);
    // Blocks at the places, those of the oldest that are beyond the capacity included.
    std::size_t size() const { return size_; }

  private:
    static constexpr std::size_t kPlaces = 1024;

    struct Place {
        std::uint32_t last_ms;  // of its newest block
        std::uint32_t blocks;
    };

    void add_place(std::uint32_t now);
    void make_room();

    std::array<Place, kPlaces> places_{};
    std::size_t first_ = 0;     // the oldest place
    std::size_t count_ = 0;     // places in use
    std::size_t found_ = 0;     // the place that was found last
    std::size_t size_ = 0;      // blocks
    std::uint32_t begin_ = 0;   // blocks last used before are gone
    std::uint32_t oldest_ = 0;  // of those last used up to then
    double share_ = 1;          // this share is there
};

}  // namespace fdcache
