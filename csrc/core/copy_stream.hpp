// A stream of the CPU device: operations run in order by its own threads, which never touch Python.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/block_copy.hpp"
#include "core/event.hpp"

namespace fdcache {

class CopyStream {
  public:
    // Several threads share the blocks of one copy. A background stream's threads run at a lower priority.
    CopyStream(unsigned threads, bool background);
    // Closes.
    ~CopyStream();
    CopyStream(const CopyStream &) = delete;
    CopyStream &operator=(const CopyStream &) = delete;

    void copy(std::shared_ptr<BlockCopy> copy, PlaneRange range);
    void record(std::shared_ptr<Event> event);
    // Later operations wait until the event is set, be it recorded later.
    void wait(std::shared_ptr<Event> event);
    // Ends after the block being copied: what is queued is abandoned, its events are set, the threads are
    // joined. In a forked child, which has none of the threads, it does nothing.
    void close();

  private:
    struct Operation {
        enum class Kind { kCopy, kRecord, kWait } kind;
        std::shared_ptr<Event> event;
        std::shared_ptr<BlockCopy> copy;
        PlaneRange range{0, 0};
        bool begun = false;
        std::size_t next_block = 0;
        unsigned active = 0;
    };

    struct Queue : EventWatcher {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<Operation> operations;
        bool closing = false;

        void event_set() override;
        void push(Operation operation);
        void run(bool background);
        bool runnable() const;
        void step(std::unique_lock<std::mutex> &lock);
        void copy_blocks(std::unique_lock<std::mutex> &lock);
        void discard();
    };

    std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
    std::vector<std::thread> threads_;
    pid_t process_;
};

}  // namespace fdcache
