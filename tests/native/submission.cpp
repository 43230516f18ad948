// Submission of block copies to a GPU's streams, on the stand-in driver.
#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "native/copy_world.hpp"
#include "native/mixed_copies.hpp"
#include "native/stand_in_faults.hpp"

namespace fdcache::stand_in {
namespace {

using cuda::Submitter;

// --- helpers

void submit_one_by_one(Submitter &submitter, LaneWorld &lane, Batch &batch) {
    for (const PlaneRange group : kGroups) submit(submitter, lane, batch, {group});
    for (const EventPtr &event : batch.events) {
        expect((event == batch.swap->done()) == (event == batch.events.back()),
               batch.name + ": the end of the batch is not the event of its last range alone");
    }
}

bool is_promised(const EventPtr &event) {
    return event->is_promised();
}

// Blocks a submitter, so that it enqueues nothing.
class Gate {
  public:
    Gate(const World &world, Submitter &submitter) : event_(world.promised()) { submitter.wait(event_); }
    void open() { event_->record(&other_); }

    // During the delay, work that wrongly does not wait overtakes.
    static void expect_waiting(const Batch &batch) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        expect(batch.swap->done()->is_promised() && std::ranges::all_of(batch.events, is_promised),
               batch.name + " does not wait for earlier work");
    }

  private:
    EventPtr event_;
    Stream other_;
};

// One lane for loads, with a submitter.
struct Loads {
    World world;
    LaneWorld lane{world.context};
    Submitter submitter{world.context, lane.main(), false};

    Batch load(const std::string &name, const std::vector<PlaneRange> &ranges, int count = kBlocks) {
        Batch batch = world.load(name, same_slots(count));
        submit(submitter, lane, batch, ranges);
        return batch;
    }

