#include "native/copy_world.hpp"

#include <array>
#include <chrono>
#include <cstring>
#include <thread>

namespace fdcache::stand_in {
namespace {

using cuda::Address;

constexpr int kHostSlots = 2 * kBlocks;
constexpr std::size_t kSlotBytes = std::size_t{1} << 20;  // of a ring
constexpr unsigned kRingSlots = 3;
constexpr std::uint32_t kGeneration = 1;
constexpr std::array<std::uint8_t, 16> kFingerprint{};

// Blocks of these pairs, all with the same generation and hashes, which the caller keeps.
CopyBlocks blocks_of(const std::vector<SlotPair> &pairs, std::vector<std::uint32_t> &generations,
                     std::vector<Digest> &hashes) {
    generations.assign(pairs.size(), kGeneration);
    hashes.assign(pairs.size(), Digest{});
    CopyBlocks blocks;
    for (const SlotPair &pair : pairs) {
        blocks.host_slots.push_back(pair.host);
        blocks.device_slots.push_back(pair.device);
    }
    blocks.generations = generations;
    blocks.hashes = blocks.parents = hashes;
    return blocks;
}

}  // namespace

void await(const EventPtr &event, const std::string &name) {
    using Clock = std::chrono::steady_clock;
    constexpr auto kPatience = std::chrono::seconds(60);
    const auto start = Clock::now();
    while (!event->is_reached()) {
        const std::string what = event->is_promised() ? " is never recorded" : " never ends";
        expect(Clock::now() - start < kPatience, "an event of " + name + what);
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

std::vector<SlotPair> same_slots(int count) {
    std::vector<SlotPair> pairs;
    for (int slot = 0; slot < count; ++slot) pairs.push_back({slot, slot});
    return pairs;
}

void Batch::finish() {
    for (const EventPtr &event : events) await(event, name);
    await(swap->done(), name);
    swap->finish();
}

void Batch::expect_copied() {
    finish();
    expect(swap->error().empty(), name + " failed: " + swap->error());
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        const auto fault = static_cast<int>(swap->faults()[i]);
        expect(fault == 0, name + ": block " + std::to_string(i) + " has fault " + std::to_string(fault));
    }
    expect(swap->copied_bytes() == swap->total_bytes(), name + ": not all bytes count as copied");
}

void Batch::expect_failed(const std::string &words) {
    finish();
    expect(swap->error().find(words) != std::string::npos,
           name + ": the error is '" + swap->error() + "' rather than '" + words + "'");
    for (const BlockFault fault : swap->faults()) {
        expect(fault == BlockFault::kDevice, name + ": a block of the failed batch has another fault");
    }
    expect(swap->copied_bytes() == 0, name + ": blocks of the failed batch count as copied");
}

LaneWorld::LaneWorld(std::shared_ptr<cuda::Context> context)
    : ring_(kRingSlots * kSlotBytes),
      lane_(std::make_shared<cuda::Lane>(std::move(context), &main_, &copy_,
                                         reinterpret_cast<Address>(ring_.data()), kSlotBytes, kRingSlots)) {}

void submit(cuda::Submitter &submitter, const LaneWorld &lane, Batch &batch,
            const std::vector<PlaneRange> &ranges) {
    for (const EventPtr &event : submitter.enqueue(batch.swap, lane.lane(), ranges)) {
        batch.events.push_back(event);
    }
}

World::World(cuda::SwapChoice way)
    : context(std::make_shared<cuda::Context>(0)),
      device_(kBlocks * kRecordBytes),
      host_(kHostSlots * kRecordBytes),
      headers_(kHostSlots) {
    cuda::SwapPolicy policy{};
    policy.choice = way;
    policy.to_host = policy.to_device = {1, 1, host_.size()};
    policy.staging_bytes = kSlotBytes;
    policy.kernel_ctas = 2;
    policy.transpose_ctas = 4;
    policy.direct_pieces = policy.small_pieces = kBlocks * kPlanes;
    policy.batched = way == cuda::SwapChoice::kAuto;
    gpu_ = std::make_shared<const cuda::SwapDevice>(context, kernels(), policy);
    std::vector<Plane> planes;
    for (std::size_t i = 0; i < kPlanes; ++i) {
        planes.push_back(
            {device_.data() + i * kBlocks * kPlaneBytes, kPlaneBytes, kPlaneBytes, i * kPlaneBytes});
    }
    chunks_ = cuda::make_chunks(planes, kRecordBytes);
    planes_ = std::make_shared<const cuda::SwapPlanes>(std::make_shared<const std::vector<Plane>>(planes),
                                                       reinterpret_cast<Address>(chunks_.chunks.data()),
                                                       chunks_.first);
    records_ = std::make_shared<const RecordTable>(
        RecordTable{{host_.data()}, kHostSlots, kRecordBytes, {headers_.data()}, kHostSlots});
    auto *words = reinterpret_cast<std::uint64_t *>(host_.data());
    for (std::size_t i = 0; i < kBlocks * kRecordBytes / sizeof *words; ++i) {
        words[i] = (i + 1) * 0x9E3779B97F4A7C15ULL;
    }
    std::vector<std::uint32_t> generations;
    std::vector<Digest> hashes;
    const CopyBlocks blocks = blocks_of(same_slots(), generations, hashes);
    for (int slot = 0; slot < kBlocks; ++slot) {
        headers_[slot] = ready_header(writing_header(blocks, slot, {kFingerprint, kRecordBytes}), 0);
    }
}

EventPtr World::promised() const {
    const EventPtr made = event();
    made->promise();
    return made;
}

Batch World::load(std::string name, std::vector<SlotPair> pairs) const {
    return make(Direction::kToDevice, std::move(name), std::move(pairs));
}

Batch World::backup(std::string name, std::vector<SlotPair> pairs) const {
    return make(Direction::kToHost, std::move(name), std::move(pairs));
}

Batch World::make(Direction direction, std::string name, std::vector<SlotPair> pairs) const {
    Batch batch{std::move(name), std::move(pairs), {}, {}, {}, {}, {}, {}};
    CopyBlocks blocks = blocks_of(batch.pairs, batch.generations, batch.hashes);
    batch.host_table.resize(blocks.size());
    batch.device_table.resize(blocks.size());
    const auto extents =
        std::make_shared<const std::vector<Address>>(1, reinterpret_cast<Address>(host_.data()));
    batch.swap = std::make_shared<cuda::Swap>(gpu_, direction, planes_, cuda::SwapRecords{records_, extents},
                                              std::move(blocks), kFingerprint, false);
    batch.swap->set_table(reinterpret_cast<std::uint8_t *>(batch.host_table.data()),
                          reinterpret_cast<Address>(batch.device_table.data()));
    return batch;
}

bool World::has_bytes(int device, int host, PlaneRange planes) const {
    for (std::size_t i = planes.first; i < planes.last; ++i) {
        const Plane &plane = (*planes_->planes)[i];
        const std::uint8_t *record = records_->record(host) + plane.offset;
        if (std::memcmp(plane.block(device), record, kPlaneBytes) != 0) return false;
    }
    return true;
}

bool World::are_same_records(int host, int other) const {
    return std::memcmp(records_->record(host), records_->record(other), kRecordBytes) == 0;
}

void World::expect_loaded(const Batch &batch) const {
    for (const SlotPair &pair : batch.pairs) {
        expect(has_bytes(pair.device, pair.host), batch.name + ": block " + std::to_string(pair.device) +
                                                      " has other bytes than host slot " +
                                                      std::to_string(pair.host));
    }
}

}  // namespace fdcache::stand_in
