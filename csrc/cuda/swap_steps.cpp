#include "cuda/swap_steps.hpp"

#include <algorithm>
#include <utility>

namespace fdcache::cuda {
namespace {

// Of one call of the driver. Longer batches are slower. Short ones leave the driver to other threads more
// often; of large pieces they have a few more, since the copy engine idles between two calls.
constexpr std::size_t kBatchBytes = std::size_t{16} << 20;
constexpr std::size_t kShortBatchBytes = std::size_t{2} << 20;
constexpr std::size_t kShortBatchPieces = 16;

}  // namespace

// Appends steps to a list. Consecutive pieces share a step.
class StepBuilder {
  public:
    explicit StepBuilder(bool short_batches) : short_batches_(short_batches) {}

    void add(const Step &step) { list_.steps.push_back(step); }

    void add_piece(const Piece &piece, bool staged) {
        CopyPieces *batch = list_.steps.empty() ? nullptr : std::get_if<CopyPieces>(&list_.steps.back());
        if (batch == nullptr || is_full(batch->count)) {
            batch =
                &std::get<CopyPieces>(list_.steps.emplace_back(CopyPieces{list_.pieces.size(), 0, staged}));
            batch_bytes_ = 0;
        }
        list_.pieces.push_back(piece);
        ++batch->count;
        batch_bytes_ += piece.nbytes;
    }

    StepList take() { return std::move(list_); }

  private:
    bool is_full(std::size_t pieces) const {
        const bool is_short = batch_bytes_ < kShortBatchBytes || pieces < kShortBatchPieces;
        return batch_bytes_ >= kBatchBytes || (short_batches_ && !is_short);
    }

    const bool short_batches_;
    StepList list_;
    std::size_t batch_bytes_ = 0;  // of the last step
};

SwapPlanner::SwapPlanner(const SwapPolicy &policy, Direction direction, std::span<const Plane> planes,
                         std::size_t record_bytes, std::span<const swap::Block> blocks,
                         std::span<const Rows> runs)
    : policy_(policy),
      direction_(direction),
      planes_(planes),
      record_bytes_(record_bytes),
      blocks_(blocks),
      runs_(runs) {}

const SwapThresholds &SwapPlanner::limits() const {
    return direction_ == Direction::kToHost ? policy_.to_host : policy_.to_device;
}

StepList SwapPlanner::plan(PlaneRange range, std::size_t slot_bytes, bool contended, bool unhurried) const {
    const bool small = unhurried && blocks_.size() * planes_.size() <= policy_.small_pieces;
    StepBuilder steps(small);
    if (blocks_.empty()) return steps.take();
    const Batch batch{blocks_.size(), runs_.size(), contended, unhurried};
    for (const PlaneRange part : split_range(planes_, range, record_bytes_, slot_bytes)) {
        switch (choose_method(policy_, direction_, planes_, part, record_bytes_, batch)) {
            case SwapMethod::kKernel:
                plan_kernel(steps, part);
                break;
            case SwapMethod::kStaged:
                plan_staged(steps, part, slot_bytes);
                break;
            case SwapMethod::kDirect:
                plan_direct(steps, part);
                break;
        }
    }
    return steps.take();
}

void SwapPlanner::plan_kernel(StepBuilder &steps, PlaneRange range) const {
    steps.add(RunKernel{RunKernel::Kind::kMove, range, {0, blocks_.size()}, false, 0});
    // Copies of later layers would take bandwidth from a layer that the engine waits for.
    const bool is_last = range.last == planes_.size();
    if (direction_ == Direction::kToDevice && !is_last) steps.add(HandOver{Queue::kMain, Queue::kCopy});
}

void SwapPlanner::plan_staged(StepBuilder &steps, PlaneRange range, std::size_t slot_bytes) const {
    const bool out = direction_ == Direction::kToHost;
    const Queue first_user = out ? Queue::kMain : Queue::kCopy;
    const Queue last_user = out ? Queue::kCopy : Queue::kMain;
    const std::size_t column = column_bytes(planes_, range, record_bytes_);
    const std::size_t offset = planes_[range.first].offset;
    const std::size_t per_slot = slot_bytes / column;
    for (std::size_t first = 0; first < blocks_.size(); first += per_slot) {
        const Rows rows{first, std::min(per_slot, blocks_.size() - first)};
        const RunKernel transpose{RunKernel::Kind::kMove, range, rows, true, column};
        steps.add(TakeSlot{first_user});
        if (out) {
            steps.add(transpose);
            steps.add(HandOver{Queue::kMain, Queue::kCopy});
        }
        for (const Rows &run : clip_runs(runs_, rows)) {
            copy_run(steps, {blocks_[run.first].record + offset, record_bytes_, (run.first - first) * column,
                             column, column, run.count, true});
        }
        if (!out) {
            steps.add(HandOver{Queue::kCopy, Queue::kMain});
            steps.add(transpose);
        }
        steps.add(FreeSlot{last_user});
    }
    if (out) steps.add(HandOver{Queue::kCopy, Queue::kMain});
}

void SwapPlanner::plan_direct(StepBuilder &steps, PlaneRange range) const {
    if (direction_ == Direction::kToHost) {
        steps.add(RunKernel{RunKernel::Kind::kSum, range, {0, blocks_.size()}, false, 0});
    }
    std::vector<Rows> parts;
    for (const Rows &run : runs_) append_device_runs(parts, run, blocks_);
    for (std::size_t i = range.first; i < range.last; ++i) {
        const Plane &plane = planes_[i];
        for (const Rows &part : parts) {
            const auto at = static_cast<Address>(blocks_[part.first].slot * plane.stride);
            copy_run(steps, {blocks_[part.first].record + plane.offset, record_bytes_,
                             reinterpret_cast<Address>(plane.base) + at,
                             static_cast<std::size_t>(plane.stride), plane.nbytes, part.count, false});
        }
    }
    steps.add(HandOver{Queue::kCopy, Queue::kMain});
}

void SwapPlanner::copy_run(StepBuilder &steps, const CopyRows &run) const {
    if (run.host_pitch == run.width && run.device_pitch == run.width) {
        steps.add_piece({run.host, run.device, run.width * run.rows}, run.staged);
        return;
    }
    const bool narrow = run.width < kNarrowRow && run.rows >= kNarrowRows;
    if (run.rows > 1 && (narrow || run.width * run.rows >= limits().run_copy)) {
        steps.add(run);
        return;
    }
    for (std::size_t row = 0; row < run.rows; ++row) {
        steps.add_piece({run.host + row * run.host_pitch, run.device + row * run.device_pitch, run.width},
                        run.staged);
    }
}

}  // namespace fdcache::cuda
