// Threads for blocking disk requests.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "worker_threads.hpp"

namespace fdcache {

enum class IoPriority { kRead, kWrite };

class IoPool {
  public:
    // With several threads, one never runs writes, so that reads always find a thread. The destructor waits
    // for the jobs in flight; in a forked child it does nothing.
    explicit IoPool(unsigned threads);

    // Runs the jobs and returns once all have ended. Jobs must not throw. Any thread may call it.
    void run(std::vector<std::function<void()>> jobs, IoPriority priority);

  private:
    struct Batch {
        std::vector<std::function<void()>> jobs;
        std::size_t next = 0;
        std::size_t left = 0;
    };

    struct Queue {
        std::mutex mutex;
        std::condition_variable changed;
        std::condition_variable ended;
        std::deque<Batch *> reads;
        std::deque<Batch *> writes;
        unsigned writing = 0;
        unsigned most_writing = 1;
        bool closing = false;

        void serve();
        bool step(std::unique_lock<std::mutex> &lock);
    };

    WorkerThreads<Queue> threads_;
};

}  // namespace fdcache
