// The implementations of the two functions that keys are made of. All give the same result.
#pragma once

#include <cstddef>
#include <span>

#include "hash/blake3.hpp"
#include "hash/sha256.hpp"

namespace fdcache {

struct HashBackend {
    const char *name;
    std::size_t lanes;
    // Writes the digests of `lanes` messages, and makes the links before, after or beside them. The links
    // must not depend on the digests.
    void (*digest)(const blake3::Messages &messages, Digest *out, const sha256::Links &links);
    void (*link)(const sha256::Links &links);
};

// Backends that this machine can run, those with the most instructions first; "portable" is always last.
std::span<const HashBackend> hash_backends();

// The first of them, unless another takes less than half its time on this machine: measured once, in a
// millisecond.
const HashBackend &best_hash_backend();

// The digest of one message, which has at least one byte.
Digest keyed_digest(const HashBackend &backend, const blake3::Key &key,
                    std::span<const std::uint8_t> message);

}  // namespace fdcache
