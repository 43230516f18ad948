#include "native/stand_in_driver.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>

#include "core/checksum.hpp"
#include "swap/items.hpp"

namespace fdcache::cuda {

CUstream_st::CUstream_st() : thread_([this] { serve(); }) {}

CUstream_st::~CUstream_st() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
        changed_.notify_all();
    }
    thread_.join();
}

void CUstream_st::add(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
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

// A place in a stream; set once the stream has come there.
using Mark = std::shared_ptr<std::atomic<bool>>;

struct CUevent_st {
    std::mutex mutex;
    Mark last;  // none before the event is recorded

    Mark get() {
        const std::lock_guard lock(mutex);
        return last;
    }
};

// A kernel: makes what a stream does out of the arguments of a launch, which do not outlive it.
struct CUfunc_st {
    std::function<void()> (*bind)(void **arguments);
};

}  // namespace fdcache::cuda

using namespace fdcache::cuda;
using namespace fdcache::swap;

namespace {

constexpr int kRefused = 1;
constexpr int kNotFound = 500;

std::atomic<int> copies_before_refusal{-1};
std::atomic<bool> refuses_wait{false};
std::atomic<unsigned> call_delay{0};
std::atomic<unsigned> copy_delay{0};

void pause(unsigned microseconds) {
    if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// A copy, unless this one is to be refused.
int add_copy(StreamHandle stream, std::function<void()> copy) {
    pause(call_delay);
    if (copies_before_refusal >= 0 && copies_before_refusal.fetch_sub(1) == 0) return kRefused;
    stream->add([copy = std::move(copy)] {
        pause(copy_delay);
        copy();
    });
    return kSuccess;
}

Mark add_mark(StreamHandle stream) {
    const Mark mark = std::make_shared<std::atomic<bool>>(false);
    stream->add([mark] {
        *mark = true;
        mark->notify_all();
    });
    return mark;
}

template <typename Value>
Value argument(void **arguments, std::size_t index) {
    return *static_cast<Value *>(arguments[index]);
}

std::function<void()> bind_copy_words(void **arguments) {
    return [from = argument<const Word *>(arguments, 0), to = argument<Word *>(arguments, 1),
            count = argument<unsigned>(arguments, 2)] { std::memcpy(to, from, count * sizeof(Word)); };
}

enum class Way { kIn, kOut, kSum };

void move_chunk(Way way, const Chunk &chunk, Block &block, Word record_start, const Target &target) {
    auto *plane = reinterpret_cast<std::uint8_t *>(chunk.base + static_cast<Word>(chunk.stride * block.slot));
    auto *record = reinterpret_cast<std::uint8_t *>(record_start + chunk.offset - target.offset);
    if (way == Way::kIn) {
        std::memcpy(plane, record, chunk.nbytes);
        return;
    }
    block.sum += fdcache::checksum_part(plane, chunk.nbytes, chunk.offset / sizeof(Word));
    if (way == Way::kOut) std::memcpy(record, plane, chunk.nbytes);
    if (way == Way::kOut && target.staging != 0) std::memset(record + chunk.nbytes, 0, chunk.padding);
}

template <Way kWay>
std::function<void()> bind_move(void **arguments) {
    return [chunks = argument<const Chunk *>(arguments, 0), blocks = argument<Block *>(arguments, 1),
            range = argument<Range>(arguments, 2), target = argument<Target>(arguments, 3)] {
        for (unsigned row = 0; row < range.num_blocks; ++row) {
            Block &block = blocks[range.first_block + row];
            const Word start = target.staging == 0 ? block.record : target.staging + row * target.pitch;
            for (unsigned i = 0; i < range.num_chunks; ++i) {
                move_chunk(kWay, chunks[range.first_chunk + i], block, start, target);
            }
        }
    };
}

}  // namespace

namespace fdcache::stand_in {

void refuse_copy(int more) {
    copies_before_refusal = more;
}

void refuse_wait() {
    refuses_wait = true;
}

void set_delays(Delays delays) {
    call_delay = delays.call;
    copy_delay = delays.copy;
}

Kernels kernels() {
    static CUfunc_st copy_in{bind_move<Way::kIn>};
    static CUfunc_st copy_out{bind_move<Way::kOut>};
    static CUfunc_st sum{bind_move<Way::kSum>};
    static CUfunc_st copy_words{bind_copy_words};
    return {&copy_in, &copy_out, &sum, &copy_words};
}

}  // namespace fdcache::stand_in

// --- the driver's calls, by the names that core/cuda_driver.cpp loads

extern "C" {

int cuInit(unsigned) {
    return kSuccess;
}

int cuGetErrorName(int, const char **name) {
    *name = "CUDA_ERROR_STAND_IN";
    return kSuccess;
}

int cuGetErrorString(int, const char **text) {
    *text = "refused as told";
    return kSuccess;
}

int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *) {
    return kNotFound;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return kSuccess;
}

int cuDeviceGetUuid_v2(void *, int) {
    return kRefused;
}

int cuDevicePrimaryCtxRetain(ContextHandle *context, int) {
    *context = nullptr;
    return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int) {
    return kSuccess;
}

int cuCtxPushCurrent_v2(ContextHandle) {
    return kSuccess;
}

int cuCtxPopCurrent_v2(ContextHandle *) {
    return kSuccess;
}

int cuThreadExchangeStreamCaptureMode(int *) {
    return kSuccess;
}

int cuStreamIsCapturing(StreamHandle, int *status) {
    *status = 0;
    return kSuccess;
}

int cuStreamGetCtx(StreamHandle, ContextHandle *context) {
    *context = nullptr;
    return kSuccess;
}

int cuMemHostRegister_v2(void *, std::size_t, unsigned) {
    return kRefused;
}

int cuMemHostUnregister(void *) {
    return kRefused;
}

int cuMemHostGetDevicePointer_v2(Address *, void *, unsigned) {
    return kRefused;
}

int cuMemcpyAsync(Address to, Address from, std::size_t nbytes, StreamHandle stream) {
    return add_copy(stream, [=] {
        std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), nbytes);
    });
}

