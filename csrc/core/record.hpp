// Where a block's bytes are: planes on the device, records on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/slot_header.hpp"

namespace fdcache {

// One plane of every device block: block b starts at base + b * stride.
struct Plane {
    std::uint8_t *base;
    std::int64_t stride;
    std::size_t nbytes;
    std::size_t offset;  // within the record; a multiple of 8, so that no checksum word spans two planes

    std::uint8_t *block(std::int32_t slot) const { return base + stride * slot; }
};

// Records in equal extents, each extent's headers together wherever they lie. It owns nothing.
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

struct PlaneRange {
    std::size_t first;
    std::size_t last;
};

}  // namespace fdcache
