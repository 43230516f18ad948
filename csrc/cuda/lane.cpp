#include "cuda/lane.hpp"

#include <utility>

namespace fdcache::cuda {
namespace {

void record(EventHandle event, StreamHandle stream) {
    check(driver().event_record(event, stream), "cuEventRecord");
}

void hold(StreamHandle stream, EventHandle event) {
    check(driver().stream_wait(stream, event, 0), "cuStreamWaitEvent");
}

}  // namespace

Lane::Lane(std::shared_ptr<Context> context, StreamHandle main, StreamHandle copy, Address staging,
           std::size_t slot_bytes, unsigned slots)
    : context_(std::move(context)),
      main_(main),
      copy_(copy),
      staging_(staging),
      slot_bytes_(slot_bytes),
      slots_(slots),
      handed_over_(context_, false) {
    for (Slot &slot : slots_) slot.freed = std::make_unique<PooledEvent>(context_, false);
}

Address Lane::take_slot(StreamHandle user) {
    next_ = (next_ + 1) % slots_.size();
    if (slots_[next_].used) hold(user, slots_[next_].freed->handle());
    return staging_ + next_ * slot_bytes_;
}

void Lane::free_slot(StreamHandle user) {
    record(slots_[next_].freed->handle(), user);
    slots_[next_].used = true;
}

void Lane::hand_over(StreamHandle from, StreamHandle to) {
    // A wait uses the latest record of its event, so one event serves all hand-overs.
    record(handed_over_.handle(), from);
    hold(to, handed_over_.handle());
}

void Lane::join_copies() {
    try {
        hand_over(copy_, main_);
    } catch (const Error &error) {
        context_->note(error);
        check(driver().stream_synchronize(copy_), "cuStreamSynchronize");
    }
}

}  // namespace fdcache::cuda
