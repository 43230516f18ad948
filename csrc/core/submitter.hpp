// Puts work on one stream of a GPU in order, without holding up those who ask for it.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda_context.hpp"
#include "core/cuda_lane.hpp"
#include "core/cuda_swap.hpp"
#include "core/record.hpp"

namespace fdcache::cuda {

// Small batches, and those of a single range (evictions: the compute stream is told at once to wait for all
// of them), go on the stream from the calling thread, if nothing waits before them. Large ones in several
// ranges go from a thread of its own, which never touches Python; so do all batches of a background
// submitter. One thread calls at a time.
class Submitter {
  public:
    Submitter(std::shared_ptr<Context> context, StreamHandle main, bool background);
    // Closes.
    ~Submitter();
    Submitter(const Submitter &) = delete;
    Submitter &operator=(const Submitter &) = delete;

    void record(std::shared_ptr<Event> event);
    // Later work waits for the event, be it recorded later. When the driver refuses, the next batch fails.
    void wait(std::shared_ptr<Event> event);
    // Plane ranges of a batch in order, and the event of each; that of the last plane is the batch's end.
    std::vector<std::shared_ptr<Event>> enqueue(std::shared_ptr<Swap> swap, std::shared_ptr<Lane> lane,
                                                std::span<const PlaneRange> ranges);
    // Ends a batch that cannot be copied, with the reason.
    void refuse(std::shared_ptr<Swap> swap, std::string reason);
    // Does what waits and ends the thread; what comes later is done by who asks for it. In a forked child,
    // which has no such thread, it does nothing.
    void close();

  private:
    using Task = std::function<void()>;
    struct Queue {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<Task> tasks;
        bool busy = false;  // a thread is at a task, be it the caller's
        bool closing = false;

        void serve();
        void step(std::unique_lock<std::mutex> &lock, Task task) noexcept;
    };

    void run(Task task);
    void post(Task task);
    void submit(Swap &swap, Lane &lane, PlaneRange range);

    const std::shared_ptr<Context> context_;
    const StreamHandle main_;
    const bool background_;
    std::optional<std::string> refusal_;  // why the next batch cannot be; tasks alone touch it
    const std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
    const pid_t process_;
    std::thread thread_;
};

}  // namespace fdcache::cuda
