// Lists of slots: in range, distinct, disjoint.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fdcache {

// True if all slots are in [0, limit) and, with `distinct`, none occurs twice.
bool are_valid_slots(std::span<const std::int32_t> slots, std::int32_t limit, bool distinct);

// True if no slot is in both lists. Slots may be any numbers.
bool are_disjoint_slots(std::span<const std::int32_t> first, std::span<const std::int32_t> second);

// The extents of `size` slots each in which slots are, ascending. Numbers below 0 are no slots.
std::vector<std::int32_t> extents_of(std::span<const std::int32_t> slots, std::int32_t size);

}  // namespace fdcache