    void expect_next_is_fine() {
        Batch next = load("the next batch", kGroups);
        next.expect_copied();
        world.expect_loaded(next);
    }
};

// --- lanes that wait for each other

void wait_for_what_is_not_recorded_yet() {
    Loads loads;
    LaneWorld lane(loads.world.context);
    Submitter backups(loads.world.context, lane.main(), true);
    Gate gate(loads.world, loads.submitter);
    Batch load = loads.load("the load", kGroups);
    const EventPtr loaded = loads.world.event();
    loads.submitter.record(loaded);
    std::vector<SlotPair> pairs;
    for (int slot = 0; slot < kBlocks; ++slot) pairs.push_back({kBlocks + slot, slot});
    backups.wait(loaded);
    Batch backup = loads.world.backup("the backup", pairs);
    submit(backups, lane, backup, kWhole);
    for (const Batch *batch : {&load, &backup}) Gate::expect_waiting(*batch);
    gate.open();
    backup.expect_copied();
    load.expect_copied();
    for (const SlotPair &pair : pairs) {
        expect(loads.world.are_same_records(pair.host, pair.device),
               "host slot " + std::to_string(pair.host) + " has other bytes than were loaded before");
    }
}

// --- batches enqueued range by range

void enqueue_range_by_range(bool queued) {
    Loads loads;
    std::optional<Gate> gate;
    if (queued) gate.emplace(loads.world, loads.submitter);
    Batch batch = loads.world.load("the batch", same_slots());
    submit_one_by_one(loads.submitter, loads.lane, batch);
    if (queued) {
        Gate::expect_waiting(batch);
        gate->open();
    }
    batch.expect_copied();
    loads.world.expect_loaded(batch);
}

void refuse_the_first_range_of_several(bool queued) {
    Loads loads;
    std::optional<Gate> gate;
    if (queued) gate.emplace(loads.world, loads.submitter);
    fail({"cuMemcpyAsync", 1});
    Batch batch = loads.world.load("the batch", same_slots());
    submit_one_by_one(loads.submitter, loads.lane, batch);
    if (queued) gate->open();
    batch.expect_failed(kRefusal);
    expect(!loads.world.has_bytes(0, 0, kGroups.back()), "a range behind the refused one is copied");
    loads.expect_next_is_fine();
}

// --- refusals

void refuse_copies() {
    set_delays({.copy = 100});
    Loads loads;
    for (const int nth : {0, 1, 23, 24, 47, 48, 70, 95}) {
        fail({"cuMemcpyAsync", nth});
        Batch batch = loads.load("the batch refused at copy " + std::to_string(nth), kGroups);
        batch.expect_failed(std::string("cuMemcpyAsync: ") + kRefusal);
        // The batch has ended. If a copy of it were still running, the sanitizer would report a race here.
        const std::size_t plane = nth / kBlocks;
        for (int slot = 0; slot < nth % kBlocks; ++slot) {
            expect(loads.world.has_bytes(slot, slot, {plane, plane + 1}),
                   batch.name + ": ranges enqueued before the refusal were not copied");
        }
        loads.expect_next_is_fine();
    }
}

// Small enough for the calling thread to enqueue.
void refuse_copies_at_once() {
    Loads loads;
    for (const int nth : {0, 1, 2, 7}) {
        fail({"cuMemcpyAsync", nth});
        Batch batch = loads.load("the small batch refused at copy " + std::to_string(nth), kGroups, 2);
        expect(!batch.swap->done()->is_promised(), batch.name + " is left to the submitting thread");
        batch.expect_failed(std::string("cuMemcpyAsync: ") + kRefusal);
        loads.expect_next_is_fine();
    }
}

void refuse_a_wait(bool promised, bool one_by_one) {
    Loads loads;
    Stream engine;
    const EventPtr event = loads.world.event();
    if (promised) event->promise();
    fail({"cuStreamWaitEvent"});
    if (!promised) event->record(&engine);
    loads.submitter.wait(event);
    Batch batch = loads.world.load("the batch behind the wait", same_slots());
    if (one_by_one) {
        // This thread enqueues ranges that come one by one, so the event cannot be recorded after them.
        if (promised) event->record(&engine);
        submit_one_by_one(loads.submitter, loads.lane, batch);
    } else {
        submit(loads.submitter, loads.lane, batch, kGroups);
        if (promised) event->record(&engine);
    }
    Batch next = loads.load("the batch after it", kGroups);
    batch.expect_failed(std::string("cuStreamWaitEvent: ") + kRefusal);
    next.expect_copied();
    loads.world.expect_loaded(next);
}

// --- refused batches

void refuse_a_batch() {
    Loads loads;
    for (const bool queued : {false, true}) {
        Gate gate(loads.world, loads.submitter);
        if (!queued) gate.open();
        Batch before = loads.load("the batch before", kGroups);
        Batch refused = loads.world.load("the refused batch", same_slots());
        loads.submitter.refuse(refused.swap, "there is no ring");
        expect(refused.swap->started(), "a batch that was refused counts as not submitted");
        if (queued) {
            Gate::expect_waiting(refused);
            gate.open();
        }
        await(refused.swap->done(), refused.name);
        expect(before.swap->done()->is_reached(), "the refused batch ends before the one before it");
        refused.expect_failed("there is no ring");
        before.expect_copied();
        loads.world.expect_loaded(before);
        loads.expect_next_is_fine();
    }
}

// --- the moment that is left to the engine

// Loads whose thread begins in an hour, unless someone waits for them.
struct LateLoads {
    World world;
    LaneWorld lane{world.context};
    Submitter submitter{world.context, lane.main(), false, std::chrono::hours(1)};

