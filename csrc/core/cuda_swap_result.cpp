#include <algorithm>

#include "core/cuda_swap.hpp"

namespace fdcache::cuda {

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

}  // namespace fdcache::cuda
