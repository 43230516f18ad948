// Copies of the CPU device: streams, events, batches, and threads that cancel or close.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "copy/block_copy.hpp"
#include "copy/copy_stream.hpp"
#include "copy/host_memory.hpp"
#include "native/checks.hpp"
#include "native/threads.hpp"

namespace fdcache::tests {
namespace {

constexpr int kBlocks = 12;
constexpr std::size_t kPlanes = 3;
constexpr std::size_t kPlaneBytes = 1000;  // no multiple of a word
constexpr std::size_t kPlaneStride = 1024;
constexpr std::size_t kExtentRecords = 5;
constexpr std::array<std::uint8_t, 16> kFingerprint{1, 2, 3};
constexpr auto kPatience = std::chrono::seconds(60);

using CopyPtr = std::shared_ptr<BlockCopy>;

Digest digest(int number) {
    Digest made;
    made.bytes.fill(static_cast<std::uint8_t>(number + 1));
    return made;
}

void await(const std::shared_ptr<Event> &event) {
    expect(event->wait_until(std::chrono::steady_clock::now() + kPatience), "an event is never set");
}

// Device blocks and host records, in extents that end where their last record does.
class Memory {
  public:
    Memory() {
        for (std::size_t i = 0; i < kPlanes; ++i) {
            device_.emplace_back(kBlocks * kPlaneStride);
            planes.push_back({device_[i].data(), kPlaneStride, kPlaneBytes, i * kPlaneStride});
        }
        records.records_per_extent = kExtentRecords;
        records.record_bytes = kPlanes * kPlaneStride;
        records.num_slots = kBlocks;
        for (std::size_t first = 0; first < kBlocks; first += kExtentRecords) {
            const std::size_t count = std::min(kExtentRecords, kBlocks - first);
            extents_.push_back(std::make_unique<HostMemory>(count * records.record_bytes));
            extents_.back()->populate(2);
            headers_.emplace_back(count);
            records.extents.push_back(extents_.back()->data());
            records.headers.push_back(headers_.back().data());
        }
    }

    void fill(int block, std::uint8_t seed) {
        for (const Plane &plane : planes)
            for (std::size_t i = 0; i < plane.nbytes; ++i)
                plane.block(block)[i] = static_cast<std::uint8_t>(seed + 31 * i + plane.offset);
    }
    bool has(int block, std::uint8_t seed) const {
        for (const Plane &plane : planes)
            for (std::size_t i = 0; i < plane.nbytes; ++i)
                if (plane.block(block)[i] != static_cast<std::uint8_t>(seed + 31 * i + plane.offset))
                    return false;
        return true;
    }

    // A batch of blocks, each with the host slot of its number.
    CopyPtr copy(Direction direction, const std::vector<int> &blocks, std::uint32_t generation = 1,
                 bool verify = true) const {
        const auto batch = std::make_shared<Batch>(blocks, generation);
        CopyBlocks copied{blocks, blocks, batch->generations, batch->hashes, batch->parents, {}, verify};
        batch->copy.emplace(direction, std::make_shared<const std::vector<Plane>>(planes),
                            std::make_shared<const RecordTable>(records), std::move(copied), kFingerprint);
        return {batch, &*batch->copy};
    }

    std::vector<Plane> planes;
    RecordTable records;

  private:
    // A copy and the arrays that it uses in place.
    struct Batch {
        Batch(const std::vector<int> &blocks, std::uint32_t generation)
            : generations(blocks.size(), generation), parents(blocks.size()) {
            for (const int block : blocks) hashes.push_back(digest(block));
        }

        std::vector<std::uint32_t> generations;
        std::vector<Digest> hashes, parents;
        std::optional<BlockCopy> copy;
    };

