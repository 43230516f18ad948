#include "core/record_check.hpp"

namespace fdcache {

SlotHeader writing_header(const BlockPair &pair, const RecordKind &kind) {
    SlotHeader header;
    header.state = SlotState::kWriting;
    header.generation = pair.generation;
    header.payload_bytes = kind.payload_bytes;
    header.hash = pair.hash;
    header.parent = pair.parent;
    header.fingerprint = kind.fingerprint;
    header.seal();
    return header;
}

SlotHeader ready_header(SlotHeader writing, std::uint64_t checksum) {
    writing.state = SlotState::kReady;
    writing.payload_checksum = checksum;
    writing.seal();
    return writing;
}

BlockFault check_source(const SlotHeader &header, const BlockPair &pair, const RecordKind &kind) {
    // A table fresh from the system holds zeros: a slot never written is empty rather than broken.
    if (header == SlotHeader{}) return BlockFault::kNotReady;
    if (!header.is_sound()) return BlockFault::kNoHeader;
    if (header.generation != pair.generation) return BlockFault::kOtherGeneration;
    if (header.hash != pair.hash) return BlockFault::kOtherHash;
    if (header.fingerprint != kind.fingerprint || header.payload_bytes != kind.payload_bytes) {
        return BlockFault::kOtherLayout;
    }
    if (header.state != SlotState::kReady) return BlockFault::kNotReady;
    return BlockFault::kNone;
}

}  // namespace fdcache
