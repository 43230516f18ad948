#include "copy/transfer_array_bindings.hpp"

#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>

#include "copy/bound_memory.hpp"
#include "copy/slots.hpp"

namespace fdcache {
namespace {

// Interned once: the names and types live as long as the process.
nb::handle interned(const char *name) {
    return PyUnicode_InternFromString(name);
}

bool is_numpy_array(nb::handle value) {
    static const nb::handle type = nb::object(nb::module_::import_("numpy").attr("ndarray")).release();
    return nb::isinstance(value, type);
}

// Reads an array without converting its elements; one that is not contiguous is copied.
template <typename Array, typename Strided>
bool read(nb::handle swap, nb::handle name, Array &array) {
    const nb::object value = nb::getattr(swap, name);
    if (!is_numpy_array(value)) return false;
    if (nb::try_cast<Array>(value, array, false)) return true;
    Strided strided;
    return nb::try_cast<Strided>(value, strided, false) && nb::try_cast<Array>(value, array);
}

template <typename T>
bool read_vector(nb::handle swap, nb::handle name, VectorIn<T> &array) {
    return read<VectorIn<T>, nb::ndarray<const T, nb::ndim<1>, nb::device::cpu>>(swap, name, array);
}

bool read_hashes(nb::handle swap, nb::handle name, HashesIn &array) {
    return read<HashesIn, nb::ndarray<const std::uint8_t, nb::shape<-1, 32>, nb::device::cpu>>(swap, name,
                                                                                               array);
}

}  // namespace

std::optional<TransferArrays> arrays_of(nb::handle swap) {
    static const nb::handle sources = interned("src_block_ids"), targets = interned("dst_block_ids"),
                            source_generations = interned("src_generations"),
                            target_generations = interned("dst_generations"),
                            hashes = interned("hash_values"), parents = interned("parent_hashes"),
                            unverified = interned("unverified");
    std::optional<TransferArrays> arrays(std::in_place);
    const bool read =
        read_vector(swap, sources, arrays->sources) && read_vector(swap, targets, arrays->targets) &&
        read_vector(swap, source_generations, arrays->source_generations) &&
        read_vector(swap, target_generations, arrays->target_generations) &&
        read_hashes(swap, hashes, arrays->hashes) && read_hashes(swap, parents, arrays->parents);
    if (!read) return std::nullopt;
    const std::size_t count = arrays->size();
    for (const std::size_t size :
         {arrays->targets.shape(0), arrays->source_generations.shape(0), arrays->target_generations.shape(0),
          arrays->hashes.shape(0), arrays->parents.shape(0)}) {
        if (size != count) return std::nullopt;
    }
    if (nb::getattr(swap, unverified).is_none()) return arrays;
    const bool marked = read_vector(swap, unverified, arrays->unverified.emplace());
    return marked && arrays->unverified->shape(0) == count ? std::move(arrays) : std::nullopt;
}

std::optional<CopyBlocks> blocks_of(const TransferArrays &arrays, Direction direction,
                                    std::int32_t device_blocks, std::int32_t host_blocks) {
    const bool out = direction == Direction::kToHost;
    const auto device = span_of(out ? arrays.sources : arrays.targets);
    const auto host = span_of(out ? arrays.targets : arrays.sources);
    if (!are_valid_slots(device, device_blocks, !out) || !are_valid_slots(host, host_blocks, out)) {
        return std::nullopt;
    }
    CopyBlocks blocks;
    blocks.device_slots.assign(device.begin(), device.end());
    blocks.host_slots.assign(host.begin(), host.end());
    blocks.generations = span_of(out ? arrays.target_generations : arrays.source_generations);
    blocks.hashes = digests_of(arrays.hashes);
    blocks.parents = digests_of(arrays.parents);
    if (arrays.unverified) blocks.unverified = span_of(*arrays.unverified);
    return blocks;
}

namespace {

// True if the arrays of a plan's transfers, each of which may be None, are sound and the backups' slots are
// in no other transfer.
bool are_sound_transfers(nb::handle evictions, nb::handle loads, nb::handle backups) {
    std::optional<TransferArrays> evicted, loaded, saved;
    const auto is_sound = [](nb::handle swap, std::optional<TransferArrays> &arrays) {
        return swap.is_none() || (arrays = arrays_of(swap));
    };
    if (!is_sound(evictions, evicted) || !is_sound(loads, loaded) || !is_sound(backups, saved)) return false;
    if (!saved) return true;
    if (evicted && !(are_disjoint_slots(span_of(saved->targets), span_of(evicted->targets)) &&
                     are_disjoint_slots(span_of(saved->sources), span_of(evicted->sources)))) {
        return false;
    }
    return !loaded || are_disjoint_slots(span_of(saved->sources), span_of(loaded->targets));
}

}  // namespace

void bind_transfers(nb::module_ &module) {
    module.def(
        "are_sound_transfers", &are_sound_transfers, "evictions"_a.none(), "loads"_a.none(),
        "backups"_a.none(),
        "Return True if the arrays of a plan's transfers have the right types and lengths, and no slot of\n"
        "the backups is in another transfer.");
    module.def(
        "is_sound_transfer",
        [](nb::handle swap, bool to_host, std::int32_t device_blocks, std::int32_t host_blocks) {
            const auto arrays = arrays_of(swap);
            return arrays && blocks_of(*arrays, direction_of(to_host), device_blocks, host_blocks);
        },
        "swap"_a, "to_host"_a, "device_blocks"_a, "host_blocks"_a,
        "Return True if the arrays of a transfer have the right types and lengths, all slots exist, and none "
        "is\n"
        "written twice.");
    module.def(
        "are_disjoint_slots",
        [](const VectorIn<std::int32_t> &first, const VectorIn<std::int32_t> &second) {
            return are_disjoint_slots(span_of(first), span_of(second));
        },
        "first"_a, "second"_a, "Return True if no slot is in both arrays.");
    module.def(
        "extents_of",
        [](const VectorIn<std::int32_t> &slots, std::int32_t size) {
            if (size < 1) throw std::invalid_argument("an extent has at least one slot");
            return extents_of(span_of(slots), size);
        },
        "slots"_a, "size"_a, "Return the extents of ``size`` slots each in which slots are, ascending.");
}

}  // namespace fdcache