int cuMemcpy2DAsync_v2(const Copy2D *asked, StreamHandle stream) {
    return add_copy(stream, [copy = *asked] {
        constexpr unsigned kHost = 1;
        const auto *from = static_cast<const std::uint8_t *>(
            copy.source_type == kHost ? copy.source_host : reinterpret_cast<void *>(copy.source_device));
        auto *to = static_cast<std::uint8_t *>(
            copy.target_type == kHost ? copy.target_host : reinterpret_cast<void *>(copy.target_device));
        for (std::size_t row = 0; row < copy.height; ++row) {
            std::memcpy(to + row * copy.target_pitch, from + row * copy.source_pitch, copy.width);
        }
    });
}

int cuLaunchKernel(FunctionHandle function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   unsigned, StreamHandle stream, void **arguments, void **) {
    stream->add(function->bind(arguments));
    return kSuccess;
}

int cuEventCreate(EventHandle *event, unsigned) {
    *event = new CUevent_st;
    return kSuccess;
}

int cuEventDestroy_v2(EventHandle event) {
    delete event;
    return kSuccess;
}

int cuEventRecord(EventHandle event, StreamHandle stream) {
    const Mark mark = add_mark(stream);
    const std::lock_guard lock(event->mutex);
    event->last = mark;
    return kSuccess;
}

int cuStreamSynchronize(StreamHandle stream) {
    add_mark(stream)->wait(false);
    return kSuccess;
}

int cuEventQuery(EventHandle event) {
    const Mark mark = event->get();
    return mark == nullptr || *mark ? kSuccess : kNotReady;
}

int cuEventElapsedTime(float *milliseconds, EventHandle, EventHandle) {
    *milliseconds = 1;
    return kSuccess;
}

int cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned) {
    if (refuses_wait.exchange(false)) return kRefused;
    // As it was recorded last; an event that never was holds nobody.
    if (const Mark mark = event->get()) {
        stream->add([mark] { mark->wait(false); });
    }
    return kSuccess;
}

}  // extern "C"
