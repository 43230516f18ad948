// Several schedulers on one tier, each in its own thread.
#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "native/checks.hpp"
#include "native/request_history.hpp"
#include "native/threads.hpp"

namespace fdcache::tests {
namespace {

void share_a_tier() {
    Tier tier(40);
    std::atomic<bool> ended{false};
    std::thread observer([&] {
        while (!ended) {
            for (const std::string &broken : tier.check_integrity()) fail(broken.c_str());
            tier.coldest(10);
            std::this_thread::yield();
        }
    });
    run_threads(3, [&](int thread) {
        std::mt19937 random(thread);
        std::vector<std::uint8_t> bytes(30000);
        for (auto &byte : bytes) byte = static_cast<std::uint8_t>(random());
        RequestHistory(Bytes(bytes), tier, std::to_string(thread)).run();
    });
    ended = true;
    observer.join();
    const TierStats stats = tier.stats();
    expect(!stats.pins && !stats.leases && !stats.writing, "something is left in use");
    expect(stats.ready > 0 && stats.evictions > 0, "the tier was never full");
}

const Cases kCases{{"share-a-tier", share_a_tier}};

}  // namespace
}  // namespace fdcache::tests

int main(int count, char **arguments) {
    return fdcache::tests::run_cases(fdcache::tests::kCases, count, arguments);
}
