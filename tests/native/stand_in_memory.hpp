// Memory that a GPU can access: its own, and pinned host memory.
#pragma once

#include <cstddef>

namespace fdcache::stand_in {

inline constexpr int kHost = -1;

// Registers memory of a GPU, or pinned host memory. Before the first call, all memory is accessible.
void make_known(const void *data, std::size_t nbytes, int gpu = kHost);
void forget(const void *data);
// The owner of the memory; the host if it is not registered.
int owner_of(const void *data);

// The registered piece around the address; of the host and empty if there is none.
struct Known {
    const void *data = nullptr;
    std::size_t nbytes = 0;
    int gpu = kHost;
};
Known piece_of(const void *data);
// Ends the process, with a message on standard error, if the GPU cannot access it.
void expect_reached(const void *data, std::size_t nbytes);

}  // namespace fdcache::stand_in