    std::vector<std::vector<std::uint8_t>> device_;
    std::vector<std::unique_ptr<HostMemory>> extents_;
    std::vector<std::vector<SlotHeader>> headers_;
};

std::vector<int> blocks_from(int first, int last) {
    std::vector<int> blocks;
    for (int block = first; block < last; ++block) blocks.push_back(block);
    return blocks;
}

void enqueue(CopyStream &stream, const CopyPtr &copy) {
    for (std::size_t plane = 0; plane < kPlanes; ++plane) stream.copy(copy, {plane, plane + 1});
}

void expect_copied(const CopyPtr &copy) {
    await(copy->done());
    for (std::size_t i = 0; i < copy->num_blocks(); ++i)
        expect(copy->faults()[i] == BlockFault::kNone,
               "a block has fault " + std::to_string(static_cast<int>(copy->faults()[i])));
}

// Backups on one stream, the engine's writes between, loads on another: each waits for the one before.
void write_back_and_load() {
    Memory memory;
    CopyStream backups(2, true), loads(3, false);
    for (std::uint32_t round = 1; round <= 30; ++round) {
        for (int block = 0; block < kBlocks; ++block)
            memory.fill(block, static_cast<std::uint8_t>(round + block));
        const CopyPtr out = memory.copy(Direction::kToHost, blocks_from(0, kBlocks), round);
        const auto copied = std::make_shared<Event>(), cleared = std::make_shared<Event>();
        enqueue(backups, out);
        backups.record(copied);
        loads.wait(cleared);
        const CopyPtr in = memory.copy(Direction::kToDevice, blocks_from(0, kBlocks), round);
        enqueue(loads, in);
        await(copied);
        for (int block = 0; block < kBlocks; ++block) memory.fill(block, 0);
        cleared->set();
        expect_copied(out);
        expect_copied(in);
        for (int block = 0; block < kBlocks; ++block)
            expect(memory.has(block, static_cast<std::uint8_t>(round + block)), "other bytes came back");
    }
}

// Threads submit batches for their own blocks to one stream.
void share_a_stream() {
    Memory memory;
    CopyStream stream(2, false);
    run_threads(3, [&](int thread) {
        const std::vector<int> own = blocks_from(4 * thread, 4 * thread + 4);
        for (std::uint32_t round = 1; round <= 60; ++round) {
            for (const int block : own) memory.fill(block, static_cast<std::uint8_t>(round));
            const CopyPtr out = memory.copy(Direction::kToHost, own, round);
            enqueue(stream, out);
            expect_copied(out);
            for (const int block : own) memory.fill(block, 0);
            const CopyPtr in = memory.copy(Direction::kToDevice, own, round);
            enqueue(stream, in);
            expect_copied(in);
            for (const int block : own)
                expect(memory.has(block, static_cast<std::uint8_t>(round)), "other bytes");
            expect(in->copied_bytes() == own.size() * kPlanes * kPlaneBytes, "not all bytes count as copied");
        }
    });
}

// A batch is cancelled as a whole, and then touches nothing, or it runs.
void cancel_beside_the_stream() {
    Memory memory;
    CopyStream stream(2, false);
    int cancelled = 0;
    for (std::uint32_t round = 1; round <= 200; ++round) {
        for (int block = 0; block < kBlocks; ++block) memory.fill(block, 1);
        const CopyPtr out = memory.copy(Direction::kToHost, blocks_from(0, kBlocks), round);
        enqueue(stream, out);
        expect_copied(out);
        for (int block = 0; block < kBlocks; ++block) memory.fill(block, 2);
        const CopyPtr in = memory.copy(Direction::kToDevice, blocks_from(0, kBlocks), round);
        // The last batch has run by the time that it is cancelled.
        const std::chrono::microseconds delay(round < 200 ? round % 20 * 20 : 200'000);
        std::jthread canceller([&] {
            std::this_thread::sleep_for(delay);
            cancelled += in->cancel();
        });
        enqueue(stream, in);
        await(in->done());
        canceller.join();
        for (int block = 0; block < kBlocks; ++block)
            expect(memory.has(block, in->cancelled() ? 2 : 1), "a cancelled batch is copied in part");
    }
    expect(cancelled < 200, "no batch ran");
}

// `close` ends every batch and sets every event; copies that wait for it see one or the other.
void close_with_work_left() {
    for (int round = 0; round < 30; ++round) {
        Memory memory;
        CopyStream stream(2, false);
        std::vector<CopyPtr> copies;
        std::vector<std::shared_ptr<Event>> events;
        for (int i = 0; i < 6; ++i) {
            copies.push_back(memory.copy(Direction::kToHost, blocks_from(2 * i, 2 * i + 2), 1));
            events.push_back(std::make_shared<Event>());
            enqueue(stream, copies.back());
            stream.record(events.back());
            if (i == 3 && round % 2) stream.wait(std::make_shared<Event>());  // is never set
        }
        std::jthread waiter([&] { Event::wait_any(events, std::nullopt); });
        stream.close();
        for (const auto &event : events) await(event);
        for (const CopyPtr &copy : copies) {
            await(copy->done());
            expect(copy->faults()[0] == BlockFault::kNone || copy->faults()[0] == BlockFault::kAbandoned,
                   "a fault");
        }
    }
}

// Loads of slots that are empty, have other content, or are damaged.
void refuse_other_content() {
    Memory memory;
    CopyStream stream(1, false);
    const auto load = [&](int block, std::uint32_t generation) {
        const CopyPtr in = memory.copy(Direction::kToDevice, {block}, generation);
        enqueue(stream, in);
        await(in->done());
        return in->faults()[0];
    };
    expect(load(0, 1) == BlockFault::kNotReady, "a slot that was never written is loaded");
    memory.fill(0, 9);
    const CopyPtr out = memory.copy(Direction::kToHost, {0}, 1);
    enqueue(stream, out);
    expect_copied(out);
    expect(load(0, 2) == BlockFault::kOtherGeneration, "another generation is loaded");
    memory.records.record(0)[kPlaneStride] ^= 1;
    expect(load(0, 1) == BlockFault::kCorrupt, "damaged bytes are loaded");
    memory.records.header(0)->parent.bytes[0] ^= 1;
    expect(load(0, 1) == BlockFault::kNoHeader, "a damaged header is believed");
}

const Cases kCases{
    {"write-back-and-load", write_back_and_load}, {"share-a-stream", share_a_stream},
    {"cancel", cancel_beside_the_stream},         {"close", close_with_work_left},
    {"other-content", refuse_other_content},
};

}  // namespace
}  // namespace fdcache::tests

int main(int count, char **arguments) {
    return fdcache::tests::run_cases(fdcache::tests::kCases, count, arguments);
}