    Batch load(const std::string &name) {
        Batch batch = world.load(name, same_slots());
        submit(submitter, lane, batch, kGroups);
        return batch;
    }
};

void begin_when_a_stream_waits() {
    LateLoads loads;
    Stream engine;
    Batch first = loads.load("the first batch");
    Batch second = loads.load("the batch behind it");
    for (const Batch *batch : {&first, &second}) Gate::expect_waiting(*batch);
    second.events.front()->hold(&engine);
    for (Batch *batch : {&first, &second}) batch->expect_copied();
    loads.world.expect_loaded(second);
}

void begin_when_the_host_waits() {
    LateLoads loads;
    Batch batch = loads.load("the batch");
    Gate::expect_waiting(batch);
    batch.swap->done()->hurry();
    batch.expect_copied();
}

void begin_when_another_submitter_waits() {
    LateLoads loads;
    LaneWorld lane(loads.world.context);
    Submitter backups(loads.world.context, lane.main(), true);
    Batch load = loads.load("the load");
    Gate::expect_waiting(load);
    Batch backup = loads.world.backup("the backup", {{kBlocks, 0}});
    for (const EventPtr &event : backups.enqueue(backup.swap, lane.lane(), kWhole, {load.swap->done()})) {
        backup.events.push_back(event);
    }
    backup.expect_copied();
    load.expect_copied();
    expect(loads.world.are_same_records(kBlocks, 0), "the backup has other bytes than were loaded before");
}

void begin_at_the_close() {
    LateLoads loads;
    Batch batch = loads.load("the batch");
    loads.submitter.close();
    batch.expect_copied();
}

// --- the way of a small batch

// The second kernel of a staged batch is refused; a direct one launches only the first.
void expect_method(bool light) {
    World world(cuda::SwapChoice::kAuto);
    LaneWorld lane(world.context);
    Submitter submitter(world.context, lane.main(), false);
    const Batch other_way = world.backup("a batch the other way", same_slots(1));
    Batch first = world.load("a batch of the same direction", same_slots(1));
    Batch second = world.load("another one", same_slots(1));
    if (light) second.swap.reset();
    Batch batch = world.load("the batch", same_slots());
    fail({"cuLaunchKernel", 1});
    submit(submitter, lane, batch, kGroups);
    if (light) {
        batch.expect_copied();
        world.expect_loaded(batch);
    } else {
        batch.expect_failed(kRefusal);
    }
}

// --- close

void close_with_work_left() {
    Loads loads;
    Gate gate(loads.world, loads.submitter);
    Batch first = loads.load("the first batch of the queue", kGroups);
    Batch second = loads.load("the second batch of the queue", kWhole, 1);
    std::thread opener([&] {
        for (const Batch *batch : {&first, &second}) Gate::expect_waiting(*batch);
        gate.open();
    });
    loads.submitter.close();
    opener.join();
    for (const Batch *batch : {&first, &second}) {
        expect(!batch->swap->done()->is_promised(), batch->name + " was not put on the stream by `close`");
    }
    Batch late = loads.load("the batch after `close`", kGroups);
    expect(!late.swap->done()->is_promised(), late.name + " waits for a thread that has ended");
    const EventPtr event = loads.world.event();
    loads.submitter.record(event);
    await(event, "the stream after `close`");
    loads.submitter.close();
    for (Batch *batch : {&first, &second, &late}) batch->expect_copied();
    loads.world.expect_loaded(late);
}

const tests::Cases kCases{
    {"last-writer-direct", [] { run_mixed_copies(cuda::SwapChoice::kDirect); }},
    {"last-writer-staged", [] { run_mixed_copies(cuda::SwapChoice::kStaged); }},
    {"last-writer-kernel", [] { run_mixed_copies(cuda::SwapChoice::kKernel); }},
    {"last-writer-slow-calls", [] { run_mixed_copies(cuda::SwapChoice::kDirect, {.call = 200}); }},
    {"last-writer-slow-copies", [] { run_mixed_copies(cuda::SwapChoice::kDirect, {.copy = 200}); }},
    {"promised-event", wait_for_what_is_not_recorded_yet},
    {"ranges-at-once", [] { enqueue_range_by_range(false); }},
    {"ranges-queued", [] { enqueue_range_by_range(true); }},
    {"first-range-refused-at-once", [] { refuse_the_first_range_of_several(false); }},
    {"first-range-refused-queued", [] { refuse_the_first_range_of_several(true); }},
    {"copies-refused", refuse_copies},
    {"copies-refused-at-once", refuse_copies_at_once},
    {"wait-refused", [] { refuse_a_wait(false, false); }},
    {"wait-refused-ranges", [] { refuse_a_wait(false, true); }},
    {"promised-wait-refused", [] { refuse_a_wait(true, false); }},
    {"promised-wait-refused-ranges", [] { refuse_a_wait(true, true); }},
    {"batch-refused", refuse_a_batch},
    {"grace-stream-waits", begin_when_a_stream_waits},
    {"grace-host-waits", begin_when_the_host_waits},
    {"grace-submitter-waits", begin_when_another_submitter_waits},
    {"grace-close", begin_at_the_close},
    {"small-direct", [] { expect_method(true); }},
    {"small-in-a-row-staged", [] { expect_method(false); }},
    {"close", close_with_work_left},
};

}  // namespace
}  // namespace fdcache::stand_in

int main(int count, char **arguments) {
    return fdcache::tests::run_cases(fdcache::stand_in::kCases, count, arguments);
}
