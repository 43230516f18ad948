// What the bindings of the planner and of batches share.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "core/copy_bindings.hpp"
#include "core/swap_plan.hpp"

namespace fdcache {

inline PlaneRange range_of(const std::vector<Plane> &planes, std::size_t first, std::size_t last) {
    if (first >= last || last > planes.size()) throw nb::index_error("plane range");
    return {first, last};
}

using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

}  // namespace fdcache
