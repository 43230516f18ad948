// Memory of a GPU that other processes of the machine read: allocations exported, and those of peers opened.
#pragma once

#include <cstddef>
#include <memory>

#include "cuda/context.hpp"

namespace fdcache::cuda {

// The allocation around an address. `handle` opens it in another process.
struct Exported {
    IpcHandle handle;
    Address base;
    std::size_t nbytes;
};

// Throws Error for memory without such a handle: mapped by the virtual memory calls, or of a driver's pool.
Exported export_memory(Context &context, Address address);

// Lets kernels of `context` access the memory of another GPU of this process.
void enable_peer_access(Context &context, Context &other);

// A peer's allocation, mapped until the destructor.
class PeerMemory {
  public:
    PeerMemory(std::shared_ptr<Context> context, const IpcHandle &handle);
    ~PeerMemory();
    PeerMemory(const PeerMemory &) = delete;
    PeerMemory &operator=(const PeerMemory &) = delete;

    Address address() const { return address_; }

  private:
    const std::shared_ptr<Context> context_;
    Address address_ = 0;
};

}  // namespace fdcache::cuda
