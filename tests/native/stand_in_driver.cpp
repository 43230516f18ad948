// A CUDA driver whose device memory is host memory and whose streams are threads. Built as libcuda.so.1, so
// that the core loads it like a real driver.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <ranges>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda/driver.hpp"
#include "native/stand_in_faults.hpp"
#include "native/stand_in_gpus.hpp"
#include "native/stand_in_holdings.hpp"
#include "native/stand_in_kernels.hpp"
#include "native/stand_in_memory.hpp"
#include "native/stand_in_streams.hpp"

using namespace fdcache::cuda;
using namespace fdcache::stand_in;

namespace {

constexpr int kInvalidValue = 1;
constexpr int kNotFound = 500;
constexpr int kAlreadyRegistered = 712;

std::uint8_t *at(Address address) {
    return reinterpret_cast<std::uint8_t *>(address);
}

void copy_bytes(Address to, Address from, std::size_t nbytes) {
    expect_reached(at(from), nbytes);
    expect_reached(at(to), nbytes);
    std::memcpy(at(to), at(from), nbytes);
}

// The result of the call: an injected fault, or an error if the stream is not of the current GPU.
int trouble_on(StreamHandle stream, const char *call) {
    if (const int code = trouble(call); code != kSuccess) return code;
    if (current_gpu() < 0) return kInvalidContext;
    return stream_of(stream, current_gpu()).gpu() == current_gpu() ? kSuccess : kInvalidHandle;
}

bool is_mapped(void *data, std::size_t nbytes) {
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto first = reinterpret_cast<std::uintptr_t>(data) / page * page;
    const auto end = reinterpret_cast<std::uintptr_t>(data) + nbytes;
    std::vector<unsigned char> pages((end - first + page - 1) / page);
    return mincore(reinterpret_cast<void *>(first), end - first, pages.data()) == 0;
}

int copy_batch(const Address *to, const Address *from, const std::size_t *sizes, std::size_t count,
               BatchAttributes *, std::size_t *, std::size_t, StreamHandle stream) {
    delay_call();
    if (const int code = trouble_on(stream, "cuMemcpyBatchAsync"); code != kSuccess) return code;
    struct Copy {
        Address to, from;
        std::size_t nbytes;
    };
    std::vector<Copy> copies;
    for (std::size_t i = 0; i < count; ++i) copies.push_back({to[i], from[i], sizes[i]});
    stream_of(stream, current_gpu()).copy([copies = std::move(copies)] {
        // Backwards, because a batch guarantees no order.
        for (const Copy &each : copies | std::views::reverse) copy_bytes(each.to, each.from, each.nbytes);
    });
    return kSuccess;
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
    return kSuccess;
}

int cuGetErrorName(int code, const char **name) {
    static thread_local char text[32];
    std::snprintf(text, sizeof text, "CUDA_ERROR_%d", code);
    *name = text;
    return kSuccess;
}

int cuGetErrorString(int code, const char **text) {
    *text = text_of(code);
    return kSuccess;
}

int cuGetProcAddress_v2(const char *name, void **entry, int, unsigned long long, int *) {
    if (std::string_view(name) != "cuMemcpyBatchAsync") return kNotFound;
    *entry = reinterpret_cast<void *>(&copy_batch);
    return kSuccess;
}

// --- device and context

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < num_visible_gpus() ? kSuccess : kInvalidValue;
}

int cuDeviceGetUuid_v2(void *uuid, int device) {
    const auto bytes = uuid_of(visible_gpu(device));
    std::memcpy(uuid, bytes.data(), bytes.size());
    return kSuccess;
}

int cuDevicePrimaryCtxRetain(ContextHandle *handle, int device) {
    *handle = context_of(visible_gpu(device));
    ++contexts;
    return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int) {
    --contexts;
    return kSuccess;
}

int cuCtxPushCurrent_v2(ContextHandle handle) {
    if (!push_context(handle)) return kInvalidContext;
    ++pushed;
    return kSuccess;
}

int cuCtxPopCurrent_v2(ContextHandle *handle) {
    *handle = pop_context();
    if (*handle == nullptr) return kInvalidContext;
    --pushed;
    return kSuccess;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    static thread_local int current = 0;
    *mode = std::exchange(current, *mode);
    return kSuccess;
}

// --- memory

int cuMemHostRegister_v2(void *data, std::size_t nbytes, unsigned) {
    if (const int code = trouble("cuMemHostRegister"); code != kSuccess) return code;
    if (!is_mapped(data, nbytes)) return kInvalidValue;
    if (!registered.take(data)) return kAlreadyRegistered;
    make_known(data, nbytes);
    return kSuccess;
}

