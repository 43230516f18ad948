// Threads that serve one queue, safe to destroy in a forked child.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace fdcache {

// Owns a queue and the threads that serve it. `Queue` has a `mutex`, a condition variable `changed` and a
// flag `closing`; `serve` returns soon after the flag is set.
template <typename Queue>
class WorkerThreads {
  public:
    // Starts `count` threads that each run `serve(queue)`.
    template <typename Serve>
    WorkerThreads(unsigned count, Serve serve) {
        try {
            for (unsigned i = 0; i < count; ++i)
                threads_.emplace_back([queue = queue_, serve] { serve(*queue); });
        } catch (...) {
            close();
            throw;
        }
    }
    ~WorkerThreads() { close(); }
    WorkerThreads(const WorkerThreads &) = delete;
    WorkerThreads &operator=(const WorkerThreads &) = delete;

    Queue *operator->() const { return queue_.get(); }
    const std::shared_ptr<Queue> &queue() const { return queue_; }

    // Sets `closing` and joins the threads. Returns false, and does nothing, in a forked child: it has none
    // of the threads, and the mutex may be locked for ever.
    bool close() {
        if (getpid() != process_) {
            // Joining or destroying threads of another process is undefined, so leak their handles and the
            // queue.
            new std::vector<std::thread>(std::move(threads_));
            new std::shared_ptr<Queue>(queue_);
            return false;
        }
        {
            const std::lock_guard lock(queue_->mutex);
            queue_->closing = true;
            queue_->changed.notify_all();
        }
        for (auto &thread : threads_) thread.join();
        threads_.clear();
        return true;
    }

  private:
    const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
    std::vector<std::thread> threads_;
    const pid_t process_ = getpid();
};

}  // namespace fdcache
