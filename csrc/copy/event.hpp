// A one-shot event between copy streams and the host.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace fdcache {

using Deadline = std::optional<std::chrono::steady_clock::time_point>;

// Called when an event that it watches is set.
class EventWatcher {
  public:
    virtual ~EventWatcher() = default;
    virtual void event_set() = 0;
};

class Event {
  public:
    void set();
    bool is_set() const;
    // Returns false if the deadline passes before the event is set.
    bool wait_until(Deadline deadline);
    // Calls `watcher` once when the event is set, immediately if it is set already.
    void watch(const std::shared_ptr<EventWatcher> &watcher);

    static bool wait_any(std::span<const std::shared_ptr<Event>> events, Deadline deadline);

  private:
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    bool set_ = false;
    std::vector<std::weak_ptr<EventWatcher>> watchers_;
};

}  // namespace fdcache
