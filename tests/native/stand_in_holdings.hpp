// What is taken from the driver that stands in and has to be given back.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <set>

namespace fdcache::stand_in {

class Holdings {
  public:
    void take(const void *what);
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
// Streams that are captured into a graph, and another GPU's; null: none.
extern std::atomic<const void *> captured, foreign;

}  // namespace fdcache::stand_in
