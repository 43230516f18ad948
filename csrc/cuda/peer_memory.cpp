#include "cuda/peer_memory.hpp"

#include <utility>

namespace fdcache::cuda {
namespace {

constexpr unsigned kLazyPeerAccess = 1;
constexpr int kPeerAccessEnabled = 704;

}  // namespace

Exported export_memory(Context &context, Address address) {
    const Current current(context);
    Exported found{};
    check(driver().address_range(&found.base, &found.nbytes, address), "cuMemGetAddressRange");
    check(driver().ipc_get(&found.handle, found.base), "cuIpcGetMemHandle");
    return found;
}

void enable_peer_access(Context &context, Context &other) {
    const Current current(context);
    const int result = driver().enable_peer(other.handle(), 0);
    if (result != kPeerAccessEnabled) check(result, "cuCtxEnablePeerAccess");
}

PeerMemory::PeerMemory(std::shared_ptr<Context> context, const IpcHandle &handle)
    : context_(std::move(context)) {
    const Current current(*context_);
    check(driver().ipc_open(&address_, handle, kLazyPeerAccess), "cuIpcOpenMemHandle");
}

PeerMemory::~PeerMemory() {
    if (driver().context_push(context_->handle()) != kSuccess) return;
    driver().ipc_close(address_);
    ContextHandle popped;
    driver().context_pop(&popped);
}

}  // namespace fdcache::cuda
