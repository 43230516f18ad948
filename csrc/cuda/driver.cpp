#include "cuda/driver.hpp"

#include <dlfcn.h>

namespace fdcache::cuda {
namespace {

constexpr int kNotInitialized = 3;
constexpr int kBatchVersion = 13000;

template <typename Function>
void load(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
        throw Error(std::string("libcuda.so.1 has no ") + name + "; install a newer driver", kNotInitialized);
    }
}

Driver load_driver() {
    // Never closed: other libraries of the process use it.
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
        throw Error(std::string("no CUDA driver: ") + dlerror(), kNotInitialized);
    }
    Driver loaded{};
    load(library, "cuGetErrorName", loaded.get_error_name);
    load(library, "cuGetErrorString", loaded.get_error_string);
    load(library, "cuDeviceGet", loaded.device_get);
    load(library, "cuDeviceGetUuid_v2", loaded.device_uuid);
    load(library, "cuDevicePrimaryCtxRetain", loaded.context_retain);
    load(library, "cuDevicePrimaryCtxRelease_v2", loaded.context_release);
    load(library, "cuCtxPushCurrent_v2", loaded.context_push);
    load(library, "cuCtxPopCurrent_v2", loaded.context_pop);
    load(library, "cuMemHostRegister_v2", loaded.host_register);
    load(library, "cuMemHostUnregister", loaded.host_unregister);
    load(library, "cuMemHostGetDevicePointer_v2", loaded.host_device_address);
    load(library, "cuMemGetAddressRange_v2", loaded.address_range);
    load(library, "cuIpcGetMemHandle", loaded.ipc_get);
    load(library, "cuIpcOpenMemHandle_v2", loaded.ipc_open);
    load(library, "cuIpcCloseMemHandle", loaded.ipc_close);
    load(library, "cuCtxEnablePeerAccess", loaded.enable_peer);
    load(library, "cuMemcpyAsync", loaded.copy);
    load(library, "cuMemcpy2DAsync_v2", loaded.copy_2d);
    load(library, "cuLaunchKernel", loaded.launch);
    load(library, "cuEventCreate", loaded.event_create);
    load(library, "cuEventDestroy_v2", loaded.event_destroy);
    load(library, "cuEventRecord", loaded.event_record);
    load(library, "cuEventQuery", loaded.event_query);
    load(library, "cuEventElapsedTime", loaded.event_elapsed);
    load(library, "cuStreamWaitEvent", loaded.stream_wait);
    load(library, "cuStreamSynchronize", loaded.stream_synchronize);
    load(library, "cuStreamGetCtx", loaded.stream_context);
    load(library, "cuStreamIsCapturing", loaded.stream_is_capturing);
    load(library, "cuThreadExchangeStreamCaptureMode", loaded.exchange_capture_mode);
    int (*init)(unsigned);
    load(library, "cuInit", init);
    int (*entry_point)(const char *, void **, int, unsigned long long, int *);
    load(library, "cuGetProcAddress_v2", entry_point);
    if (const int result = init(0); result != kSuccess) {
        const char *text = nullptr;
        loaded.get_error_string(result, &text);
        throw Error(std::string("the CUDA driver does not start: ") + (text != nullptr ? text : "unknown"),
                    result);
    }
    void *batch = nullptr;
    if (entry_point("cuMemcpyBatchAsync", &batch, kBatchVersion, 0, nullptr) == kSuccess) {
        loaded.copy_batch = reinterpret_cast<decltype(loaded.copy_batch)>(batch);
    }
    return loaded;
}

}  // namespace

const Driver &driver() {
    static const Driver loaded = load_driver();
    return loaded;
}

void check(int result, const char *call) {
    if (result == kSuccess) return;
    const char *name = nullptr;
    const char *text = nullptr;
    driver().get_error_name(result, &name);
    driver().get_error_string(result, &text);
    throw Error(std::string(call) + ": " + (name != nullptr ? name : std::to_string(result).c_str()) + " (" +
                    (text != nullptr ? text : "unknown") + ")",
                result);
}

}  // namespace fdcache::cuda
