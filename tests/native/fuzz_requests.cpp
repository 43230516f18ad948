// Fuzz target: requests of a scheduler, from their match to their end.
#include <cstddef>
#include <cstdint>

#include "native/checks.hpp"
#include "native/request_history.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    using namespace fdcache;
    tests::Bytes bytes({data, size});
    const std::uint32_t slots = 2 + bytes.below(14);
    Tier tier(slots, "lru", 0, bytes.one_in(3) ? 0.25 : 0);
    tests::RequestHistory(bytes, tier, "tenant").run();
    for (const std::string &broken : tier.check_integrity()) tests::fail(broken.c_str());
    const TierStats stats = tier.stats();
    tests::expect(!stats.pins && !stats.holds && !stats.leases && !stats.writing, "something is left in use");
    return 0;
}
