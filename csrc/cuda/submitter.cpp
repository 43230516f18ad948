#include "cuda/submitter.hpp"

#include <pthread.h>

#include <cstdint>
#include <utility>

namespace fdcache::cuda {
namespace {

// The link needs less time for these bytes than it takes to wake a thread and enqueue them.
constexpr std::uint64_t kAtOnce = std::uint64_t{16} << 20;

}  // namespace

Submitter::Submitter(std::shared_ptr<Context> context, StreamHandle main, bool background)
    : context_(std::move(context)),
      main_(main),
      background_(background),
      thread_(1, [](Queue &queue) { queue.serve(); }) {}

void Submitter::record(std::shared_ptr<Event> event) {
    event->promise();
    run([this, event = std::move(event)] { event->record(main_); });
}

void Submitter::wait(std::shared_ptr<Event> event) {
    const bool blocks = event->is_promised();
    Task hold = [this, event = std::move(event)] {
        try {
            event->hold(main_);
        } catch (const Error &error) {
            context_->note(error);
            refusal_ = error.what();
        }
    };
    blocks ? post(std::move(hold)) : run(std::move(hold));
}

std::vector<std::shared_ptr<Event>> Submitter::enqueue(std::shared_ptr<Swap> swap, std::shared_ptr<Lane> lane,
                                                       std::span<const PlaneRange> ranges) {
    std::vector<std::shared_ptr<Event>> events;
    for (const PlaneRange range : ranges) {
        const bool ends = range.last == swap->planes().size();
        events.push_back(ends ? swap->done() : std::make_shared<Event>(context_, false));
    }
    // Nothing can fail from here on: every promised event will be recorded.
    swap->promise();
    for (const auto &event : events) {
        if (event != swap->done()) event->promise();
    }
    const bool at_once = !background_ && (ranges.size() == 1 || swap->total_bytes() <= kAtOnce);
    Task task = [this, swap = std::move(swap), lane = std::move(lane), events,
                 ranges = std::vector<PlaneRange>(ranges.begin(), ranges.end())] {
        for (std::size_t i = 0; i < ranges.size(); ++i) {
            submit(*swap, *lane, ranges[i]);
            if (events[i] != swap->done()) events[i]->record(main_);
        }
    };
    at_once ? run(std::move(task)) : post(std::move(task));
    return events;
}

void Submitter::submit(Swap &swap, Lane &lane, PlaneRange range) {
    if (refusal_) {
        swap.refuse(main_, *std::exchange(refusal_, std::nullopt));
    } else {
        swap.enqueue(lane, range);
    }
}

void Submitter::refuse(std::shared_ptr<Swap> swap, std::string reason) {
    swap->promise();
    run([this, swap = std::move(swap), reason = std::move(reason)] {
        refusal_.reset();
        swap->refuse(main_, reason);
    });
}

void Submitter::run(Task task) {
    {
        std::unique_lock lock(thread_->mutex);
        if (thread_->tasks.empty() && !thread_->busy) {
            thread_->step(lock, std::move(task));
            return;
        }
    }
    post(std::move(task));
}

void Submitter::post(Task task) {
    std::unique_lock lock(thread_->mutex);
    if (thread_->closing) {
        thread_->step(lock, std::move(task));
    } else {
        thread_->tasks.push_back(std::move(task));
        thread_->changed.notify_all();
    }
}

void Submitter::Queue::serve() {
    pthread_setname_np(pthread_self(), "fdcache-submit");
    std::unique_lock lock(mutex);
    while (true) {
        changed.wait(lock, [this] { return !busy && (closing || !tasks.empty()); });
        if (tasks.empty()) return;
        Task task = std::move(tasks.front());
        tasks.pop_front();
        step(lock, std::move(task));
    }
}

// Tasks handle the driver's errors. Anything else, such as no memory for an error message, ends the process:
// promised events would never be recorded.
void Submitter::Queue::step(std::unique_lock<std::mutex> &lock, Task task) noexcept {
    busy = true;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    busy = false;
    changed.notify_all();
}

}  // namespace fdcache::cuda
