// The calls of the CUDA driver that copies use, loaded at run time so that the core also loads on machines
// without the driver. The types follow the driver's documented binary interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fdcache::cuda {

using Address = unsigned long long;
using StreamHandle = struct CUstream_st *;
using EventHandle = struct CUevent_st *;
using FunctionHandle = struct CUfunc_st *;
using ContextHandle = struct CUctx_st *;

// An allocation that other processes can open, in the driver's own format.
struct IpcHandle {
    unsigned char bytes[64];
};

inline constexpr int kSuccess = 0;
inline constexpr int kNotReady = 600;

// A failed call of the driver, with the driver's error code.
class Error : public std::runtime_error {
  public:
    Error(const std::string &message, int code) : std::runtime_error(message), code(code) {}
    const int code;
};

struct Copy2D {
    std::size_t source_x = 0, source_y = 0;
    unsigned source_type = 0;
    const void *source_host = nullptr;
    Address source_device = 0;
    void *source_array = nullptr;
    std::size_t source_pitch = 0;
    std::size_t target_x = 0, target_y = 0;
    unsigned target_type = 0;
    void *target_host = nullptr;
    Address target_device = 0;
    void *target_array = nullptr;
    std::size_t target_pitch = 0;
    std::size_t width = 0, height = 0;
};
static_assert(sizeof(Copy2D) == 128);

struct MemoryLocation {
    int type = 0;
    int id = 0;
};

struct BatchAttributes {
    int access_order = 1;  // read sources in stream order
    MemoryLocation source, target;
    unsigned flags = 0;
};
static_assert(sizeof(BatchAttributes) == 24);

struct Driver {
    int (*get_error_name)(int, const char **);
    int (*get_error_string)(int, const char **);
    int (*device_get)(int *, int);
    int (*device_uuid)(void *, int);
    int (*context_retain)(ContextHandle *, int);
    int (*context_release)(int);
    int (*context_push)(ContextHandle);
    int (*context_pop)(ContextHandle *);
    int (*host_register)(void *, std::size_t, unsigned);
    int (*host_unregister)(void *);
    int (*host_device_address)(Address *, void *, unsigned);
    int (*address_range)(Address *, std::size_t *, Address);
    int (*ipc_get)(IpcHandle *, Address);
    int (*ipc_open)(Address *, IpcHandle, unsigned);
    int (*ipc_close)(Address);
    int (*enable_peer)(ContextHandle, unsigned);
    int (*copy)(Address, Address, std::size_t, StreamHandle);
    int (*copy_2d)(const Copy2D *, StreamHandle);
    int (*launch)(FunctionHandle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  StreamHandle, void **, void **);
    int (*event_create)(EventHandle *, unsigned);
    int (*event_destroy)(EventHandle);
    int (*event_record)(EventHandle, StreamHandle);
    int (*event_query)(EventHandle);
    int (*event_elapsed)(float *, EventHandle, EventHandle);
    int (*stream_wait)(StreamHandle, EventHandle, unsigned);
    int (*stream_synchronize)(StreamHandle);
    int (*stream_context)(StreamHandle, ContextHandle *);
    int (*stream_is_capturing)(StreamHandle, int *);
    int (*exchange_capture_mode)(int *);
    // Null before CUDA 13.
    int (*copy_batch)(const Address *, const Address *, const std::size_t *, std::size_t, BatchAttributes *,
                      std::size_t *, std::size_t, StreamHandle);
};

// Loads the driver at the first call. Throws Error if the machine has none.
const Driver &driver();

// Throws Error with the call and the driver's message unless `result` is success.
void check(int result, const char *call);

}  // namespace fdcache::cuda
