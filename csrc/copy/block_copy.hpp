// One batch of block copies in one direction on the CPU: its blocks, their progress and their faults.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "copy/event.hpp"
#include "copy/record.hpp"

namespace fdcache {

// A batch is enqueued plane range by plane range, in order. A copy to the host computes the record checksum
// over the ranges and marks the slot ready with the last one. A load that verifies a block computes the
// checksum of the copied bytes and compares it. Owns no memory of planes or records.
class BlockCopy {
  public:
    BlockCopy(Direction direction, std::shared_ptr<const std::vector<Plane>> planes,
              std::shared_ptr<const RecordTable> records, CopyBlocks blocks,
              const std::array<std::uint8_t, 16> &fingerprint);

    std::size_t num_blocks() const { return blocks_.size(); }
    std::size_t num_planes() const { return planes_->size(); }

    // Cancels the batch unless it has started. A cancelled batch never touches memory.
    bool cancel();
    bool started() const { return phase_.load() != Phase::kPending; }
    bool cancelled() const { return phase_.load() == Phase::kCancelled; }
    // Set once the batch will not touch memory any more.
    const std::shared_ptr<Event> &done() const { return done_; }

    // For the stream: begin a range once, copy its blocks from any threads, then end the range.
    bool begin();
    void copy_block(std::size_t index, PlaneRange range);
    void end(PlaneRange range);
    void abandon();

    // Valid once `done` is set.
    const std::vector<BlockFault> &faults() const { return faults_; }
    // One per block of a copy to the host; empty for loads.
    std::span<const std::uint64_t> checksums() const {
        return direction_ == Direction::kToHost ? sums_ : std::span<const std::uint64_t>{};
    }
    std::uint64_t copied_bytes() const;
    double seconds() const { return seconds_; }

  private:
    enum class Phase : std::uint8_t { kPending, kRunning, kCancelled };

    void copy_out(std::size_t index, PlaneRange range);
    void copy_in(std::size_t index, PlaneRange range);

    const Direction direction_;
    const std::shared_ptr<const std::vector<Plane>> planes_;
    const std::shared_ptr<const RecordTable> records_;
    const CopyBlocks blocks_;
    const RecordKind kind_;
    std::atomic<Phase> phase_{Phase::kPending};
    std::vector<BlockFault> faults_;
    std::vector<std::uint64_t> sums_;
    double seconds_ = 0;
    std::chrono::steady_clock::time_point range_start_{};
    std::shared_ptr<Event> done_ = std::make_shared<Event>();
};

}  // namespace fdcache
