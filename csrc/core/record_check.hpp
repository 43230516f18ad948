// What a copy says and asks in slot headers, whatever device makes it.
#pragma once

#include <array>
#include <cstdint>

#include "core/digest.hpp"
#include "core/slot_header.hpp"

namespace fdcache {

enum class BlockFault : std::uint8_t {
    kNone,
    kNoHeader,         // magic, version or header checksum is wrong
    kNotReady,         // empty, or being written
    kOtherGeneration,  // the slot was given to new content
    kOtherHash,
    kOtherLayout,  // fingerprint or payload length
    kChanged,      // the header changed during the copy
    kCancelled,
    kAbandoned,  // the stream was closed first
    kDevice,     // the device refused the copy
    kCorrupt,    // the bytes that arrived do not have the record's checksum
};

struct BlockPair {
    std::int32_t device_slot;
    std::int32_t host_slot;
    std::uint32_t generation;  // of the host slot
    Digest hash;
    Digest parent;
};

// What all records of a layout share.
struct RecordKind {
    std::array<std::uint8_t, 16> fingerprint;
    std::uint64_t payload_bytes;
};

// The header of a record that a copy to the host is about to write, sealed.
SlotHeader writing_header(const BlockPair &pair, const RecordKind &kind);

// The same record once it is there, sealed.
SlotHeader ready_header(SlotHeader writing, std::uint64_t checksum);

// Whether the block can be loaded from the slot that has this header.
BlockFault check_source(const SlotHeader &header, const BlockPair &pair, const RecordKind &kind);

}  // namespace fdcache
