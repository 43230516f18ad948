// A GPU's primary context, its events and registered host memory. No call depends on the current device.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/driver.hpp"

namespace fdcache::cuda {

// Retains the primary context of one device, which all frameworks of the process share.
class Context : public std::enable_shared_from_this<Context> {
  public:
    explicit Context(int ordinal);
    ~Context();
    Context(const Context &) = delete;
    Context &operator=(const Context &) = delete;

    ContextHandle handle() const { return handle_; }
    int ordinal() const { return ordinal_; }
    // The error that made the device unusable, if any.
    std::optional<std::string> lost() const;
    // Records the error if no call on this device can succeed after it.
    void note(const Error &error);
    // Records the error and treats the device as unusable.
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

// Makes a context current for a scope, in which calls do not break stream captures of other libraries.
class Current {
  public:
    explicit Current(const Context &context);
    ~Current();
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;

  private:
    int capture_mode_ = 2;  // relaxed; holds the thread's own mode during the scope
};

// A driver event from a context's pool.
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

bool is_capturing(Context &context, StreamHandle stream);

// Records events later than it promised to.
class Promiser {
  public:
    virtual ~Promiser() = default;
    virtual void hurry() = 0;
};

// An event that is recorded once. Its driver event returns to the pool with the last reference.
class Event : public std::enable_shared_from_this<Event> {
  public:
    Event(std::shared_ptr<Context> context, bool timing);
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;

    // Announces that the event will be recorded. Until then it is not reached and `hold` blocks; the driver
    // would treat an event that is not recorded as reached.
    // `by` will record it.
    void promise(std::weak_ptr<Promiser> by = {});
    // Tells whoever promised to record the event that someone waits for it.
    void hurry() const;
    bool is_promised() const { return state_.load(std::memory_order_acquire) == State::kPromised; }
    // If the driver refuses, waits for the stream instead, after which the event is reached. If that fails
    // too, counts the event as reached and returns the first error.
    std::optional<Error> record(StreamHandle stream);
    // Makes the stream wait for the event. Blocks the thread until a promised event is recorded.
    void hold(StreamHandle stream) const;
    bool is_capturing(StreamHandle stream) const { return cuda::is_capturing(*context_, stream); }
    // Events of a lost device are reached, because nothing runs there any more. A failed query loses the
    // device.
    bool is_reached() const;
    // Device seconds between two reached events; 0 if one of them was never recorded.
    double seconds_since(const Event &earlier) const;

  private:
    enum class State : int { kNew, kPromised, kRecorded, kReached, kPassed };

    const std::shared_ptr<Context> context_;
    const PooledEvent event_;
    std::weak_ptr<Promiser> promiser_;
    mutable std::atomic<State> state_{State::kNew};
};

// Pins host memory for all contexts; the destructor unpins it.
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

// True if the stream belongs to this context; default streams belong to every context.
bool is_stream_of(Context &context, StreamHandle stream);

}  // namespace fdcache::cuda
