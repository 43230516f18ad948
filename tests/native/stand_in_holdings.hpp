// What is taken from the driver that stands in and has to be given back.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <set>

namespace fdcache::stand_in {

class Holdings {
  public:
    // Whether it was not held before.
    bool take(const void *what);
    // Whether it was held; counts it otherwise.
    bool give(const void *what);
    std::size_t held() const;
    std::size_t unknown() const;

  private:
    mutable std::mutex mutex_;
    std::set<const void *> held_;
    std::size_t unknown_ = 0;
};

extern Holdings events, registered;
extern std::atomic<int> contexts, pushed;

}  // namespace fdcache::stand_in
