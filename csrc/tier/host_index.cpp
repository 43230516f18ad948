#include "tier/host_index.hpp"

namespace fdcache {

void HostRun::keep_first(std::size_t count) {
    slots.resize(count);
    generations.resize(count);
    if (!unverified.empty()) unverified.resize(count);
}

void HostRun::drop_first(std::size_t count) {
    const auto drop = [count](auto &column) {
        column.erase(column.begin(), column.begin() + static_cast<std::ptrdiff_t>(count));
    };
    drop(slots);
    drop(generations);
    if (!unverified.empty()) drop(unverified);
}

}  // namespace fdcache
