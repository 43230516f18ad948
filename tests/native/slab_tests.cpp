// A slab file and its threads.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "native/checks.hpp"
#include "native/slab_world.hpp"
#include "native/threads.hpp"

namespace fdcache::tests {
namespace {

// Jobs of several threads, reads and writes: each runs once, and a batch ends after its last job.
void run_jobs_of_several_threads() {
    constexpr int kCallers = 4, kRounds = 50;
    IoPool pool(3);
    std::atomic<int> ran{0};
    run_threads(kCallers, [&](int caller) {
        for (int round = 0; round < kRounds; ++round) {
            int own[5]{};
            std::vector<std::function<void()>> jobs;
            for (int &each : own)
                jobs.emplace_back([&] {
                    ++each;
                    ++ran;
                });
            pool.run(std::move(jobs), caller % 2 ? IoPriority::kRead : IoPriority::kWrite);
            expect(std::ranges::all_of(own, [](int each) { return each == 1; }), "a job did not run once");
        }
    });
    expect(ran == kCallers * kRounds * 5, "jobs are lost");
}

// Threads write, read, check and empty their own slots of one file.
void share_a_file() {
    constexpr std::uint32_t kThreads = 3, kOwn = 5;
    SlabWorld world(kThreads * kOwn, 3);
    run_threads(kThreads, [&](int thread) {
        SlabRecords records(world, kOwn);
        const std::uint32_t first = static_cast<std::uint32_t>(thread) * kOwn;
        std::vector<std::uint32_t> slots;
        for (std::uint32_t i = 0; i < kOwn; ++i) slots.push_back(first + i);
        for (std::uint32_t round = 1; round <= 30; ++round) {
            for (std::uint32_t i = 0; i < kOwn; ++i) records.fill(i, 100 * round + slots[i]);
            auto out = world.file().write(records.blocks(slots, round), kNoLimits, SyncPolicy::kLater, round);
            expect(std::ranges::all_of(out.faults, is_none), "a record is not written");
            expect(std::ranges::all_of(world.file().verify(slots).faults, is_none), "a record is not intact");
            records.clear();
            out = world.file().read(records.blocks(slots, round), kNoLimits, round % 2);
            for (std::uint32_t i = 0; i < kOwn; ++i)
                expect(is_none(out.faults[i]) && records.has(i, 100 * round + slots[i]),
                       "another record is read");
            if (round % 5 == 0) {
                expect(world.file().erase(std::span(slots).first(2)) == 0, "slots cannot be emptied");
                out = world.file().read(records.blocks(slots, round), kNoLimits, true);
                expect(out.faults[0] == SlabFault::kMiss && is_none(out.faults[2]), "an empty slot is read");
            }
            expect(world.file().sync() == 0 && world.file().header(first).is_valid(), "sync");
        }
    });
}

// What a new object finds in the file is what was written.
void scan_again() {
    constexpr std::uint32_t kSlots = 8;
    SlabWorld world(kSlots, 2);
    SlabRecords records(world, kSlots);
    const std::vector<std::uint32_t> slots{0, 2, 3, 7};
    for (std::uint32_t i = 0; i < slots.size(); ++i) records.fill(i, slots[i]);
    world.file().write(records.blocks(slots, 4), kNoLimits, SyncPolicy::kEveryBatch, 1);
    world.reopen();
    expect(world.file().header(0).state == HeaderState::kEmpty, "an object knows headers before a scan");
    const SlabScan scan = world.file().scan(0, kSlots);
    expect(scan.ready == slots.size() && scan.corrupt == 0 && scan.error == 0, "a scan finds other blocks");
    records.clear();
    const auto out = world.file().read(records.blocks(slots, 4), kNoLimits, false);
    for (std::uint32_t i = 0; i < slots.size(); ++i)
        expect(is_none(out.faults[i]) && records.has(i, slots[i]), "another record is read");
}

void stop_requests() {
    SlabWorld world(4, 2);
    SlabRecords records(world, 4);
    const std::vector<std::uint32_t> slots{0, 1, 2, 3};
    for (std::uint32_t i = 0; i < 4; ++i) records.fill(i, i);
    const auto blocks = records.blocks(slots, 1);
    const SlabLimits cancelled{std::chrono::steady_clock::time_point::max(),
                               std::make_shared<std::atomic<bool>>(true)};
    const SlabLimits late{std::chrono::steady_clock::time_point::min(), nullptr};
    const auto all = [](const SlabOutcome &out, SlabFault fault) {
        return std::ranges::all_of(out.faults, [fault](SlabFault each) { return each == fault; });
    };
    expect(all(world.file().write(blocks, cancelled, SyncPolicy::kLater, 1), SlabFault::kCancelled),
           "cancelled");
    expect(all(world.file().write(blocks, late, SyncPolicy::kLater, 1), SlabFault::kTimeout), "late");
    expect(all(world.file().read(blocks, kNoLimits, true), SlabFault::kMiss),
           "records that were not written");
}

const Cases kCases{
    {"jobs-of-several-threads", run_jobs_of_several_threads},
    {"share-a-file", share_a_file},
    {"scan-again", scan_again},
    {"stop-requests", stop_requests},
};

}  // namespace
}  // namespace fdcache::tests

int main(int count, char **arguments) {
    return fdcache::tests::run_cases(fdcache::tests::kCases, count, arguments);
}
