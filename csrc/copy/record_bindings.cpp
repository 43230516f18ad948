#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "copy/bound_memory.hpp"
#include "copy/host_memory.hpp"
#include "copy/memory_guard.hpp"
#include "copy/record.hpp"

namespace fdcache {
namespace {

using ByteView = VectorOut<std::uint8_t>;

// A tensor of any framework, imported through DLPack.
struct BoundTensor {
    nb::ndarray<> array;

    nb::typed<nb::tuple, int, nb::ellipsis> shape() const {
        nb::list sizes;
        for (std::size_t i = 0; i < array.ndim(); ++i) sizes.append(array.shape(i));
        return nb::tuple(sizes);
    }

    nb::typed<nb::tuple, int, nb::ellipsis> strides() const {
        nb::list strides;
        for (std::size_t i = 0; i < array.ndim(); ++i) {
            strides.append(array.stride(i) * static_cast<std::int64_t>(array.itemsize()));
        }
        return nb::tuple(strides);
    }
};

BoundPlanes make_planes(const std::vector<std::uintptr_t> &addresses,
                        const std::vector<std::int64_t> &strides, const std::vector<std::size_t> &sizes,
                        const std::vector<std::size_t> &offsets, nb::object owner) {
    const std::size_t count = addresses.size();
    if (strides.size() != count || sizes.size() != count || offsets.size() != count) {
        throw std::invalid_argument("addresses, strides, sizes and offsets differ in length");
    }
    std::vector<Plane> planes;
    for (std::size_t i = 0; i < count; ++i) {
        if (offsets[i] % 8 != 0)
            throw std::invalid_argument("a plane's record offset must be a multiple of 8");
        planes.push_back({pointer(addresses[i]), strides[i], sizes[i], offsets[i]});
    }
    return {std::make_shared<const std::vector<Plane>>(std::move(planes)), std::move(owner)};
}

BoundRecords make_records(const std::vector<std::uintptr_t> &extents, std::size_t records_per_extent,
                          std::size_t record_bytes, const std::vector<std::uintptr_t> &headers,
                          std::int32_t num_slots, nb::object owner) {
    if (records_per_extent == 0 || num_slots < 0 || headers.size() != extents.size() ||
        extents.size() * records_per_extent < static_cast<std::size_t>(num_slots)) {
        throw std::invalid_argument("the extents cannot hold num_slots records");
    }
    RecordTable table;
    for (const auto address : extents) table.extents.push_back(pointer(address));
    table.records_per_extent = records_per_extent;
    table.record_bytes = record_bytes;
    for (const auto address : headers) table.headers.push_back(reinterpret_cast<SlotHeader *>(address));
    table.num_slots = num_slots;
    return {std::make_shared<const RecordTable>(std::move(table)), std::move(owner)};
}

void bind_guard(nb::module_ &module) {
    nb::class_<MemoryGuard>(
        module, "MemoryGuard",
        "Guards mapped shared memory whose file another process may truncate.\n\n"
        "Pages that the file has lost are zeros of this process alone, where an access would end it with\n"
        "SIGBUS.")
        .def(
            "__init__",
            [](MemoryGuard *self,
               const nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> &memory) {
                new (self) MemoryGuard(memory.data(), memory.shape(0));
            },
            "memory"_a, nb::keep_alive<1, 2>())
        .def_prop_ro("has_lost", &MemoryGuard::has_lost, "True once a page was lost.");
}

void bind_header(nb::module_ &module) {
    nb::class_<SlotHeader>(module, "SlotHeader",
                           "The header of a slot outside the device (docs/format-record.md).")
        .def(
            "__init__",
            [](SlotHeader *self, int state, std::uint32_t generation, const nb::bytes &hash,
               const nb::bytes &parent, const nb::bytes &fingerprint, std::uint64_t payload_bytes,
               std::uint64_t payload_checksum) {
                if (state < 0 || state > 2) throw std::invalid_argument("state must be 0, 1 or 2");
                new (self) SlotHeader();
                self->state = static_cast<HeaderState>(state);
                self->generation = generation;
                self->hash = digest_of("block_hash", hash);
                self->parent = digest_of("parent", parent);
                self->fingerprint = fingerprint_of(fingerprint);
                self->payload_bytes = payload_bytes;
                self->payload_checksum = payload_checksum;
                self->seal();
            },
            "state"_a, "generation"_a, "block_hash"_a, "parent"_a, "fingerprint"_a, "payload_bytes"_a,
            "payload_checksum"_a, "``state``: 0 empty, 1 being written, 2 ready.")
        .def_static(
            "from_bytes",
            [](const nb::bytes &data) {
                if (data.size() != sizeof(SlotHeader))
                    throw std::invalid_argument("a slot header has 128 bytes");
                SlotHeader header;
                std::memcpy(&header, data.c_str(), sizeof header);
                return header;
            },
            "data"_a, "Read a header from its 128 bytes; ``is_valid`` tells if they are one.")
        .def("to_bytes",
             [](const SlotHeader &self) {
                 return nb::bytes(reinterpret_cast<const char *>(&self), sizeof self);
             })
        .def_prop_ro("is_valid", &SlotHeader::is_valid,
                     "True if magic, version and header checksum are right.")
        .def_prop_ro("version", [](const SlotHeader &self) { return self.version; })
        .def_prop_ro("state", [](const SlotHeader &self) { return static_cast<int>(self.state); })
        .def_prop_ro("generation", [](const SlotHeader &self) { return self.generation; })
        .def_prop_ro("payload_bytes", [](const SlotHeader &self) { return self.payload_bytes; })
        .def_prop_ro("payload_checksum", [](const SlotHeader &self) { return self.payload_checksum; })
        .def_prop_ro("hash", [](const SlotHeader &self) { return digest_to_bytes(self.hash); })
        .def_prop_ro("parent", [](const SlotHeader &self) { return digest_to_bytes(self.parent); })
        .def_prop_ro("fingerprint",
                     [](const SlotHeader &self) {
                         return nb::bytes(self.fingerprint.data(), self.fingerprint.size());
                     })
        .def_prop_ro(
            "written_ms", [](const SlotHeader &self) { return self.written_ms; },
            "In a slab file, milliseconds since 1970; 0 in an arena.");
}

void bind_memory(nb::module_ &module) {
    nb::class_<HostMemory>(module, "HostMemory", "Page-aligned anonymous memory, filled with zeros.")
        .def(nb::init<std::size_t>(), "nbytes"_a)
        .def("prefer_node", &HostMemory::prefer_node, "node"_a,
             "Take pages that are not touched yet from this NUMA node while it has free ones.")
        .def("populate", &HostMemory::populate, "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Allocate every page now, with several threads. Raises MemoryError.")
        .def_prop_ro("address",
                     [](const HostMemory &self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
        .def_prop_ro("nbytes", &HostMemory::size);
    module.def(
        "map_pages",
        [](std::uintptr_t address, std::size_t nbytes) {
            map_pages(reinterpret_cast<std::uint8_t *>(address), nbytes);
        },
        "address"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Enter the pages of a shared mapping into the page tables, so that their first use takes no faults.");
    nb::class_<BoundTensor>(module, "Tensor", "A tensor of any framework, imported through DLPack.")
        .def(
            "__init__",
            [](BoundTensor *self, nb::ndarray<> tensor) { new (self) BoundTensor{std::move(tensor)}; },
            "tensor"_a, nb::sig("def __init__(self, tensor: object) -> None"))
        .def_prop_ro(
            "address",
            [](const BoundTensor &self) { return reinterpret_cast<std::uintptr_t>(self.array.data()); })
        .def_prop_ro("shape", &BoundTensor::shape)
        .def_prop_ro("strides", &BoundTensor::strides, "In bytes.")
        .def_prop_ro("itemsize", [](const BoundTensor &self) { return self.array.itemsize(); })
        .def_prop_ro(
            "device_type", [](const BoundTensor &self) { return self.array.device_type(); },
            "DLPack's number of the device type.");
}

void bind_tables(nb::module_ &module) {
    nb::class_<BoundPlanes>(module, "PlaneTable",
                            "The planes of a device cache; block b of a plane is at address + b * stride.")
        .def(
            "__init__",
            [](BoundPlanes *self, const std::vector<std::uintptr_t> &addresses,
               const std::vector<std::int64_t> &strides, const std::vector<std::size_t> &sizes,
               const std::vector<std::size_t> &offsets, nb::object owner) {
                new (self) BoundPlanes(make_planes(addresses, strides, sizes, offsets, std::move(owner)));
            },
            "addresses"_a, "strides"_a, "sizes"_a, "offsets"_a, "owner"_a.none(),
            "``offsets``: of the planes in a record, multiples of 8. ``owner`` keeps the memory alive; "
            "without\n"
            "one the planes are only numbers, for ``plane_runs``.");
    nb::class_<BoundRecords>(module, "RecordTable",
                             "Records in extents of equal size, and their slot headers.")
        .def(
            "__init__",
            [](BoundRecords *self, const std::vector<std::uintptr_t> &extents, std::size_t records_per_extent,
               std::size_t record_bytes, const std::vector<std::uintptr_t> &headers, std::int32_t num_slots,
               nb::object owner) {
                new (self) BoundRecords(make_records(extents, records_per_extent, record_bytes, headers,
                                                     num_slots, std::move(owner)));
            },
            "extents"_a, "records_per_extent"_a, "record_bytes"_a, "headers"_a, "num_slots"_a, "owner"_a,
            "``headers``: address of the first header of each extent. ``owner`` keeps the memory alive.")
        .def_prop_ro("num_slots", [](const BoundRecords &self) { return self.table->num_slots; })
        .def(
            "record",
            [](nb::handle_t<BoundRecords> self, std::int32_t slot) {
                const RecordTable &table = *nb::cast<BoundRecords &>(self).table;
                check_slot(table, slot);
                return ByteView(table.record(slot), {table.record_bytes}, self);
            },
            "slot"_a, "Return the bytes of a record, without a copy.")
        .def(
            "addresses",
            [](const BoundRecords &self, const VectorIn<std::int32_t> &slots) {
                std::vector<std::uint64_t> records, headers;
                for (const std::int32_t slot : span_of(slots)) {
                    check_slot(*self.table, slot);
                    records.push_back(reinterpret_cast<std::uintptr_t>(self.table->record(slot)));
                    headers.push_back(reinterpret_cast<std::uintptr_t>(self.table->header(slot)));
                }
                return std::pair(to_numpy<std::uint64_t>(std::move(records)),
                                 to_numpy<std::uint64_t>(std::move(headers)));
            },
            "slots"_a, "Return the addresses of the slots' records and of their headers.")
        .def(
            "header",
            [](const BoundRecords &self, std::int32_t slot) {
                check_slot(*self.table, slot);
                return load_header(self.table->header(slot));
            },
            "slot"_a, "Return a copy of the slot's header.")
        .def(
            "set_header",
            [](const BoundRecords &self, std::int32_t slot, const SlotHeader &header) {
                check_slot(*self.table, slot);
                store_header(self.table->header(slot), header);
            },
            "slot"_a, "header"_a);
}

}  // namespace

void bind_records(nb::module_ &module) {
    bind_guard(module);
    bind_header(module);
    bind_memory(module);
    bind_tables(module);
}

}  // namespace fdcache
