// Many threads on one tier, and on the tables that other processes read.
#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "native/checks.hpp"
#include "native/threads.hpp"
#include "tier/outgoing.hpp"
#include "tier/presence.hpp"
#include "tier/tier.hpp"

namespace fdcache::tests {
namespace {

using Digests = std::vector<Digest>;

Digest digest(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    Digest made;
    for (std::size_t i = 0; i < made.bytes.size(); i += 8) {
        const std::uint64_t word = random();
        std::memcpy(made.bytes.data() + i, &word, sizeof word);
    }
    return made;
}

// A path of `length` blocks in a tree in which every block has three children.
Digests random_path(std::mt19937 &random, std::size_t length) {
    Digests path;
    std::uint64_t at = 1;
    for (std::size_t i = 0; i < length; ++i) {
        at = 4 * at + random() % 3;
        path.push_back(digest(at));
    }
    return path;
}

Digests above(const Digests &path) {
    Digests parents(path.size());
    std::copy(path.begin(), path.end() - 1, parents.begin() + 1);
    return parents;
}

void expect_sound(const Tier &tier) {
    for (const std::string &broken : tier.check_integrity()) fail(broken.c_str());
}

void expect_given_back(const Tier &tier) {
    expect_sound(tier);
    const TierStats stats = tier.stats();
    expect(!stats.pins && !stats.holds && !stats.leases && !stats.writing,
           "the tier has something left in use");
    expect(stats.free + stats.evictable == stats.slots, "slots are lost");
}

// Requests of several threads, as an engine runs them, and a thread that resizes and resets the tier.
class Crowd {
  public:
    Crowd(std::uint32_t slots, double spare)
        : tier_(slots, "lru", 0, spare), size_(slots), owners_(2 * slots) {}

    void run(int threads, int requests) {
        std::atomic<bool> ended{false};
        std::thread disturber([&] { disturb(ended); });
        run_threads(threads, [&](int thread) {
            std::mt19937 random(thread);
            for (int i = 0; i < requests; ++i) {
                request(random);
                if (random() % 2) report_one(random);
            }
        });
        ended = true;
        disturber.join();
        std::mt19937 random(0);
        while (report_one(random)) expect_sound(tier_);
        expect_given_back(tier_);
        expect(computed_ > 0 && copied_ > 0, "no thread came far");
    }

  private:
    void request(std::mt19937 &random) {
        const LeaseId lease = tier_.open_lease();
        const Digests path = random_path(random, 1 + random() % 6);
        std::vector<Slot> own;
        try {
            use(lease, path, own, random);
        } catch (const StaleLease &) {
        }
        for (const Slot slot : own) owners_[slot] = 0;
        expect(tier_.release(lease) && !tier_.release(lease), "a lease is released once");
    }

    void use(LeaseId lease, const Digests &path, std::vector<Slot> &own, std::mt19937 &random) {
        const MatchRun run = tier_.match(lease, path, 0);
        tier_.hold(run.slots);
        tier_.unhold(run.slots);
        if (run.pending) return;
        const std::size_t found = run.slots.size();
        const Digests wanted(path.begin() + static_cast<std::ptrdiff_t>(found), path.end());
        if (random() % 5 < 2) {
            Digests parents = above(path);
            parents.erase(parents.begin(), parents.begin() + static_cast<std::ptrdiff_t>(found));
            const CopyReservation taken = tier_.reserve_copies(lease, parents, wanted);
            own_all(taken.slots, lease);
            if (taken.slots.empty()) return;
            const std::lock_guard lock(mutex_);
            in_flight_.push_back(taken.slots);
            ++copied_;
            return;
        }
        const Reservation taken = tier_.reserve(lease, static_cast<std::uint32_t>(wanted.size()));
        if (taken.missing) return;
        own_all(taken.slots, lease);
        own = taken.slots;
        const std::size_t done = random() % (own.size() + 1);
        tier_.commit(lease, found ? path[found - 1] : Digest{}, std::span(wanted).first(done),
                     std::span(own).first(done));
        ++computed_;
    }

    void own_all(const std::vector<Slot> &slots, LeaseId lease) {
        for (const Slot slot : slots) expect(owners_[slot].exchange(lease) == 0, "a slot has two owners");
    }

    bool report_one(std::mt19937 &random) {
        std::vector<Slot> slots;
        {
            const std::lock_guard lock(mutex_);
            if (in_flight_.empty()) return false;
            slots = std::move(in_flight_.front());
            in_flight_.pop_front();
        }
        std::vector<std::uint8_t> copied(slots.size());
        for (const Slot slot : slots) owners_[slot] = 0;
        for (auto &each : copied) each = random() % 10 != 0;
        tier_.complete(slots, copied, {});
        return true;
    }

