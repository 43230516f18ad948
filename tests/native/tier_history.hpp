// A history of a small tier from any bytes, compared with the model after every operation.
#pragma once

#include <cstdint>
#include <span>

namespace fdcache::tests {

// Ends the process unless tier and model agree throughout.
void run_tier_history(std::span<const std::uint8_t> bytes);

}  // namespace fdcache::tests
