// Page-aligned anonymous memory, zero filled.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fdcache {

class HostMemory {
  public:
    // Throws std::bad_alloc when the system refuses the mapping.
    explicit HostMemory(std::size_t nbytes);
    ~HostMemory();
    HostMemory(const HostMemory &) = delete;
    HostMemory &operator=(const HostMemory &) = delete;

    // Pages not touched yet will come from that NUMA node while it has any. Kernels without NUMA ignore it.
    void prefer_node(unsigned node);

    // Gives every page its memory now, by `threads` short-lived threads. Throws std::bad_alloc.
    void populate(unsigned threads);

    std::uint8_t *data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    std::uint8_t *data_;
    std::size_t size_;
};

}  // namespace fdcache
