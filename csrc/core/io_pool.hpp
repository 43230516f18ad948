// Threads that wait for disks, so that nobody else has to.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fdcache {

enum class IoPriority { kRead, kWrite };

class IoPool {
  public:
    // One thread is never given to writes when there are several, so that a read finds one free.
    explicit IoPool(unsigned threads);
    // Waits for the jobs that have begun. In a forked child, which has none of the threads, it does nothing.
    ~IoPool();
    IoPool(const IoPool &) = delete;
    IoPool &operator=(const IoPool &) = delete;

    // Runs the jobs, which must not throw, and returns when all have ended. Any thread may call it.
    void run(std::vector<std::function<void()>> jobs, IoPriority priority);

  private:
    struct Batch {
        std::vector<std::function<void()>> jobs;
        std::size_t next = 0;
        std::size_t left = 0;
    };

    struct Queue {
        std::mutex mutex;
        std::condition_variable work;
        std::condition_variable ended;
        std::deque<Batch *> reads;
        std::deque<Batch *> writes;
        unsigned writing = 0;
        unsigned most_writing = 1;
        bool closing = false;

        void serve();
        bool step(std::unique_lock<std::mutex> &lock);
    };

    std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
    std::vector<std::thread> threads_;
    pid_t process_;
};

}  // namespace fdcache
