#include "cuda/swap.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace fdcache::cuda {
namespace {

// Positions ordered by host slot: a radix sort with one byte a pass.
std::vector<std::size_t> by_host_slot(const std::vector<BlockPair> &pairs) {
    const auto slot = [&pairs](std::size_t pair) {
        return static_cast<std::uint32_t>(pairs[pair].host_slot);
    };
    std::vector<std::size_t> order(pairs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    if (std::ranges::is_sorted(order, {}, slot)) return order;
    const std::uint32_t most = slot(std::ranges::max(order, {}, slot));
    std::vector<std::size_t> sorted(order.size());
    for (unsigned shift = 0; shift < 32 && most >> shift != 0; shift += 8) {
        std::array<std::size_t, 257> starts{};
        for (const std::size_t pair : order) ++starts[(slot(pair) >> shift & 0xFF) + 1];
        std::partial_sum(starts.begin(), starts.end(), starts.begin());
        for (const std::size_t pair : order) sorted[starts[slot(pair) >> shift & 0xFF]++] = pair;
        order.swap(sorted);
    }
    return order;
}

}  // namespace

Swap::Swap(std::shared_ptr<Context> context, std::shared_ptr<Traffic> traffic, Kernels kernels,
           const SwapPolicy &policy, Direction direction, std::vector<Plane> planes, Address chunks,
           std::vector<unsigned> first_chunk, RecordTable records, std::vector<Address> extents,
           std::vector<BlockPair> pairs, const std::array<std::uint8_t, 16> &fingerprint, bool verify)
    : context_(std::move(context)),
      traffic_(std::move(traffic)),
      kernels_(kernels),
      policy_(policy),
      direction_(direction),
      planes_(std::move(planes)),
      chunks_(chunks),
      first_chunk_(std::move(first_chunk)),
      records_(std::move(records)),
      extents_(std::move(extents)),
      pairs_(std::move(pairs)),
      kind_{fingerprint, payload_bytes(planes_)},
      verify_(verify && direction == Direction::kToDevice),
      faults_(pairs_.size(), BlockFault::kNone),
      sums_(direction == Direction::kToHost ? pairs_.size() : 0, 0),
      begun_(std::make_shared<Event>(context_, true)),
      done_(std::make_shared<Event>(context_, true)) {
    traffic_->add(direction_, 1);
}

void Swap::prepare() {
    std::vector<std::int32_t> host_slots;
    host_slots.reserve(pairs_.size());
    order_.reserve(pairs_.size());
    headers_.reserve(pairs_.size());
    rows_.reserve(pairs_.size());
    const std::vector<std::size_t> sorted = by_host_slot(pairs_);
    for (std::size_t i = 0; i < sorted.size(); ++i) {
        const std::size_t pair = sorted[i];
        const BlockPair &wanted = pairs_[pair];
        prefetch_header(sorted, i);
        if (direction_ == Direction::kToDevice) {
            const SlotHeader header = load_header(records_.header(wanted.host_slot));
            faults_[pair] = check_source(header, wanted, kind_);
            if (faults_[pair] != BlockFault::kNone) continue;
            headers_.push_back(header);
        }
        const auto slot = static_cast<std::size_t>(wanted.host_slot);
        const Address extent = extents_[slot / records_.records_per_extent];
        order_.push_back(pair);
        host_slots.push_back(wanted.host_slot);
        rows_.push_back(
            {extent + slot % records_.records_per_extent * records_.record_bytes, 0, wanted.device_slot});
    }
    runs_ = find_runs(host_slots, records_.records_per_extent);
    planner_.emplace(policy_, direction_, planes_, records_.record_bytes, rows_, runs_);
    std::memcpy(host_table_, rows_.data(), rows_bytes());
}

// Headers of scattered slots miss the caches, so fetch several at a time.
void Swap::prefetch_header(std::span<const std::size_t> order, std::size_t row) const {
    constexpr std::size_t kAhead = 8;
    if (row + kAhead >= order.size()) return;
    const SlotHeader *header = records_.header(pairs_[order[row + kAhead]].host_slot);
    __builtin_prefetch(header);
    __builtin_prefetch(reinterpret_cast<const std::uint8_t *>(header + 1) - 1);
}

Swap::~Swap() {
    leave_traffic();
}

void Swap::leave_traffic() {
    if (std::exchange(in_traffic_, false)) traffic_->add(direction_, -1);
}

void Swap::set_table(std::uint8_t *host, Address device) {
    host_table_ = reinterpret_cast<swap::Block *>(host);
    device_table_ = device;
}

void Swap::promise() {
    if (!promised_.exchange(true)) done_->promise();
}

void Swap::enqueue(Lane &lane, PlaneRange range) {
    if (ended_) return;
    try {
        const Current current(*context_);
        StepRunner runner(*context_, kernels_, policy_, direction_,
                          {planes_, first_chunk_, chunks_, device_table_}, lane);
        if (!planner_) begin(runner, lane);
        runner.run(planner_->plan(range, lane.slot_bytes(), traffic_->is_contended(direction_)));
        if (range.last == planes_.size()) end(runner, lane);
    } catch (const Error &error) {
        context_->note(error);
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
        for (const std::size_t pair : order_) {
            headers_.push_back(writing_header(pairs_[pair], kind_));
            store_header(records_.header(pairs_[pair].host_slot), headers_.back());
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
    if (verify_ && !rows_.empty()) runner.sum({0, planes_.size()}, {0, rows_.size()});
    if ((verify_ || direction_ == Direction::kToHost) && !rows_.empty()) {
        runner.copy_table(device_table_, reinterpret_cast<Address>(host_table_), rows_bytes());
    }
    ended_ = true;
    done_->record(lane.main());
}

void Swap::fail(Lane &lane, const std::string &reason) {
    error_ = reason;
    ended_ = true;
    try {
        const Current current(*context_);
        lane.join_copies();
    } catch (const Error &second) {
        // Copies of this batch may still write, and no call tells when they end.
        context_->lose(second);
    }
    done_->record(lane.main());
}

void Swap::finish() {
    if (finished_) return;
    finished_ = true;
    leave_traffic();
    if (const auto lost = context_->lost(); lost && error_.empty()) error_ = *lost;
    if (error_.empty()) {
        try {
            seconds_ = done_->seconds_since(*begun_);
        } catch (const Error &error) {
            context_->note(error);
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
    const std::size_t pair = order_[row];
    SlotHeader *shared = records_.header(pairs_[pair].host_slot);
    if (load_header(shared) != headers_[row]) {
        faults_[pair] = BlockFault::kChanged;
        return;
    }
    sums_[pair] = finish_checksum(host_table_[row].sum, kind_.payload_bytes);
    store_header(shared, ready_header(headers_[row], sums_[pair]));
}

void Swap::finish_in(std::size_t row) {
    const std::size_t pair = order_[row];
    if (load_header(records_.header(pairs_[pair].host_slot)) != headers_[row]) {
        faults_[pair] = BlockFault::kChanged;
    } else if (verify_ &&
               finish_checksum(host_table_[row].sum, kind_.payload_bytes) != headers_[row].payload_checksum) {
        faults_[pair] = BlockFault::kCorrupt;
    }
}

std::uint64_t Swap::copied_bytes() const {
    const auto copied = std::count(faults_.begin(), faults_.end(), BlockFault::kNone);
    return kind_.payload_bytes * static_cast<std::uint64_t>(copied);
}

}  // namespace fdcache::cuda
