// Streams and events of the driver that stands in: a stream is a thread that does in order what it is given.
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

// A place in a stream, and when the stream came there.
struct Moment {
    std::atomic<bool> reached{false};
    std::chrono::steady_clock::time_point when;

    void wait() const { reached.wait(false); }
};
using Mark = std::shared_ptr<Moment>;

// Microseconds that every copy takes to be asked for, and on average to be carried out.
struct Delays {
    unsigned call = 0;
    unsigned copy = 0;
};
void set_delays(Delays delays);
// For the length of a call.
void delay_call();

}  // namespace fdcache::stand_in

namespace fdcache::cuda {

// What a StreamHandle points to.
struct CUstream_st {
  public:
    explicit CUstream_st(int gpu = 0);
    // Does the rest first.
    ~CUstream_st();
    CUstream_st(const CUstream_st &) = delete;
    CUstream_st &operator=(const CUstream_st &) = delete;

    int gpu() const { return gpu_; }
    // Memory is not touched any more once the GPU is lost.
    void copy(std::function<void()> work);
    // Done even then; must not touch memory.
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
    // As it was recorded last; none before.
    stand_in::Mark last();

  private:
    const int gpu_;
    std::mutex mutex_;
    stand_in::Mark last_;
};

}  // namespace fdcache::cuda

namespace fdcache::stand_in {

using Stream = cuda::CUstream_st;

// The streams that are captured into a graph, and another GPU's; null: none.
extern std::atomic<const void *> captured, foreign;

// The stream of a handle, which may be one of the GPU's default stream's.
Stream &stream_of(cuda::StreamHandle handle, int gpu);
// Until every stream has done what it has.
void synchronize_all();

}  // namespace fdcache::stand_in
