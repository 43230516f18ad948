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

HostRun HostRun::part(std::size_t first, std::size_t stop) const {
    const auto cut = [first, stop](auto &to, const auto &from) {
        if (from.empty()) return;
        const auto begin = from.begin();
        to.assign(begin + static_cast<std::ptrdiff_t>(first), begin + static_cast<std::ptrdiff_t>(stop));
    };
    HostRun some;
    some.lease = lease;
    cut(some.slots, slots);
    cut(some.generations, generations);
    cut(some.unverified, unverified);
    return some;
}

}  // namespace fdcache
