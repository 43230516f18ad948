#include "copy/record.hpp"

#include <numeric>

namespace fdcache {

std::uint64_t payload_bytes(std::span<const Plane> planes) {
    return std::accumulate(planes.begin(), planes.end(), std::uint64_t{0},
                           [](std::uint64_t sum, const Plane &plane) { return sum + plane.nbytes; });
}

SlotHeader writing_header(const CopyBlocks &blocks, std::size_t block, const RecordKind &kind) {
    SlotHeader header;
    header.state = HeaderState::kWriting;
    header.generation = blocks.generations[block];
    header.payload_bytes = kind.payload_bytes;
    header.hash = blocks.hashes[block];
    header.parent = blocks.parents[block];
    header.fingerprint = kind.fingerprint;
    header.seal();
    return header;
}

SlotHeader ready_header(SlotHeader writing, std::uint64_t checksum) {
    writing.state = HeaderState::kReady;
    writing.payload_checksum = checksum;
    writing.seal();
    return writing;
}

BlockFault check_source(const SlotHeader &header, const CopyBlocks &blocks, std::size_t block,
                        const RecordKind &kind) {
    // Fresh memory holds zeros: a slot that was never written is empty, not broken.
    if (!header.is_valid()) return header == SlotHeader{} ? BlockFault::kNotReady : BlockFault::kNoHeader;
    if (header.generation != blocks.generations[block]) return BlockFault::kOtherGeneration;
    if (header.hash != blocks.hashes[block]) return BlockFault::kOtherHash;
    if (header.fingerprint != kind.fingerprint || header.payload_bytes != kind.payload_bytes) {
        return BlockFault::kOtherLayout;
    }
    if (header.state != HeaderState::kReady) return BlockFault::kNotReady;
    return BlockFault::kNone;
}

}  // namespace fdcache
