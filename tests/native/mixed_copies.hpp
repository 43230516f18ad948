// Copies of all sizes, in both directions, over the same blocks.
#pragma once

#include "cuda/swap_plan.hpp"
#include "native/stand_in_streams.hpp"

namespace fdcache::stand_in {

// Loads the same blocks repeatedly. In between, an engine reads the loaded blocks, plane group by plane
// group, and another lane copies blocks to the host; each load waits for both. Ends the process unless all
// bytes are the same as after sequential copies.
void run_mixed_copies(cuda::SwapChoice way, Delays delays = {});

}  // namespace fdcache::stand_in
