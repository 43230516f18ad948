#include "copy/block_copy.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hash/checksum.hpp"

namespace fdcache {

BlockCopy::BlockCopy(Direction direction, std::shared_ptr<const std::vector<Plane>> planes,
                     std::shared_ptr<const RecordTable> records, CopyBlocks blocks,
                     const std::array<std::uint8_t, 16> &fingerprint)
    : direction_(direction),
      planes_(std::move(planes)),
      records_(std::move(records)),
      blocks_(std::move(blocks)),
      kind_{fingerprint, payload_bytes(*planes_)},
      faults_(blocks_.size(), BlockFault::kNone),
      sums_(blocks_.size(), 0) {}

bool BlockCopy::cancel() {
    Phase expected = Phase::kPending;
    if (!phase_.compare_exchange_strong(expected, Phase::kCancelled)) return false;
    std::fill(faults_.begin(), faults_.end(), BlockFault::kCancelled);
    done_->set();
    return true;
}

bool BlockCopy::begin() {
    Phase expected = Phase::kPending;
    if (!phase_.compare_exchange_strong(expected, Phase::kRunning) && expected == Phase::kCancelled)
        return false;
    range_start_ = std::chrono::steady_clock::now();
    return true;
}

void BlockCopy::copy_block(std::size_t index, PlaneRange range) {
    if (faults_[index] != BlockFault::kNone) return;
    if (direction_ == Direction::kToHost) {
        copy_out(index, range);
    } else {
        copy_in(index, range);
    }
}

void BlockCopy::end(PlaneRange range) {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - range_start_).count();
    if (range.last == num_planes()) done_->set();
}

void BlockCopy::abandon() {
    Phase expected = Phase::kPending;
    phase_.compare_exchange_strong(expected, Phase::kRunning);
    if (expected == Phase::kCancelled || done_->is_set()) return;
    for (auto &fault : faults_) {
        if (fault == BlockFault::kNone) fault = BlockFault::kAbandoned;
    }
    done_->set();
}

std::uint64_t BlockCopy::copied_bytes() const {
    return kind_.payload_bytes *
           static_cast<std::uint64_t>(std::count(faults_.begin(), faults_.end(), BlockFault::kNone));
}

void BlockCopy::copy_out(std::size_t index, PlaneRange range) {
    const std::int32_t host_slot = blocks_.host_slots[index];
    SlotHeader *shared = records_->header(host_slot);
    const SlotHeader header = writing_header(blocks_, index, kind_);
    if (range.first == 0) {
        store_header(shared, header);
        // The header must say that the record is being written before any of its bytes change.
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    std::uint8_t *record = records_->record(host_slot);
    for (std::size_t i = range.first; i < range.last; ++i) {
        const Plane &plane = (*planes_)[i];
        sums_[index] += copy_with_checksum(record + plane.offset, plane.block(blocks_.device_slots[index]),
                                           plane.nbytes, plane.offset / 8);
    }
    if (range.last != num_planes()) return;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (load_header(shared) != header) {
        faults_[index] = BlockFault::kChanged;
        return;
    }
    sums_[index] = finish_checksum(sums_[index], kind_.payload_bytes);
    store_header(shared, ready_header(header, sums_[index]));
}

void BlockCopy::copy_in(std::size_t index, PlaneRange range) {
    const std::int32_t host_slot = blocks_.host_slots[index];
    const bool verify = blocks_.verifies(index);
    const SlotHeader *shared = records_->header(host_slot);
    const SlotHeader before = load_header(shared);
    if (const BlockFault fault = check_source(before, blocks_, index, kind_); fault != BlockFault::kNone) {
        faults_[index] = fault;
        return;
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const std::uint8_t *record = records_->record(host_slot);
    for (std::size_t i = range.first; i < range.last; ++i) {
        const Plane &plane = (*planes_)[i];
        std::uint8_t *target = plane.block(blocks_.device_slots[index]);
        if (verify) {
            sums_[index] += copy_with_checksum(target, record + plane.offset, plane.nbytes, plane.offset / 8);
        } else {
            std::memcpy(target, record + plane.offset, plane.nbytes);
        }
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (load_header(shared) != before) {
        faults_[index] = BlockFault::kChanged;
    } else if (verify && range.last == num_planes() &&
               finish_checksum(sums_[index], kind_.payload_bytes) != before.payload_checksum) {
        faults_[index] = BlockFault::kCorrupt;
    }
}

}  // namespace fdcache