    void disturb(const std::atomic<bool> &ended) {
        std::mt19937 random(99);
        for (int round = 1; !ended; ++round) {
            // Others run between two calls: what a call touches without the lock is a race then.
            expect_sound(tier_);
            std::this_thread::yield();
            tier_.resize(size_ - 2 + random() % 7);
            std::this_thread::yield();
            tier_.coldest(size_);
            std::this_thread::yield();
            tier_.stats();
            std::this_thread::yield();
            tier_.idle(0, nullptr);
            std::this_thread::yield();
            expect(tier_.available() <= size_ + 4, "too many slots are available");
            std::this_thread::yield();
            if (round % 20 == 0) tier_.reset();
            std::this_thread::yield();
        }
    }

    Tier tier_;
    const std::uint32_t size_;
    std::vector<std::atomic<LeaseId>> owners_;  // by slot, of slots given to one lease alone
    std::mutex mutex_;
    std::deque<std::vector<Slot>> in_flight_;
    std::atomic<int> computed_{0}, copied_{0};
};

// A service's clients publish for their tenants while blocks are dropped, and readers look at the table.
void publish_beside_readers() {
    constexpr std::uint32_t kSlots = 32;
    constexpr int kClients = 3, kRounds = 400;
    std::vector<std::uint64_t> memory(17 * PresenceTable::kBucketBytes / sizeof(std::uint64_t));
    const std::size_t nbytes = memory.size() * sizeof memory[0];
    Tier tier(kSlots);
    for (Tenant tenant = 0; tenant < kClients; ++tenant) tier.set_tenant_limit(tenant, 6 + tenant);
    tier.mirror(PresenceTable(memory.data(), nbytes));
    std::atomic<bool> ended{false};
    std::thread reader([&] {
        const PresenceTable table(memory.data(), nbytes);
        std::mt19937 random(7);
        while (!ended) {
            const Digests path = random_path(random, 5);
            expect(table.run(path, 0) <= path.size() && table.size() <= 2 * kSlots, "the table has too many");
        }
    });
    std::atomic<int> stored{0};
    run_threads(kClients, [&](int client) {
        std::mt19937 random(client);
        for (int round = 0; round < kRounds; ++round) {
            const LeaseId lease = tier.open_lease();
            const Digests path = random_path(random, 1 + random() % 5);
            const Reservation taken = tier.reserve(lease, static_cast<std::uint32_t>(path.size()));
            if (!taken.missing) {
                const std::vector<std::uint8_t> copied(path.size(), 1);
                const std::vector<std::uint64_t> sums(path.size());
                const std::vector<Tenant> tenants(path.size(), static_cast<Tenant>(client));
                const auto status =
                    tier.publish(lease, above(path), path, taken.slots, copied, sums, tenants);
                stored += static_cast<int>(std::ranges::count(status, PublishStatus::kStored));
            }
            tier.release(lease);
            if (round % 9 == 0) tier.drop(std::span(path).last(1));
        }
    });
    ended = true;
    reader.join();
    expect_given_back(tier);
    expect(stored > kRounds, "few blocks were published");
    const std::vector<std::uint32_t> entries = tier.tenant_entries();
    for (Tenant tenant = 0; tenant < kClients; ++tenant)
        expect(entries[tenant] <= 6 + tenant, "a tenant is above its limit");
}

// Threads that plan, end and acknowledge copies into another process's tier.
void copy_out_from_threads() {
    constexpr std::uint32_t kSlots = 64;
    std::vector<std::uint64_t> memory(17 * PresenceTable::kBucketBytes / sizeof(std::uint64_t));
    OutgoingCopies outgoing(PresenceTable(memory.data(), memory.size() * sizeof memory[0]));
    const std::vector<std::uint32_t> generations(kSlots, 1);
    std::vector<Slot> stock(kSlots);
    for (Slot slot = 0; slot < kSlots; ++slot) stock[slot] = slot;
    outgoing.grant(stock, generations);
    std::vector<std::atomic<int>> owners(kSlots);
    run_threads(4, [&](int thread) {
        std::mt19937 random(thread);
        for (int round = 0; round < 500; ++round) {
            const Digests path = random_path(random, 1 + random() % 5);
            const CopyReservation taken = outgoing.reserve(above(path), path);
            for (const Slot slot : taken.slots) expect(owners[slot]++ == 0, "a slot is given twice");
            outgoing.contains(path);
            const std::vector<std::uint8_t> copied(taken.slots.size(), random() % 4 != 0);
            for (const Slot slot : taken.slots) --owners[slot];
            outgoing.acknowledge(outgoing.end(taken.slots, copied, true).hashes);
            outgoing.grant(taken.slots, std::vector<std::uint32_t>(taken.slots.size(), 1));
        }
    });
    expect(outgoing.stock() == kSlots && outgoing.in_flight() == 0, "the stock is not what was granted");
}

const Cases kCases{
    {"crowd-small", [] { Crowd(16, 0).run(4, 1500); }},
    {"crowd-spare", [] { Crowd(48, 0.25).run(4, 1000); }},
    {"publish-beside-readers", publish_beside_readers},
    {"copy-out", copy_out_from_threads},
};

}  // namespace
}  // namespace fdcache::tests

int main(int count, char **arguments) {
    return fdcache::tests::run_cases(fdcache::tests::kCases, count, arguments);
}
