// Copies of all sizes, in both directions, that have blocks in common.
#pragma once

#include "cuda/swap_plan.hpp"
#include "native/stand_in_streams.hpp"

namespace fdcache::stand_in {

// Loads over the same blocks again and again. In between an engine reads what was loaded, plane group by
// plane group, and another lane copies blocks to the host; each load waits for both. All of it has the bytes
// that one copy after the other would have given, or the process ends.
void run_mixed_copies(cuda::SwapChoice way, Delays delays = {});

}  // namespace fdcache::stand_in
