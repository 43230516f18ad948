#include "slab/io_pool.hpp"

#include <algorithm>
#include <utility>

namespace fdcache {

IoPool::IoPool(unsigned threads) : threads_(threads, [](Queue &queue) { queue.serve(); }) {
    const std::lock_guard lock(threads_->mutex);
    threads_->most_writing = std::max(1u, threads - 1);
}

void IoPool::run(std::vector<std::function<void()>> jobs, IoPriority priority) {
    if (jobs.empty()) return;
    Batch batch{std::move(jobs), 0, 0};
    batch.left = batch.jobs.size();
    std::unique_lock lock(threads_->mutex);
    (priority == IoPriority::kRead ? threads_->reads : threads_->writes).push_back(&batch);
    threads_->changed.notify_all();
    threads_->ended.wait(lock, [&] { return batch.left == 0; });
}

void IoPool::Queue::serve() {
    std::unique_lock lock(mutex);
    while (true) {
        if (step(lock)) continue;
        if (closing) return;
        changed.wait(lock);
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
    if (!reading) changed.notify_one();
    return true;
}

}  // namespace fdcache
