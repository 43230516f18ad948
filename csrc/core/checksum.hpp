// The record checksum (docs/format-record.md): a sum over the 8-byte words of a payload, each mixed with its
// position. A sum does not care about order, so planes, threads and a GPU's lanes add their parts as they
// come.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fdcache {

// What `nbytes` bytes add to the sum when their first word stands at word position `first_word` of the
// record. The last word is extended with zero bytes.
std::uint64_t checksum_part(const std::uint8_t *data, std::size_t nbytes, std::uint64_t first_word);

// The same, copying the bytes to `target` on the way, a chunk at a time while it is in the first-level cache.
std::uint64_t copy_with_checksum(std::uint8_t *target, const std::uint8_t *source, std::size_t nbytes,
                                 std::uint64_t first_word);

// The checksum from the sum of all parts and the number of payload bytes.
std::uint64_t finish_checksum(std::uint64_t sum, std::uint64_t payload_bytes);

}  // namespace fdcache
