#include "native/stand_in_streams.hpp"

#include <array>
#include <cstdint>
#include <set>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "native/stand_in_faults.hpp"
#include "native/stand_in_gpus.hpp"

namespace fdcache::stand_in {
namespace {

std::atomic<unsigned> call_delay{0};
std::atomic<unsigned> copy_delay{0};
std::atomic<unsigned> num_copies{0};

void pause(unsigned microseconds) {
    if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// Some copies take no time and others twice the average, so that streams overtake each other.
void delay_copy() {
    const unsigned average = copy_delay;
    if (average == 0) return;
    const unsigned scattered = num_copies.fetch_add(1) * 2654435761U >> 24;
    pause(average * scattered / 128);
}

struct Streams {
    std::mutex mutex;
    std::set<Stream *> all;
};

// Never destroyed: streams that are not closed last as long as the process.
Streams &streams() {
    static auto &all = *new Streams;
    return all;
}

}  // namespace

std::atomic<const void *> captured{nullptr}, foreign{nullptr};

void set_delays(Delays delays) {
    call_delay = delays.call;
    copy_delay = delays.copy;
}

void delay_call() {
    pause(call_delay);
}

Stream &stream_of(cuda::StreamHandle handle, int gpu) {
    constexpr std::uintptr_t kDefaultStreams = 2;
    if (reinterpret_cast<std::uintptr_t>(handle) > kDefaultStreams) return *handle;
    static auto &standard = *new std::array<Stream, kMostGpus>{Stream(0), Stream(1)};
    return standard.at(gpu);
}

void synchronize_all() {
    std::vector<Mark> marks;
    {
        const std::lock_guard lock(streams().mutex);
        for (Stream *stream : streams().all) marks.push_back(stream->mark());
    }
    for (const Mark &mark : marks) mark->wait();
}

}  // namespace fdcache::stand_in

namespace fdcache::cuda {

using namespace fdcache::stand_in;

CUstream_st::CUstream_st(int gpu) : gpu_(gpu), thread_([this] { serve(); }) {
    const std::lock_guard lock(streams().mutex);
    streams().all.insert(this);
}

CUstream_st::~CUstream_st() {
    {
        const std::lock_guard lock(streams().mutex);
        streams().all.erase(this);
    }
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
        changed_.notify_all();
    }
    thread_.join();
}

void CUstream_st::copy(std::function<void()> work) {
    call([work = std::move(work)] {
        delay_copy();
        const std::shared_lock lock(memory_in_use());
        if (!is_lost()) work();
    });
}

void CUstream_st::call(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
}

Mark CUstream_st::mark() {
    const Mark made = std::make_shared<Moment>();
    call([made] {
        made->when = std::chrono::steady_clock::now();
        made->reached = true;
        made->reached.notify_all();
    });
    return made;
}

void CUstream_st::wait(const Mark &mark) {
    call([mark] { mark->wait(); });
}

void CUstream_st::serve() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return ending_ || !work_.empty(); });
        if (work_.empty()) return;
        const auto work = std::move(work_.front());
        work_.pop_front();
        lock.unlock();
        work();
        lock.lock();
    }
}

void CUevent_st::record(const Mark &mark) {
    const std::lock_guard lock(mutex_);
    last_ = mark;
}

Mark CUevent_st::last() {
    const std::lock_guard lock(mutex_);
    return last_;
}

}  // namespace fdcache::cuda
