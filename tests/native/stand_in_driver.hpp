// A GPU's driver for tests: its memory is the host's, its streams are threads. Built as libcuda.so.1, so that
// the core finds it the way it finds a driver.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "core/cuda_driver.hpp"
#include "core/cuda_steps.hpp"

namespace fdcache::cuda {

// What a StreamHandle points to: does what it is given in order, on a thread of its own.
struct CUstream_st {
  public:
    CUstream_st();
    // Does the rest first.
    ~CUstream_st();
    CUstream_st(const CUstream_st &) = delete;
    CUstream_st &operator=(const CUstream_st &) = delete;

    void add(std::function<void()> work);

  private:
    void serve();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    bool ending_ = false;
    std::thread thread_;
};

}  // namespace fdcache::cuda

namespace fdcache::stand_in {

using Stream = cuda::CUstream_st;

// What the driver says when it refuses.
inline constexpr auto kRefusal = "CUDA_ERROR_STAND_IN (refused as told)";

// The copy after `more` others is refused, once.
void refuse_copy(int more);
// So is the next wait of a stream for an event.
void refuse_wait();

// Microseconds that every copy takes to be asked for, and to be carried out.
struct Delays {
    unsigned call = 0;
    unsigned copy = 0;
};
void set_delays(Delays delays);

cuda::Kernels kernels();

}  // namespace fdcache::stand_in
