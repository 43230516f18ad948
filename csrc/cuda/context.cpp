#include "cuda/context.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace fdcache::cuda {
namespace {

constexpr unsigned kNoTiming = 2;
constexpr unsigned kPortableMapped = 1 | 2;

// Errors after which every call on the context fails.
constexpr std::array kFatal = {4, 46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999};

template <typename Call>
auto noted(Context &context, Call call) {
    try {
        return call();
    } catch (const Error &error) {
        context.note(error);
        throw;
    }
}

}  // namespace

Context::Context(int ordinal) : ordinal_(ordinal) {
    check(driver().device_get(&device_, ordinal), "cuDeviceGet");
    check(driver().context_retain(&handle_, device_), "cuDevicePrimaryCtxRetain");
}

Context::~Context() {
    // Ignore results: a lost device refuses every call.
    if (driver().context_push(handle_) == kSuccess) {
        for (auto &events : idle_) {
            for (EventHandle event : events) driver().event_destroy(event);
        }
        ContextHandle popped;
        driver().context_pop(&popped);
    }
    driver().context_release(device_);
}

std::optional<std::string> Context::lost() const {
    const std::lock_guard lock(mutex_);
    return lost_;
}

void Context::note(const Error &error) {
    if (std::find(kFatal.begin(), kFatal.end(), error.code) != kFatal.end()) lose(error);
}

void Context::lose(const Error &error) {
    const std::lock_guard lock(mutex_);
    if (!lost_) lost_ = error.what();
}

EventHandle Context::take_event(bool timing) {
    {
        const std::lock_guard lock(mutex_);
        auto &idle = idle_[timing];
        if (!idle.empty()) {
            EventHandle event = idle.back();
            idle.pop_back();
            return event;
        }
    }
    return noted(*this, [&] {
        const Current current(*this);
        EventHandle event;
        check(driver().event_create(&event, timing ? 0 : kNoTiming), "cuEventCreate");
        return event;
    });
}

void Context::give_event(EventHandle event, bool timing) {
    const std::lock_guard lock(mutex_);
    idle_[timing].push_back(event);
}

Current::Current(const Context &context) {
    check(driver().context_push(context.handle()), "cuCtxPushCurrent");
    driver().exchange_capture_mode(&capture_mode_);
}

Current::~Current() {
    driver().exchange_capture_mode(&capture_mode_);
    ContextHandle popped;
    driver().context_pop(&popped);
}

PooledEvent::PooledEvent(std::shared_ptr<Context> context, bool timing)
    : context_(std::move(context)), timing_(timing), handle_(context_->take_event(timing)) {}

PooledEvent::~PooledEvent() {
    context_->give_event(handle_, timing_);
}

Event::Event(std::shared_ptr<Context> context, bool timing)
    : context_(std::move(context)), event_(context_, timing) {}

void Event::promise(std::weak_ptr<Promiser> by) {
    promiser_ = std::move(by);
    state_.store(State::kPromised, std::memory_order_release);
}

void Event::hurry() const {
    if (!is_promised()) return;
    if (const auto promiser = promiser_.lock()) promiser->hurry();
}

std::optional<Error> Event::record(StreamHandle stream) {
    State state = State::kPassed;
    std::optional<Error> refusal;
    try {
        const Current current(*context_);
        const int result = driver().event_record(event_.handle(), stream);
        if (result == kSuccess) state = State::kRecorded;
        if (result != kSuccess && driver().stream_synchronize(stream) != kSuccess)
            check(result, "cuEventRecord");
    } catch (const Error &error) {
        context_->note(error);
        refusal.emplace(error);
    }
    state_.store(state, std::memory_order_release);
    state_.notify_all();
    return refusal;
}

void Event::hold(StreamHandle stream) const {
    hurry();
    state_.wait(State::kPromised, std::memory_order_acquire);
    if (state_.load(std::memory_order_acquire) == State::kPassed) return;
    noted(*context_, [&] {
        const Current current(*context_);
        check(driver().stream_wait(stream, event_.handle(), 0), "cuStreamWaitEvent");
    });
}

bool Event::is_reached() const {
    State state = state_.load(std::memory_order_acquire);
    if (state == State::kPromised) return false;
    if (state == State::kReached || state == State::kPassed) return true;
    try {
        const Current current(*context_);
        const int result = driver().event_query(event_.handle());
        if (result == kNotReady) return false;
        check(result, "cuEventQuery");
        if (state == State::kRecorded) state_.compare_exchange_strong(state, State::kReached);
    } catch (const Error &error) {
        context_->lose(error);
    }
    return true;
}

double Event::seconds_since(const Event &earlier) const {
    if (state_ == State::kPassed || earlier.state_ == State::kPassed) return 0;
    const Current current(*context_);
    float milliseconds = 0;
    check(driver().event_elapsed(&milliseconds, earlier.event_.handle(), event_.handle()),
          "cuEventElapsedTime");
    return milliseconds / 1e3;
}

Registration::Registration(std::shared_ptr<Context> context, void *data, std::size_t nbytes)
    : context_(std::move(context)), data_(data) {
    const Current current(*context_);
    check(driver().host_register(data, nbytes, kPortableMapped), "cuMemHostRegister");
    if (const int result = driver().host_device_address(&address_, data, 0); result != kSuccess) {
        driver().host_unregister(data);
        check(result, "cuMemHostGetDevicePointer");
    }
}

Registration::~Registration() {
    if (driver().context_push(context_->handle()) != kSuccess) return;
    driver().host_unregister(data_);
    ContextHandle popped;
    driver().context_pop(&popped);
}

std::array<unsigned char, 16> device_uuid(int ordinal) {
    int device = 0;
    std::array<unsigned char, 16> uuid{};
    check(driver().device_get(&device, ordinal), "cuDeviceGet");
    check(driver().device_uuid(uuid.data(), device), "cuDeviceGetUuid");
    return uuid;
}

bool is_stream_of(Context &context, StreamHandle stream) {
    constexpr std::uintptr_t kDefaultStreams = 2;
    if (reinterpret_cast<std::uintptr_t>(stream) <= kDefaultStreams) return true;
    return noted(context, [&] {
        const Current current(context);
        ContextHandle of = nullptr;
        check(driver().stream_context(stream, &of), "cuStreamGetCtx");
        return of == context.handle();
    });
}

bool is_capturing(Context &context, StreamHandle stream) {
    return noted(context, [&] {
        const Current current(context);
        int status = 0;
        check(driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
        return status != 0;
    });
}

}  // namespace fdcache::cuda
