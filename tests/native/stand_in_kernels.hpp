// The kernels of csrc/swap in C++, for streams of the stand-in driver.
#pragma once

#include <functional>

#include "cuda/step_runner.hpp"

namespace fdcache::cuda {

// The target of a FunctionHandle: turns the arguments of a launch, which do not outlive the call, into work
// for a stream.
struct CUfunc_st {
    std::function<void()> (*bind)(void **arguments);
    int gpu;
};

}  // namespace fdcache::cuda

namespace fdcache::stand_in {

cuda::Kernels kernels(int gpu = 0);

}  // namespace fdcache::stand_in
