#include "cuda/submitter.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace fdcache::cuda {
namespace {

// The link needs less time for these bytes than it takes to wake a thread and enqueue them.
constexpr std::uint64_t kAtOnce = std::uint64_t{16} << 20;

}  // namespace

Submitter::Submitter(std::shared_ptr<Context> context, StreamHandle main, bool background,
                     std::chrono::nanoseconds grace)
    : context_(std::move(context)),
      main_(main),
      background_(background),
      grace_(grace),
      thread_(1, [](Queue &queue) { queue.serve(); }) {}

void Submitter::record(std::shared_ptr<Event> event) {
    event->promise(thread_.queue());
    run([this, event = std::move(event)] { event->record(main_); });
}

void Submitter::wait(std::shared_ptr<Event> event) {
    const bool blocks = event->is_promised();
    Task task = [this, event = std::move(event)] { hold(*event); };
    blocks ? post(std::move(task)) : run(std::move(task));
}

void Submitter::hold(const Event &event) {
    try {
        event.hold(main_);
    } catch (const Error &error) {
        context_->note(error);
        refusal_ = error.what();
    }
}

std::vector<std::shared_ptr<Event>> Submitter::enqueue(std::shared_ptr<Swap> swap, std::shared_ptr<Lane> lane,
                                                       std::span<const PlaneRange> ranges,
                                                       std::vector<std::shared_ptr<Event>> after) {
    std::vector<std::shared_ptr<Event>> events;
    for (const PlaneRange range : ranges) {
        const bool ends = range.last == swap->planes().size();
        events.push_back(ends ? swap->done() : std::make_shared<Event>(context_, false));
    }
    // Nothing can fail from here on: every promised event will be recorded.
    swap->promise(thread_.queue());
    for (const auto &event : events) {
        if (event != swap->done()) event->promise(thread_.queue());
    }
    const bool blocks = std::ranges::any_of(after, [](const auto &event) { return event->is_promised(); });
    const bool at_once = !background_ && !blocks && (ranges.size() == 1 || swap->total_bytes() <= kAtOnce);
    Task task = [this, after = std::move(after), at_once, swap = std::move(swap), lane = std::move(lane),
                 events, ranges = std::vector<PlaneRange>(ranges.begin(), ranges.end())] {
        for (const auto &event : after) hold(*event);
        for (std::size_t i = 0; i < ranges.size(); ++i) {
            submit(*swap, *lane, ranges[i], !at_once);
            if (events[i] != swap->done()) events[i]->record(main_);
        }
    };
    at_once ? run(std::move(task)) : post(std::move(task));
    return events;
}

void Submitter::submit(Swap &swap, Lane &lane, PlaneRange range, bool unhurried) {
    if (refusal_) {
        swap.refuse(main_, *std::exchange(refusal_, std::nullopt));
    } else {
        swap.enqueue(lane, range, unhurried);
    }
}

void Submitter::refuse(std::shared_ptr<Swap> swap, std::string reason) {
    swap->promise(thread_.queue());
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
        if (thread_->tasks.empty() && !thread_->busy) thread_->due = Queue::Clock::now() + grace_;
        thread_->tasks.push_back(std::move(task));
        thread_->changed.notify_all();
    }
}

void Submitter::Queue::hurry() {
    const std::lock_guard lock(mutex);
    due = {};
    changed.notify_all();
}

void Submitter::Queue::serve() {
    pthread_setname_np(pthread_self(), "fdcache-submit");
    std::unique_lock lock(mutex);
    while (true) {
        changed.wait(lock, [this] { return !busy && (closing || !tasks.empty()); });
        if (tasks.empty()) return;
        if (!closing && Clock::now() < due) {
            changed.wait_until(lock, due);
            continue;
        }
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
    // Waking the thread costs the caller a system call, so only for work.
    if (!tasks.empty() || closing) changed.notify_all();
}

}  // namespace fdcache::cuda
