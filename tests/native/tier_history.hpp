// A history of a small tier from any bytes, compared with the model after every operation. With another
// eviction policy than "lru" any order is right in which no block comes before its children.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace fdcache::tests {

// Ends the process unless tier and model agree throughout.
void run_tier_history(std::span<const std::uint8_t> bytes, std::string_view eviction = "lru");

}  // namespace fdcache::tests
