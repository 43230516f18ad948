// The driver's calls for memory of other processes. A handle names the file of an allocation by process and
// descriptor, so it can be opened while that process lives, and what was opened outlives it.
#include "native/stand_in_ipc.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "cuda/driver.hpp"
#include "native/stand_in_faults.hpp"
#include "native/stand_in_gpus.hpp"
#include "native/stand_in_holdings.hpp"
#include "native/stand_in_memory.hpp"

using namespace fdcache::cuda;

namespace fdcache::stand_in {
namespace {

constexpr int kInvalidValue = 1;
constexpr int kMapFailed = 205;

struct Named {
    int process;
    int descriptor;
    int gpu;
    std::size_t nbytes;
};
static_assert(sizeof(Named) <= sizeof(IpcHandle));

struct Mapping {
    std::size_t nbytes;
    int count;
};

std::mutex mutex;
std::map<const void *, int> shared;
std::map<std::string, void *> by_handle;
std::map<void *, Mapping> mappings;

void *map_file(const Named &named) {
    const std::string path =
        "/proc/" + std::to_string(named.process) + "/fd/" + std::to_string(named.descriptor);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return nullptr;
    void *data = mmap(nullptr, named.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return data == MAP_FAILED ? nullptr : data;
}

}  // namespace

void share(const void *data, int descriptor) {
    const std::lock_guard lock(mutex);
    if (descriptor < 0) {
        shared.erase(data);
    } else {
        shared[data] = descriptor;
    }
}

}  // namespace fdcache::stand_in

using namespace fdcache::stand_in;

extern "C" {

int cuMemGetAddressRange_v2(Address *base, std::size_t *nbytes, Address address) {
    if (const int code = trouble("cuMemGetAddressRange"); code != kSuccess) return code;
    const Known found = piece_of(reinterpret_cast<const void *>(address));
    if (found.gpu == kHost) return kInvalidValue;
    *base = reinterpret_cast<Address>(found.data);
    *nbytes = found.nbytes;
    return kSuccess;
}

int cuIpcGetMemHandle(IpcHandle *handle, Address address) {
    if (const int code = trouble("cuIpcGetMemHandle"); code != kSuccess) return code;
    const auto *data = reinterpret_cast<const void *>(address);
    const Known found = piece_of(data);
    const std::lock_guard lock(mutex);
    const auto file = shared.find(data);
    if (file == shared.end()) return kInvalidValue;
    const Named named{getpid(), file->second, found.gpu, found.nbytes};
    *handle = {};
    std::memcpy(handle->bytes, &named, sizeof named);
    return kSuccess;
}

int cuIpcOpenMemHandle_v2(Address *address, IpcHandle handle, unsigned) {
    if (const int code = trouble("cuIpcOpenMemHandle"); code != kSuccess) return code;
    if (current_gpu() < 0) return kInvalidContext;
    Named named{};
    std::memcpy(&named, handle.bytes, sizeof named);
    if (named.process == getpid())
        return kInvalidContext;  // as the driver: not in the process that allocated it
    const std::lock_guard lock(mutex);
    void *&data = by_handle[{reinterpret_cast<const char *>(handle.bytes), sizeof handle.bytes}];
    if (data == nullptr && (data = map_file(named)) == nullptr) return kMapFailed;
    auto &mapping = mappings[data];
    mapping.nbytes = named.nbytes;
    if (mapping.count++ == 0) make_known(data, named.nbytes, named.gpu);
    opened.take(data);
    *address = reinterpret_cast<Address>(data);
    return kSuccess;
}

int cuIpcCloseMemHandle(Address address) {
    auto *data = reinterpret_cast<void *>(address);
    const std::lock_guard lock(mutex);
    const auto found = mappings.find(data);
    if (found == mappings.end()) return kInvalidValue;
    if (--found->second.count > 0) return kSuccess;
    opened.give(data);
    forget(data);
    munmap(data, found->second.nbytes);  // a kernel that still reads it fails
    mappings.erase(found);
    std::erase_if(by_handle, [data](const auto &each) { return each.second == data; });
    return is_lost() ? kLost : kSuccess;
}

int cuCtxEnablePeerAccess(ContextHandle, unsigned) {
    return trouble("cuCtxEnablePeerAccess");
}

}  // extern "C"
