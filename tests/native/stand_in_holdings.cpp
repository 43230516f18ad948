#include "native/stand_in_holdings.hpp"

namespace fdcache::stand_in {

Holdings events, registered, opened;
std::atomic<int> contexts{0}, pushed{0};

bool Holdings::take(const void *what) {
    const std::lock_guard lock(mutex_);
    return held_.insert(what).second;
}

bool Holdings::give(const void *what) {
    const std::lock_guard lock(mutex_);
    if (held_.erase(what) > 0) return true;
    ++unknown_;
    return false;
}

std::size_t Holdings::held() const {
    const std::lock_guard lock(mutex_);
    return held_.size();
}

std::size_t Holdings::unknown() const {
    const std::lock_guard lock(mutex_);
    return unknown_;
}

}  // namespace fdcache::stand_in
