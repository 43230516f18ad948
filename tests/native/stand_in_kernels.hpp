// The kernels of csrc/swap in C++, for streams of the driver that stands in.
#pragma once

#include <functional>

#include "cuda/step_runner.hpp"

namespace fdcache::cuda {

// What a FunctionHandle points to: makes what a stream does out of the arguments of a launch, which do not
// outlive it.
struct CUfunc_st {
    std::function<void()> (*bind)(void **arguments);
    int gpu;
};

}  // namespace fdcache::cuda

namespace fdcache::stand_in {

cuda::Kernels kernels(int gpu = 0);

}  // namespace fdcache::stand_in
