// Memory that a GPU reaches: its own, and what is pinned on the host.
#pragma once

#include <cstddef>

namespace fdcache::stand_in {

inline constexpr int kHost = -1;

// Of a GPU, or pinned on the host. Until something is made known, all memory is reached.
void make_known(const void *data, std::size_t nbytes, int gpu = kHost);
void forget(const void *data);
// Whose memory it is; the host's where it is not known.
int owner_of(const void *data);
// Ends the process, with words on standard error, if a GPU does not reach it.
void expect_reached(const void *data, std::size_t nbytes);

}  // namespace fdcache::stand_in
