// A stream of the CPU device: runs operations in order on its own threads, which never call into Python.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "copy/block_copy.hpp"
#include "copy/event.hpp"
#include "worker_threads.hpp"

namespace fdcache {

class CopyStream {
  public:
    // The threads share the blocks of one copy. Those of a background stream have a lower priority.
    CopyStream(unsigned threads, bool background);
    // Closes the stream.
    ~CopyStream();
    CopyStream(const CopyStream &) = delete;
    CopyStream &operator=(const CopyStream &) = delete;

    void copy(std::shared_ptr<BlockCopy> copy, PlaneRange range);
    // Enqueues ranges of a batch and returns an event recorded after each; that of the last plane is the end
    // of the batch.
    std::vector<std::shared_ptr<Event>> copy_groups(const std::shared_ptr<BlockCopy> &copy,
                                                    std::span<const PlaneRange> ranges);
    void record(std::shared_ptr<Event> event);
    // Makes later operations wait until the event is set. It may be recorded later than this call.
    void wait(std::shared_ptr<Event> event);
    // Stops after the blocks in flight, abandons queued copies, sets queued events and joins the threads.
    // Does nothing in a forked child, which has none of the threads.
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
        void push(std::vector<Operation> more);
        void serve(bool background);
        bool is_runnable() const;
        void step(std::unique_lock<std::mutex> &lock);
        void copy_blocks(std::unique_lock<std::mutex> &lock);
        void discard();
    };

    WorkerThreads<Queue> threads_;
};

}  // namespace fdcache
