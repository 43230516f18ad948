// Fuzz target: histories of a tier that evicts by another order than last use.
#include <cstddef>
#include <cstdint>

#include "native/tier_history.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    fdcache::tests::run_tier_history({data, size}, "learned");
    return 0;
}
