// Resources of the stand-in driver that have to be released.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <set>

namespace fdcache::stand_in {

class Holdings {
  public:
    // Returns false if it is held already.
    bool take(const void *what);
    // Returns false, and counts it, if it is not held.
    bool give(const void *what);
    std::size_t held() const;
    std::size_t unknown() const;

  private:
    mutable std::mutex mutex_;
    std::set<const void *> held_;
    std::size_t unknown_ = 0;
};

extern Holdings events, registered, opened;
extern std::atomic<int> contexts, pushed;

}  // namespace fdcache::stand_in