int cuMemHostUnregister(void *data) {
    const bool found = registered.give(data);
    forget(data);
    if (is_lost()) return kLost;
    return found ? kSuccess : kInvalidValue;
}

int cuMemHostGetDevicePointer_v2(Address *address, void *data, unsigned) {
    *address = reinterpret_cast<Address>(data);
    return kSuccess;
}

int cuMemcpyAsync(Address to, Address from, std::size_t nbytes, StreamHandle stream) {
    delay_call();
    if (const int code = trouble_on(stream, "cuMemcpyAsync"); code != kSuccess) return code;
    stream_of(stream, current_gpu()).copy([=] { copy_bytes(to, from, nbytes); });
    return kSuccess;
}

int cuMemcpy2DAsync_v2(const Copy2D *asked, StreamHandle stream) {
    delay_call();
    if (const int code = trouble_on(stream, "cuMemcpy2DAsync"); code != kSuccess) return code;
    stream_of(stream, current_gpu()).copy([copy = *asked] {
        constexpr unsigned kHost = 1;
        const Address from =
            copy.source_type == kHost ? reinterpret_cast<Address>(copy.source_host) : copy.source_device;
        const Address to =
            copy.target_type == kHost ? reinterpret_cast<Address>(copy.target_host) : copy.target_device;
        for (std::size_t row = 0; row < copy.height; ++row) {
            copy_bytes(to + row * copy.target_pitch, from + row * copy.source_pitch, copy.width);
        }
    });
    return kSuccess;
}

// --- streams and events

int cuLaunchKernel(FunctionHandle function, unsigned grid, unsigned, unsigned, unsigned block, unsigned,
                   unsigned, unsigned, StreamHandle stream, void **arguments, void **) {
    if (const int code = trouble_on(stream, "cuLaunchKernel"); code != kSuccess) return code;
    if (function == nullptr || function->gpu != current_gpu()) return kInvalidHandle;
    if (grid == 0 || block == 0) return kInvalidValue;
    stream_of(stream, current_gpu()).copy(function->bind(arguments));
    return kSuccess;
}

int cuEventCreate(EventHandle *event, unsigned) {
    if (const int code = trouble("cuEventCreate"); code != kSuccess) return code;
    if (current_gpu() < 0) return kInvalidContext;
    *event = new CUevent_st(current_gpu());
    events.take(*event);
    return kSuccess;
}

int cuEventDestroy_v2(EventHandle event) {
    if (!events.give(event)) return kInvalidValue;
    const std::unique_ptr<CUevent_st> owned(event);
    return kSuccess;
}

int cuEventRecord(EventHandle event, StreamHandle stream) {
    if (const int code = trouble("cuEventRecord"); code != kSuccess) return code;
    auto &recorded = stream_of(stream, event->gpu());
    if (recorded.gpu() != event->gpu()) return kInvalidHandle;
    event->record(recorded.mark());
    return kSuccess;
}

int cuEventQuery(EventHandle event) {
    if (const int code = trouble("cuEventQuery"); code != kSuccess) return code;
    const Mark mark = event->last();
    return mark == nullptr || mark->reached ? kSuccess : kNotReady;
}

int cuEventElapsedTime(float *milliseconds, EventHandle begin, EventHandle end) {
    if (const int code = trouble("cuEventElapsedTime"); code != kSuccess) return code;
    const Mark from = begin->last(), to = end->last();
    if (from == nullptr || to == nullptr) return kInvalidHandle;
    if (!from->reached || !to->reached) return kNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(to->when - from->when).count();
    return kSuccess;
}

int cuStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned) {
    if (const int code = trouble("cuStreamWaitEvent"); code != kSuccess) return code;
    // Uses the latest record; an event that was never recorded blocks no stream.
    if (const Mark mark = event->last()) stream_of(stream, current_gpu()).wait(mark);
    return kSuccess;
}

int cuStreamSynchronize(StreamHandle stream) {
    if (const int code = trouble("cuStreamSynchronize"); code != kSuccess) return code;
    stream_of(stream, current_gpu()).mark()->wait();
    return is_lost() ? kLost : kSuccess;
}

int cuStreamGetCtx(StreamHandle stream, ContextHandle *handle) {
    *handle = stream == foreign ? nullptr : context_of(stream_of(stream, 0).gpu());
    return trouble("cuStreamGetCtx");
}

int cuStreamIsCapturing(StreamHandle stream, int *status) {
    *status = stream != nullptr && stream == captured;
    return kSuccess;
}

}  // extern "C"
