// The GPUs of the stand-in driver, and the current one of each thread.
#pragma once

#include <array>

#include "cuda/driver.hpp"

namespace fdcache::stand_in {

inline constexpr int kMostGpus = 2;
inline constexpr int kInvalidContext = 201;
inline constexpr int kInvalidHandle = 400;

// STAND_IN_GPUS sets their number (default 1); CUDA_VISIBLE_DEVICES hides and reorders them.
int num_visible_gpus();
// The GPU with this ordinal in this process.
int visible_gpu(int ordinal);
std::array<unsigned char, 16> uuid_of(int gpu);

cuda::ContextHandle context_of(int gpu);
// Returns false if it is not a context.
bool push_context(cuda::ContextHandle context);
cuda::ContextHandle pop_context();
// The GPU of the current context, -1 for none.
int current_gpu();

}  // namespace fdcache::stand_in
