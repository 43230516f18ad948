#include "cuda/swap.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace fdcache::cuda {
namespace {

// Positions ordered by host slot: a radix sort with one byte a pass.
std::vector<std::size_t> by_host_slot(std::span<const std::int32_t> slots) {
    const auto slot = [slots](std::size_t block) { return static_cast<std::uint32_t>(slots[block]); };
    std::vector<std::size_t> order(slots.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    if (std::ranges::is_sorted(slots)) return order;
    const auto most = static_cast<std::uint32_t>(std::ranges::max(slots));
    std::vector<std::size_t> sorted(order.size());
    for (unsigned shift = 0; shift < 32 && most >> shift != 0; shift += 8) {
        std::array<std::size_t, 257> starts{};
        for (const std::size_t block : order) ++starts[(slot(block) >> shift & 0xFF) + 1];
        std::partial_sum(starts.begin(), starts.end(), starts.begin());
        for (const std::size_t block : order) sorted[starts[slot(block) >> shift & 0xFF]++] = block;
        order.swap(sorted);
    }
    return order;
}

}  // namespace

Swap::Swap(std::shared_ptr<const SwapDevice> device, Direction direction,
           std::shared_ptr<const SwapPlanes> planes, SwapRecords records, CopyBlocks blocks,
           const std::array<std::uint8_t, 16> &fingerprint, bool verify)
    : device_(std::move(device)),
      direction_(direction),
      planes_(std::move(planes)),
      records_(std::move(records)),
      blocks_(std::move(blocks)),
      kind_{fingerprint, payload_bytes(*planes_->planes)},
      verify_(verify && direction == Direction::kToDevice),
      faults_(blocks_.size(), BlockFault::kNone),
      sums_(direction == Direction::kToHost ? blocks_.size() : 0, 0),
      begun_(std::make_shared<Event>(device_->context, true)),
      done_(std::make_shared<Event>(device_->context, true)) {
    device_->traffic->add(direction_, 1);
}

void Swap::prepare() {
    const RecordTable &table = *records_.table;
    std::vector<std::int32_t> host_slots;
    host_slots.reserve(blocks_.size());
    order_.reserve(blocks_.size());
    headers_.reserve(blocks_.size());
    rows_.reserve(blocks_.size());
    const std::vector<std::size_t> sorted = by_host_slot(blocks_.host_slots);
    for (std::size_t i = 0; i < sorted.size(); ++i) {
        const std::size_t block = sorted[i];
        prefetch_header(sorted, i);
        if (direction_ == Direction::kToDevice) {
            const SlotHeader header = load_header(header_of(block));
            faults_[block] = check_source(header, blocks_, block, kind_);
            if (faults_[block] != BlockFault::kNone) continue;
            headers_.push_back(header);
        }
        const auto slot = static_cast<std::size_t>(blocks_.host_slots[block]);
        const Address extent = (*records_.extents)[slot / table.records_per_extent];
        order_.push_back(block);
        host_slots.push_back(blocks_.host_slots[block]);
        rows_.push_back(
            {extent + slot % table.records_per_extent * table.record_bytes, 0, blocks_.device_slots[block]});
    }
    runs_ = find_runs(host_slots, table.records_per_extent);
    planner_.emplace(device_->policy, direction_, planes(), table.record_bytes, rows_, runs_);
    std::memcpy(host_table_, rows_.data(), rows_bytes());
}

// Headers of scattered slots miss the caches, so fetch several at a time.
void Swap::prefetch_header(std::span<const std::size_t> order, std::size_t row) const {
    constexpr std::size_t kAhead = 8;
    if (row + kAhead >= order.size()) return;
    const SlotHeader *header = header_of(order[row + kAhead]);
    __builtin_prefetch(header);
    __builtin_prefetch(reinterpret_cast<const std::uint8_t *>(header + 1) - 1);
}

Swap::~Swap() {
    leave_traffic();
}

void Swap::leave_traffic() {
    if (std::exchange(in_traffic_, false)) device_->traffic->add(direction_, -1);
}

void Swap::set_table(std::uint8_t *host, Address device) {
    host_table_ = reinterpret_cast<swap::Block *>(host);
    device_table_ = device;
}

void Swap::promise(std::weak_ptr<Promiser> by) {
    if (!promised_.exchange(true)) done_->promise(std::move(by));
}

void Swap::enqueue(Lane &lane, PlaneRange range, bool unhurried) {
    if (ended_) return;
    try {
        const Current current(context());
        StepRunner runner(context(), device_->kernels, device_->policy, direction_,
                          {planes(), planes_->first_chunk, planes_->chunks, device_table_}, lane);
        if (!planner_) begin(runner, lane);
        const Traffic &traffic = *device_->traffic;
        runner.run(planner_->plan(range, lane.slot_bytes(), traffic.is_contended(direction_),
                                  unhurried && traffic.is_light(direction_)));
        if (range.last == planes().size()) end(runner, lane);
    } catch (const Error &error) {
        context().note(error);
        fail(lane, error.what());
    } catch (const std::exception &error) {
        fail(lane, error.what());
    }
}

void Swap::refuse(StreamHandle main, const std::string &reason) {
    if (ended_) return;
    ended_ = true;
    error_ = reason;
    done_->record(main);
}

void Swap::begin(StepRunner &runner, Lane &lane) {
    prepare();
    if (direction_ == Direction::kToHost) {
        for (const std::size_t block : order_) {
            headers_.push_back(writing_header(blocks_, block, kind_));
            store_header(header_of(block), headers_.back());
        }
        // The header must say that the record is being written before any of its bytes change.
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    begun_->record(lane.main());
    if (!rows_.empty()) {
        runner.copy_table(reinterpret_cast<Address>(host_table_), device_table_, rows_bytes());
    }
    lane.hand_over(lane.main(), lane.copy());
}

void Swap::end(StepRunner &runner, Lane &lane) {
    if (verify_ && !rows_.empty()) runner.sum({0, planes().size()}, {0, rows_.size()});
    if ((verify_ || direction_ == Direction::kToHost) && !rows_.empty()) {
        runner.copy_table(device_table_, reinterpret_cast<Address>(host_table_), rows_bytes());
    }
    ended_ = true;
    done_->record(lane.main());
    const bool all_there =
        std::ranges::all_of(faults_, [](BlockFault fault) { return fault == BlockFault::kNone; });
    certain_.store(all_there && !verify_, std::memory_order_release);
}

void Swap::fail(Lane &lane, const std::string &reason) {
    error_ = reason;
    ended_ = true;
    try {
        const Current current(context());
        lane.join_copies();
    } catch (const Error &second) {
        // Copies of this batch may still write, and no call tells when they end.
        context().lose(second);
    }
    done_->record(lane.main());
}

void Swap::finish() {
    if (finished_) return;
    finished_ = true;
    leave_traffic();
    if (const auto lost = context().lost(); lost && error_.empty()) error_ = *lost;
    if (error_.empty()) {
        try {
            seconds_ = done_->seconds_since(*begun_);
        } catch (const Error &error) {
            context().note(error);
            error_ = error.what();
        }
    }
    if (!error_.empty()) {
        std::ranges::replace(faults_, BlockFault::kNone, BlockFault::kDevice);
        return;
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (std::size_t row = 0; row < order_.size(); ++row) {
        prefetch_header(order_, row);
        if (direction_ == Direction::kToHost) {
            finish_out(row);
        } else {
            finish_in(row);
        }
    }
}

void Swap::finish_out(std::size_t row) {
    const std::size_t block = order_[row];
    SlotHeader *shared = header_of(block);
    if (load_header(shared) != headers_[row]) {
        faults_[block] = BlockFault::kChanged;
        return;
    }
    sums_[block] = finish_checksum(host_table_[row].sum, kind_.payload_bytes);
    store_header(shared, ready_header(headers_[row], sums_[block]));
}

void Swap::finish_in(std::size_t row) {
    const std::size_t block = order_[row];
    if (load_header(header_of(block)) != headers_[row]) {
        faults_[block] = BlockFault::kChanged;
    } else if (verify_ &&
               finish_checksum(host_table_[row].sum, kind_.payload_bytes) != headers_[row].payload_checksum) {
        faults_[block] = BlockFault::kCorrupt;
    }
}

std::uint64_t Swap::copied_bytes() const {
    const auto copied = std::count(faults_.begin(), faults_.end(), BlockFault::kNone);
    return kind_.payload_bytes * static_cast<std::uint64_t>(copied);
}

}  // namespace fdcache::cuda
