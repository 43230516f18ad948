#include "core/submitter.hpp"

#include <pthread.h>
#include <unistd.h>

#include <cstdint>
#include <utility>

namespace fdcache::cuda {
namespace {

// The link takes these bytes within the time that it takes to wake a thread, put them on a stream, and more.
constexpr std::uint64_t kAtOnce = std::uint64_t{16} << 20;

}  // namespace

Submitter::Submitter(std::shared_ptr<Context> context, StreamHandle main, bool background)
    : context_(std::move(context)), main_(main), background_(background), process_(getpid()) {}

Submitter::~Submitter() {
    close();
}

void Submitter::record(std::shared_ptr<Event> event) {
    event->promise();
    run([this, event = std::move(event)] { event->record(main_); });
}

void Submitter::wait(std::shared_ptr<Event> event) {
    const bool blocks = event->is_promised();
    const Task hold = [this, event = std::move(event)] {
        try {
            event->hold(main_);
        } catch (const Error &error) {
            context_->note(error);
            refusal_ = error.what();
        }
    };
    blocks ? post(hold) : run(hold);
}

std::vector<std::shared_ptr<Event>> Submitter::enqueue(std::shared_ptr<Swap> swap, std::shared_ptr<Lane> lane,
                                                       std::span<const PlaneRange> ranges) {
    std::vector<std::shared_ptr<Event>> events;
    for (std::size_t i = 0; i + 1 < ranges.size(); ++i) {
        events.push_back(std::make_shared<Event>(context_, false));
        events.back()->promise();
    }
    swap->promise();
    events.push_back(swap->done());
    const bool at_once = !background_ && (ranges.size() == 1 || swap->total_bytes() <= kAtOnce);
    Task task = [this, swap = std::move(swap), lane = std::move(lane), events,
                 ranges = std::vector<PlaneRange>(ranges.begin(), ranges.end())] {
        for (std::size_t i = 0; i < ranges.size(); ++i) {
            submit(*swap, *lane, ranges[i]);
            if (i + 1 < ranges.size()) events[i]->record(main_);
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

void Submitter::run(Task task) {
    std::unique_lock lock(queue_->mutex);
    if (queue_->tasks.empty() && !queue_->busy) {
        queue_->step(lock, task);
    } else {
        push(std::move(task));
    }
}

void Submitter::post(Task task) {
    const std::lock_guard lock(queue_->mutex);
    push(std::move(task));
}

void Submitter::push(Task task) {
    if (!thread_.joinable()) thread_ = std::thread([queue = queue_] { queue->serve(); });
    queue_->tasks.push_back(std::move(task));
    queue_->changed.notify_all();
}

void Submitter::close() {
    if (!thread_.joinable()) return;
    if (getpid() != process_) {
        // Joining or destroying a thread that was not forked is undefined; its handle is left behind.
        new std::thread(std::move(thread_));
        new std::shared_ptr<Queue>(queue_);
        return;
    }
    {
        const std::lock_guard lock(queue_->mutex);
        queue_->closing = true;
        queue_->changed.notify_all();
    }
    thread_.join();
    queue_->closing = false;
}

void Submitter::Queue::serve() {
    pthread_setname_np(pthread_self(), "fdcache-submit");
    std::unique_lock lock(mutex);
    while (true) {
        changed.wait(lock, [this] { return !busy && (closing || !tasks.empty()); });
        if (tasks.empty()) return;
        const Task task = std::move(tasks.front());
        tasks.pop_front();
        step(lock, task);
    }
}

void Submitter::Queue::step(std::unique_lock<std::mutex> &lock, const Task &task) {
    busy = true;
    lock.unlock();
    task();
    lock.lock();
    busy = false;
    changed.notify_all();
}

}  // namespace fdcache::cuda
