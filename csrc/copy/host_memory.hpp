// Page-aligned anonymous memory, filled with zeros.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fdcache {

class HostMemory {
  public:
    // Throws std::bad_alloc if the system refuses the mapping.
    explicit HostMemory(std::size_t nbytes);
    ~HostMemory();
    HostMemory(const HostMemory &) = delete;
    HostMemory &operator=(const HostMemory &) = delete;

    // Takes pages that are not touched yet from this NUMA node while it has free ones. Kernels without NUMA
    // ignore it.
    void prefer_node(unsigned node);

    // Allocates every page now, with `threads` short-lived threads. Throws std::bad_alloc.
    void populate(unsigned threads);

    std::uint8_t *data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    std::uint8_t *data_;
    std::size_t size_;
};

// Enters the pages of a shared mapping into this process's page tables, so that their first use takes no
// faults; their contents stay. Kernels before 5.14 ignore it.
void map_pages(std::uint8_t *data, std::size_t nbytes);

}  // namespace fdcache
