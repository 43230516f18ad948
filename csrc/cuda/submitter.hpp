// Enqueues work on one stream of a GPU in order, without blocking the caller.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "copy/record.hpp"
#include "cuda/context.hpp"
#include "cuda/lane.hpp"
#include "cuda/swap.hpp"
#include "worker_threads.hpp"

namespace fdcache::cuda {

// The calling thread enqueues small batches, and batches of a single range (evictions, for which the compute
// stream is told at once to wait), unless earlier work is queued. A thread of the submitter, which never
// calls into Python, enqueues large batches in several ranges, and all batches of a background submitter. It
// leaves the driver to the engine for `grace` first, unless someone waits for an event of the batch. One
// thread calls at a time.
class Submitter {
  public:
    // An engine that has submitted a plan launches its step. The driver serves one thread at a time, so the
    // calls for a whole batch would delay the launch by about as long as they take.
    static constexpr std::chrono::nanoseconds kGrace = std::chrono::microseconds(250);

    Submitter(std::shared_ptr<Context> context, StreamHandle main, bool background,
              std::chrono::nanoseconds grace = kGrace);
    Submitter(const Submitter &) = delete;
    Submitter &operator=(const Submitter &) = delete;

    void record(std::shared_ptr<Event> event);
    // Makes later work wait for the event, which may be recorded later. If the driver refuses, the next batch
    // fails.
    void wait(std::shared_ptr<Event> event);
    // Enqueues plane ranges of a batch in order, after these events, and returns the event of each; that of
    // the last plane is the end of the batch.
    std::vector<std::shared_ptr<Event>> enqueue(std::shared_ptr<Swap> swap, std::shared_ptr<Lane> lane,
                                                std::span<const PlaneRange> ranges,
                                                std::vector<std::shared_ptr<Event>> after = {});
    // Ends a batch that cannot be copied.
    void refuse(std::shared_ptr<Swap> swap, std::string reason);
    // Runs the queued work and joins the thread; later work runs on the calling thread. The destructor closes
    // too. Does nothing in a forked child, which does not have the thread.
    void close() { thread_.close(); }

  private:
    using Task = std::function<void()>;
    struct Queue : Promiser {
        using Clock = std::chrono::steady_clock;

        std::mutex mutex;
        std::condition_variable changed;
        std::deque<Task> tasks;
        bool busy = false;  // a thread, perhaps the caller's, runs a task
        bool closing = false;
        Clock::time_point due{};  // when the thread may begin

        void serve();
        // Lets the thread begin now.
        void hurry() override;
        void step(std::unique_lock<std::mutex> &lock, Task task) noexcept;
    };

    void run(Task task);
    void post(Task task);
    void hold(const Event &event);
    void submit(Swap &swap, Lane &lane, PlaneRange range, bool unhurried);

    const std::shared_ptr<Context> context_;
    const StreamHandle main_;
    const bool background_;
    const std::chrono::nanoseconds grace_;
    std::optional<std::string> refusal_;  // the error for the next batch; accessed by tasks only
    WorkerThreads<Queue> thread_;
};

}  // namespace fdcache::cuda
