#include "copy/event.hpp"

#include <algorithm>
#include <utility>

namespace fdcache {
namespace {

template <typename Predicate>
bool wait_for(std::condition_variable &changed, std::unique_lock<std::mutex> &lock, Deadline deadline,
              Predicate done) {
    if (deadline) return changed.wait_until(lock, *deadline, done);
    changed.wait(lock, done);
    return true;
}

class Signal : public EventWatcher {
  public:
    void event_set() override {
        const std::lock_guard lock(mutex_);
        raised_ = true;
        changed_.notify_all();
    }

    bool wait_until(Deadline deadline) {
        std::unique_lock lock(mutex_);
        return wait_for(changed_, lock, deadline, [this] { return raised_; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool raised_ = false;
};

}  // namespace

void Event::set() {
    std::vector<std::weak_ptr<EventWatcher>> watchers;
    {
        const std::lock_guard lock(mutex_);
        set_ = true;
        watchers.swap(watchers_);
        changed_.notify_all();
    }
    for (const auto &weak : watchers) {
        if (const auto watcher = weak.lock()) watcher->event_set();
    }
}

bool Event::is_set() const {
    const std::lock_guard lock(mutex_);
    return set_;
}

bool Event::wait_until(Deadline deadline) {
    std::unique_lock lock(mutex_);
    return wait_for(changed_, lock, deadline, [this] { return set_; });
}

void Event::watch(const std::shared_ptr<EventWatcher> &watcher) {
    {
        const std::lock_guard lock(mutex_);
        if (!set_) {
            std::erase_if(watchers_, [](const auto &weak) { return weak.expired(); });
            watchers_.push_back(watcher);
            return;
        }
    }
    watcher->event_set();
}

bool Event::wait_any(std::span<const std::shared_ptr<Event>> events, Deadline deadline) {
    const auto signal = std::make_shared<Signal>();
    for (const auto &event : events) event->watch(signal);
    return signal->wait_until(deadline);
}

}  // namespace fdcache
