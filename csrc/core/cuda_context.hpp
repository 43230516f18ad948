// A GPU's primary context, its events and registered host memory. No call relies on the current device.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/cuda_driver.hpp"

namespace fdcache::cuda {

// Holds the primary context of one device, which every framework of the process shares.
class Context : public std::enable_shared_from_this<Context> {
  public:
    explicit Context(int ordinal);
    ~Context();
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    ContextHandle handle() const { return handle_; }
    int ordinal() const { return ordinal_; }
    // Why the device can no longer be used, once a call said so.
    std::optional<std::string> lost() const;
    // Remembers an error after which no call on this device succeeds any more.
    void note(const Error &error);
    // Remembers any error: after it nobody knows what the device does.
    void lose(const Error &error);

  private:
    friend class PooledEvent;
    EventHandle take_event(bool timing);
    void give_event(EventHandle event, bool timing);

    int ordinal_;
    int device_ = 0;
    ContextHandle handle_ = nullptr;
    mutable std::mutex mutex_;
    std::optional<std::string> lost_;
    std::vector<EventHandle> idle_[2];
};

// Makes a context current for a scope. Calls within it disturb no stream capture of another library.
class Current {
  public:
    explicit Current(const Context &context);
    ~Current();
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;

  private:
    int capture_mode_ = 2;  // relaxed; the thread's own one meanwhile
};

// An event of the driver, taken from a context's pool and given back.
class PooledEvent {
  public:
    PooledEvent(std::shared_ptr<Context> context, bool timing);
    ~PooledEvent();
    PooledEvent(const PooledEvent &) = delete;
    PooledEvent &operator=(const PooledEvent &) = delete;

    EventHandle handle() const { return handle_; }

  private:
    const std::shared_ptr<Context> context_;
    const bool timing_;
    const EventHandle handle_;
};

// Recorded once; its driver event goes back for reuse when the last holder is gone.
class Event : public std::enable_shared_from_this<Event> {
  public:
    Event(std::shared_ptr<Context> context, bool timing);
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;

    // It will be recorded: until then it is not reached, and `hold` waits. To the driver an event that is not
    // recorded is reached.
    void promise();
    bool is_promised() const { return state_.load(std::memory_order_acquire) == State::kPromised; }
    // Where the driver refuses, the thread waits for the stream, so that the event is reached indeed. When
    // that is refused too the event counts as reached, stands for nothing, and the first error is returned.
    std::optional<Error> record(StreamHandle stream);
    // Blocks until a promised event is recorded.
    void hold(StreamHandle stream) const;
    // An event of a lost device is reached: nothing runs there any more. A device that cannot say whether an
    // event is reached is lost.
    bool is_reached() const;
    // Seconds on the device between two events that are reached; 0 where one was never recorded.
    double seconds_since(const Event &earlier) const;

  private:
    enum class State : int { kNew, kPromised, kRecorded, kPassed };

    const std::shared_ptr<Context> context_;
    const PooledEvent event_;
    std::atomic<State> state_{State::kNew};
};

// Host memory pinned for all contexts; undone at the end of its life.
class Registration {
  public:
    Registration(std::shared_ptr<Context> context, void *data, std::size_t nbytes);
    ~Registration();
    Registration(const Registration &) = delete;
    Registration &operator=(const Registration &) = delete;

    Address device_address() const { return address_; }

  private:
    std::shared_ptr<Context> context_;
    void *data_;
    Address address_ = 0;
};

// The UUID of the device with that ordinal.
std::array<unsigned char, 16> device_uuid(int ordinal);

bool is_capturing(Context &context, StreamHandle stream);

// Whether the stream is one of this context; the default streams are those of any.
bool is_stream_of(Context &context, StreamHandle stream);

}  // namespace fdcache::cuda
