// Shared memory whose file another process may truncate: an access beyond the end of the file reads zeros
// instead of ending this process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fdcache {

// Guards a mapping from its construction on. The mapping must outlive the guard.
//
// The first guard installs a handler of SIGBUS. It puts a private page of zeros in the place of a page that
// the file has lost, and passes on what happens outside of guarded mappings.
class MemoryGuard {
  public:
    // Throws std::invalid_argument unless the mapping begins at a page, and std::system_error.
    MemoryGuard(void *memory, std::size_t nbytes);
    ~MemoryGuard();
    MemoryGuard(const MemoryGuard &) = delete;
    MemoryGuard &operator=(const MemoryGuard &) = delete;

    // True once a page was lost.
    bool has_lost() const;

    struct Range;

  private:
    Range *range_;
};

}  // namespace fdcache
