// Operations of a tier's session: they append to the caller's memory, leave it as it was when they fail, and
// do the same as those of the tier.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "native/checks.hpp"
#include "tier/session.hpp"

namespace fdcache::tests {
namespace {

void expect_sound(const Tier &tier) {
    for (const std::string &broken : tier.check_integrity()) fail(broken.c_str());
}

std::vector<Digest> path_of(std::uint8_t first, std::size_t length) {
    std::vector<Digest> path(length);
    for (std::size_t i = 0; i < length; ++i) path[i].bytes = {first, static_cast<std::uint8_t>(i + 1)};
    return path;
}

template <typename Error, typename Call>
bool refuses(Call call) {
    try {
        call();
    } catch (const Error &) {
        return true;
    }
    return false;
}

// Stores the path and returns its slots.
std::vector<Slot> store(Tier &tier, const std::vector<Digest> &path) {
    std::vector<Slot> table;
    Tier::Session session(tier);
    const LeaseId lease = session.open_lease();
    expect(session.reserve(lease, static_cast<std::uint32_t>(path.size()), table) == 0, "a path has room");
    expect(session.commit(lease, {}, path, table) == path.size(), "a whole path is committed");
    session.release(lease);
    return table;
}

void a_request_in_one_session() {
    Tier tier(8);
    const auto path = path_of(1, 6);
    const std::vector<Slot> stored = store(tier, {path.begin(), path.begin() + 4});
    std::vector<Slot> table;
    std::vector<CommitStatus> status{CommitStatus::kDuplicate};
    LeaseId lease = 0;
    {
        Tier::Session session(tier);
        lease = session.open_lease();
        expect(!session.match(lease, path, 0, 1, table), "nothing is pending");
        expect(table == stored, "a match appends the stored slots");
        expect(session.hits(table[0]) == 1 && session.hits(table[1]) == 2, "known blocks get no hit");
        expect(session.reserve(lease, 2, table) == 0 && table.size() == 6, "reserved slots follow");
        expect(session.generation(table[5]) == 1, "a first use has generation 1");
        const std::span<const Slot> fresh = std::span(table).subspan(4);
        expect(session.commit(lease, path[3], std::span(path).subspan(4), fresh, &status) == 2, "two stored");
        expect(session.presence(path[5]) == Presence::kReady, "a committed block is ready");
        expect(session.available() == 2, "the rest is free");
    }
    expect(status.size() == 3 && status[0] == CommitStatus::kDuplicate && status[2] == CommitStatus::kStored,
           "the status of each block is appended");
    expect(tier.stats().pins == 6, "the lease has six pins");
    expect(tier.release(lease) && !tier.release(lease), "a lease is released once");
    expect_sound(tier);
}

void failures_leave_the_callers_memory() {
    Tier tier(4);
    const auto path = path_of(1, 4), other = path_of(2, 2);
    store(tier, path);
    std::vector<Slot> table{99};
    BlockList evicted;
    const LeaseId lease = tier.open_lease();
    {
        Tier::Session session(tier);
        expect(session.reserve(lease, 5, table, &evicted) == 1, "one slot is missing");
        const std::vector<Digest> mixed{other[0], path[1]};
        expect(!session.match(lease, mixed, 0, 0, table), "hashes of two paths find nothing");
        expect(refuses<StaleLease>([&] { session.reserve(lease + 1, 1, table); }), "an unknown lease");
    }
    expect(table == std::vector<Slot>{99} && evicted.slots.empty(), "nothing was appended");
    expect(tier.stats().pins == 0 && tier.stats().ready == 4, "nothing was changed");
    expect(tier.stats().contradictions == 1, "and they are counted");
    expect_sound(tier);
}

void evicted_blocks_are_listed_if_asked_for() {
    Tier tier(4);
    const auto path = path_of(1, 4);
    const std::vector<Slot> stored = store(tier, path);
    std::vector<Slot> table;
    BlockList evicted;
    const LeaseId lease = tier.open_lease();
    {
        Tier::Session session(tier);
        expect(session.reserve(lease, 1, table) == 0 && table[0] == stored[3], "the deepest goes first");
        expect(session.reserve(lease, 2, table, &evicted) == 0, "two more");
    }
    expect(evicted.slots == std::vector<Slot>({stored[2], stored[1]}), "children before parents");
    expect(evicted.hashes == std::vector<Digest>({path[2], path[1]}), "with their hashes");
    expect(evicted.parents == std::vector<Digest>({path[1], path[0]}), "and their parents");
    expect(tier.stats().evictions == 3, "three are gone");
    expect_sound(tier);
}

void a_copy_reservation_is_replaced() {
    Tier tier(4);
    const auto path = path_of(1, 3);
    const std::vector<Digest> parents{{}, path[0], path[1]};
    CopyReservation out;
    Tier::Session session(tier);
    session.reserve_copies(0, parents, path, out);
    expect(out.slots.size() == 3 && out.generations.size() == 3 && out.missing == 0, "three slots");
    session.reserve_copies(0, parents, path, out);
    expect(out.slots.empty() && out.status == std::vector<ReserveStatus>(3, ReserveStatus::kPending),
           "the second answer has nothing of the first");
    std::vector<Slot> table;
    const LeaseId lease = session.open_lease();
    expect(session.match(lease, path, 0, 0, table) && table.empty(), "the first block is pending");
}

double reuses(const Tier &tier) {
    const std::optional<ReuseTables> tables = tier.reuse();
    double count = 0;
    for (const auto &kind : tables->reused())
        for (const double at_age : kind) count += at_age;
    return count;
}

// By the real clock: the tables are computed every 16 s, here between an eviction and a commit of one
// session.
void a_session_has_one_time() {
    using namespace std::chrono_literals;
    Tier tier(8, "learned");
    const auto start = std::chrono::steady_clock::now();
    const auto path = path_of(1, 4);
    store(tier, path);
    for (int i = 0; i < 500; ++i) {
        const LeaseId lease = tier.open_lease();
        tier.match(lease, path, 0);
        tier.finish(lease);
    }
    const double before = reuses(tier);
    expect(before == 2000, "each use of a block is counted");
    const auto first = path_of(2, 3), second = path_of(3, 3);
    std::this_thread::sleep_until(start + 15990ms);
    {
        Tier::Session session(tier);
        for (const auto *each : {&first, &second}) {
            std::vector<Slot> table;
            const LeaseId lease = session.open_lease();
            session.match(lease, path, 0, 0, table);
            table.clear();
            std::this_thread::sleep_for(30ms);
            expect(session.reserve(lease, 3, table) == 0, "there is room");
            expect(session.commit(lease, {}, *each, table) == 3, "a path is committed");
            session.finish(lease, nullptr);
        }
    }
    expect(tier.stats().evictions == 2, "blocks were evicted");
    expect(reuses(tier) > 0.99 * before, "what was learned is forgotten");
    expect_sound(tier);
}

const Cases kCases{
    {"request", a_request_in_one_session},
    {"failures", failures_leave_the_callers_memory},
    {"evicted", evicted_blocks_are_listed_if_asked_for},
    {"copies", a_copy_reservation_is_replaced},
    {"clock", a_session_has_one_time},
};

}  // namespace
}  // namespace fdcache::tests

int main(int count, char **arguments) {
    return fdcache::tests::run_cases(fdcache::tests::kCases, count, arguments);
}
