// Fuzz target: histories of a tier.
#include <cstddef>
#include <cstdint>

#include "native/tier_history.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    fdcache::tests::run_tier_history({data, size});
    return 0;
}
