// SHA-256 (FIPS 180-4), with its compression function exposed to hash many messages side by side.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "hash/digest.hpp"

namespace fdcache::sha256 {

inline constexpr std::size_t chunk_bytes = 64;

using State = std::array<std::uint32_t, 8>;

inline constexpr State initial_state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// An implementation of the compression function. All give the same result.
struct Backend {
    const char *name;
    // Folds `chunks` consecutive chunks at `data` into `state`.
    void (*compress)(State &state, const std::uint8_t *data, std::size_t chunks);
    // Folds the `chunks` chunks of message i at `data + i * stride` into `states[i]`.
    void (*compress_many)(std::span<State> states, const std::uint8_t *data, std::size_t stride,
                          std::size_t chunks);
};

// Backends that this machine can run, fastest first; "portable" is always last.
std::span<const Backend> backends();

inline const Backend &best_backend() {
    return backends().front();
}

// Finishes a message whose first chunks are in `state`; `tail` holds its last bytes.
Digest finish(const Backend &backend, State state, std::span<const std::uint8_t> tail,
              std::uint64_t total_bytes);

Digest digest(const Backend &backend, std::span<const std::uint8_t> message);

}  // namespace fdcache::sha256
