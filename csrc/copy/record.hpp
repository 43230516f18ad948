// Device planes, host records, and the headers that a copy between them reads and writes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "copy/slot_header.hpp"
#include "hash/digest.hpp"

namespace fdcache {

// One plane of every device block: block b starts at base + b * stride.
struct Plane {
    std::uint8_t *base;
    std::int64_t stride;
    std::size_t nbytes;
    std::size_t offset;  // in the record; a multiple of 8, so that no checksum word spans two planes

    std::uint8_t *block(std::int32_t slot) const { return base + stride * slot; }
};

// Planes [first, last) of a layout.
struct PlaneRange {
    std::size_t first;
    std::size_t last;
};

// Bytes of all planes of a block.
std::uint64_t payload_bytes(std::span<const Plane> planes);

// Records in extents of equal size. The headers of an extent are contiguous. Owns no memory.
struct RecordTable {
    std::vector<std::uint8_t *> extents;
    std::size_t records_per_extent = 1;
    std::size_t record_bytes = 0;
    std::vector<SlotHeader *> headers;  // of each extent's first record
    std::int32_t num_slots = 0;

    SlotHeader *header(std::int32_t slot) const {
        const auto index = static_cast<std::size_t>(slot);
        return headers[index / records_per_extent] + index % records_per_extent;
    }

    std::uint8_t *record(std::int32_t slot) const {
        const auto index = static_cast<std::size_t>(slot);
        return extents[index / records_per_extent] + (index % records_per_extent) * record_bytes;
    }
};

// The header fields that all records of a layout share.
struct RecordKind {
    std::array<std::uint8_t, 16> fingerprint;
    std::uint64_t payload_bytes;
};

enum class Direction : std::uint8_t { kToHost, kToDevice };

// The blocks of a copy, as parallel arrays. Slots, which address memory, are copied; the other arrays are
// used where they are and outlive the list.
struct CopyBlocks {
    std::vector<std::int32_t> device_slots;
    std::vector<std::int32_t> host_slots;
    std::span<const std::uint32_t> generations;  // of the host slots
    std::span<const Digest> hashes;
    std::span<const Digest> parents;
    std::span<const std::uint8_t> unverified;  // of loads: 1 for records to verify; may be empty
    bool verify_all = false;

    std::size_t size() const { return host_slots.size(); }
    // True for a load that fails unless the bytes have the record's checksum.
    bool verifies(std::size_t block) const {
        return verify_all || (!unverified.empty() && unverified[block] != 0);
    }
};

// Why a block was not copied.
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
    kCorrupt,    // the copied bytes do not have the record's checksum
};

// The sealed header of a record that a copy to the host is about to write.
SlotHeader writing_header(const CopyBlocks &blocks, std::size_t block, const RecordKind &kind);

// The sealed header of the same record once it is complete.
SlotHeader ready_header(SlotHeader writing, std::uint64_t checksum);

// Checks that a slot with this header can be loaded as this block.
BlockFault check_source(const SlotHeader &header, const CopyBlocks &blocks, std::size_t block,
                        const RecordKind &kind);

}  // namespace fdcache
