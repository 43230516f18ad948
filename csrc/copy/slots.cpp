#include "copy/slots.hpp"

#include <algorithm>
#include <vector>

namespace fdcache {
namespace {

// Larger slots, or negative ones, are sorted instead.
constexpr std::uint32_t kMostMarked = std::uint32_t{1} << 24;

// The largest slot; a negative one counts as larger than any other.
std::uint32_t largest(std::span<const std::int32_t> slots) {
    std::uint32_t most = 0;
    for (const std::int32_t slot : slots) most = std::max(most, static_cast<std::uint32_t>(slot));
    return most;
}

// A set of slots with one bit each. The bits belong to the thread and are zero between sets, so that a set
// costs as much as the slots in it.
class Marks {
  public:
    explicit Marks(std::uint32_t most) : words_(room_for(most)) {}
    Marks(const Marks &) = delete;
    Marks &operator=(const Marks &) = delete;

    // Returns true if the slot was in the set.
    bool add(std::int32_t slot) {
        const bool again = has(slot);
        words_[word(slot)] |= bit(slot);
        return again;
    }
    bool has(std::int32_t slot) const { return (words_[word(slot)] & bit(slot)) != 0; }
    void remove(std::span<const std::int32_t> slots) {
        for (const std::int32_t slot : slots) words_[word(slot)] = 0;
    }

  private:
    static std::uint64_t *room_for(std::uint32_t most) {
        static thread_local std::vector<std::uint64_t> bits;
        if (bits.size() <= most / 64) bits.resize(most / 64 + 1);
        return bits.data();
    }
    static std::uint32_t word(std::int32_t slot) { return static_cast<std::uint32_t>(slot) / 64; }
    static std::uint64_t bit(std::int32_t slot) {
        return std::uint64_t{1} << (static_cast<std::uint32_t>(slot) % 64);
    }

    std::uint64_t *const words_;
};

std::vector<std::int32_t> sorted(std::span<const std::int32_t> slots) {
    std::vector<std::int32_t> order(slots.begin(), slots.end());
    std::ranges::sort(order);
    return order;
}

}  // namespace

bool are_valid_slots(std::span<const std::int32_t> slots, std::int32_t limit, bool distinct) {
    if (slots.empty()) return true;
    const std::uint32_t most = largest(slots);
    if (limit <= 0 || most >= static_cast<std::uint32_t>(limit)) return false;
    if (!distinct) return true;
    if (most >= kMostMarked) {
        const std::vector<std::int32_t> order = sorted(slots);
        return std::ranges::adjacent_find(order) == order.end();
    }
    Marks seen(most);
    bool again = false;
    for (const std::int32_t slot : slots) again |= seen.add(slot);
    seen.remove(slots);
    return !again;
}

bool are_disjoint_slots(std::span<const std::int32_t> first, std::span<const std::int32_t> second) {
    if (first.empty() || second.empty()) return true;
    const std::uint32_t most = std::max(largest(first), largest(second));
    if (most >= kMostMarked) {
        const std::vector<std::int32_t> order = sorted(first);
        return std::ranges::none_of(
            second, [&order](std::int32_t slot) { return std::ranges::binary_search(order, slot); });
    }
    Marks seen(most);
    for (const std::int32_t slot : first) seen.add(slot);
    bool shared = false;
    for (const std::int32_t slot : second) shared |= seen.has(slot);
    seen.remove(first);
    return !shared;
}

std::vector<std::int32_t> extents_of(std::span<const std::int32_t> slots, std::int32_t size) {
    std::vector<std::int32_t> extents;
    std::int32_t first = 0, stop = 0;  // of the extent of the slot before, as most are in the same one
    for (const std::int32_t slot : slots) {
        if ((slot >= first && slot < stop) || slot < 0) continue;
        extents.push_back(slot / size);
        first = extents.back() * size;
        stop = size > INT32_MAX - first ? INT32_MAX : first + size;
    }
    std::ranges::sort(extents);
    extents.erase(std::ranges::unique(extents).begin(), extents.end());
    return extents;
}

}  // namespace fdcache
