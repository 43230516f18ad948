// One batch of block copies in one direction: the blocks, how far each has come, and what went wrong.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/event.hpp"
#include "core/record.hpp"
#include "core/record_check.hpp"

namespace fdcache {

enum class Direction : std::uint8_t { kToHost, kToDevice };

// A batch is enqueued plane range by plane range, in order; a copy to the host computes the record checksum
// over the ranges and stamps the slot ready with the last; with `verify` a load sums what has arrived and
// compares. It owns none of the memory it names.
class BlockCopy {
  public:
    BlockCopy(Direction direction, std::vector<Plane> planes, RecordTable records,
              std::vector<BlockPair> pairs, const std::array<std::uint8_t, 16> &fingerprint,
              bool verify = false);

    std::size_t num_blocks() const { return pairs_.size(); }
    std::size_t num_planes() const { return planes_.size(); }

    // Takes the batch back if none of it has begun; it then touches no memory ever.
    bool cancel();
    bool started() const { return phase_.load() != Phase::kPending; }
    bool cancelled() const { return phase_.load() == Phase::kCancelled; }
    // Set once no block will be touched any more.
    const std::shared_ptr<Event> &done() const { return done_; }

    // For the stream. A range is begun once, its blocks are copied by any threads, and then it is ended.
    bool begin();
    void copy_block(std::size_t index, PlaneRange range);
    void end(PlaneRange range);
    void abandon();

    // Valid once done is set.
    BlockFault fault(std::size_t index) const { return faults_[index]; }
    // One per block for copies to the host, none for loads.
    std::vector<std::uint64_t> checksums() const {
        return direction_ == Direction::kToHost ? sums_ : std::vector<std::uint64_t>{};
    }
    std::uint64_t copied_bytes() const;
    double seconds() const { return seconds_; }

  private:
    enum class Phase : std::uint8_t { kPending, kRunning, kCancelled };

    void copy_out(std::size_t index, PlaneRange range);
    void copy_in(std::size_t index, PlaneRange range);

    const Direction direction_;
    const std::vector<Plane> planes_;
    const RecordTable records_;
    const std::vector<BlockPair> pairs_;
    const RecordKind kind_;
    const bool verify_;
    std::atomic<Phase> phase_{Phase::kPending};
    std::vector<BlockFault> faults_;
    std::vector<std::uint64_t> sums_;
    double seconds_ = 0;
    std::chrono::steady_clock::time_point range_start_{};
    std::shared_ptr<Event> done_ = std::make_shared<Event>();
};

}  // namespace fdcache
