// The record checksum (docs/format-record.md): a sum over the 8-byte words of a payload, each mixed with its
// position. The order of the summands does not matter, so planes, threads and GPU lanes add their parts in
// any order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fdcache {

// The contribution to the sum of `nbytes` bytes whose first word has position `first_word` in the record. The
// last word is extended with zero bytes.
std::uint64_t checksum_part(const std::uint8_t *data, std::size_t nbytes, std::uint64_t first_word);

// The same, and copies the bytes to `target`, a chunk at a time while it is in the first-level cache.
std::uint64_t copy_with_checksum(std::uint8_t *target, const std::uint8_t *source, std::size_t nbytes,
                                 std::uint64_t first_word);

// The checksum from the sum of all parts and the number of payload bytes.
std::uint64_t finish_checksum(std::uint64_t sum, std::uint64_t payload_bytes);

}  // namespace fdcache
