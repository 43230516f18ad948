#include "core/io_pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace fdcache {

IoPool::IoPool(unsigned threads) : process_(getpid()) {
    queue_->most_writing = std::max(1u, threads - 1);
    for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([queue = queue_] { queue->serve(); });
}

IoPool::~IoPool() {
    if (getpid() != process_) {
        // Joining or destroying threads that were not forked is undefined; their handles are left behind.
        new std::vector<std::thread>(std::move(threads_));
        new std::shared_ptr<Queue>(queue_);
        return;
    }
    {
        const std::lock_guard lock(queue_->mutex);
        queue_->closing = true;
        queue_->work.notify_all();
    }
    for (auto &thread : threads_) thread.join();
}

void IoPool::run(std::vector<std::function<void()>> jobs, IoPriority priority) {
    if (jobs.empty()) return;
    Batch batch{std::move(jobs), 0, 0};
    batch.left = batch.jobs.size();
    std::unique_lock lock(queue_->mutex);
    (priority == IoPriority::kRead ? queue_->reads : queue_->writes).push_back(&batch);
    queue_->work.notify_all();
    queue_->ended.wait(lock, [&] { return batch.left == 0; });
}

void IoPool::Queue::serve() {
    std::unique_lock lock(mutex);
    while (true) {
        if (step(lock)) continue;
        if (closing) return;
        work.wait(lock);
    }
}

bool IoPool::Queue::step(std::unique_lock<std::mutex> &lock) {
    const bool reading = !reads.empty();
    if (!reading && (writes.empty() || writing == most_writing)) return false;
    std::deque<Batch *> &from = reading ? reads : writes;
    Batch *batch = from.front();
    const std::size_t job = batch->next++;
    if (batch->next == batch->jobs.size()) from.pop_front();
    writing += !reading;
    lock.unlock();
    batch->jobs[job]();
    lock.lock();
    writing -= !reading;
    if (--batch->left == 0) ended.notify_all();
    if (!reading) work.notify_one();
    return true;
}

}  // namespace fdcache
