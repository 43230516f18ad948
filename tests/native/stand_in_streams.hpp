// Streams and events of the stand-in driver: a stream is a thread that runs its work in order.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "cuda/driver.hpp"

namespace fdcache::stand_in {

// A place in a stream, and the time when the stream reached it.
struct Moment {
    std::atomic<bool> reached{false};
    std::chrono::steady_clock::time_point when;

    void wait() const { reached.wait(false); }
};
using Mark = std::shared_ptr<Moment>;

// Microseconds that each copy takes to submit, and on average to run.
struct Delays {
    unsigned call = 0;
    unsigned copy = 0;
};
void set_delays(Delays delays);
// Held for the duration of a call.
void delay_call();

}  // namespace fdcache::stand_in

namespace fdcache::cuda {

// The target of a StreamHandle.
struct CUstream_st {
  public:
    explicit CUstream_st(int gpu = 0);
    // Runs the remaining work first.
    ~CUstream_st();
    CUstream_st(const CUstream_st &) = delete;
    CUstream_st &operator=(const CUstream_st &) = delete;

    int gpu() const { return gpu_; }
    // Skipped once the GPU is lost, because it touches memory.
    void copy(std::function<void()> work);
    // Runs even then; must not touch memory.
    void call(std::function<void()> work);
    stand_in::Mark mark();
    void wait(const stand_in::Mark &mark);

  private:
    void serve();

    const int gpu_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    bool ending_ = false;
    std::thread thread_;
};

struct CUevent_st {
  public:
    explicit CUevent_st(int gpu) : gpu_(gpu) {}
    int gpu() const { return gpu_; }
    void record(const stand_in::Mark &mark);
    // The latest record, if any.
    stand_in::Mark last();

  private:
    const int gpu_;
    std::mutex mutex_;
    stand_in::Mark last_;
};

}  // namespace fdcache::cuda

namespace fdcache::stand_in {

using Stream = cuda::CUstream_st;

// The stream captured into a graph, and a stream of another GPU; null: none.
extern std::atomic<const void *> captured, foreign;

// The stream of a handle, which may be one of the default stream's handles.
Stream &stream_of(cuda::StreamHandle handle, int gpu);
// Waits until every stream is idle.
void synchronize_all();

}  // namespace fdcache::stand_in
