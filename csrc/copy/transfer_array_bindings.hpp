// The arrays of a plan's transfers, read where Python keeps them.
#pragma once

#include <cstdint>
#include <optional>

#include "bindings.hpp"
#include "copy/record.hpp"

namespace fdcache {

// The arrays of one `CacheSwapMetadata`, and references that keep them alive.
struct TransferArrays {
    VectorIn<std::int32_t> sources;
    VectorIn<std::int32_t> targets;
    VectorIn<std::uint32_t> source_generations;
    VectorIn<std::uint32_t> target_generations;
    HashesIn hashes;
    HashesIn parents;
    std::optional<VectorIn<std::uint8_t>> unverified;

    std::size_t size() const { return sources.shape(0); }
};

// The arrays of a transfer; none if one of them is no NumPy array of the right type and length.
std::optional<TransferArrays> arrays_of(nb::handle swap);

// The blocks of a transfer between a device and a host tier of these sizes; none if a slot does not exist or
// is written twice.
std::optional<CopyBlocks> blocks_of(const TransferArrays &arrays, Direction direction,
                                    std::int32_t device_blocks, std::int32_t host_blocks);

}  // namespace fdcache
