#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/bindings.hpp"
#include "core/block_copy.hpp"
#include "core/checksum.hpp"
#include "core/copy_stream.hpp"
#include "core/event.hpp"
#include "core/host_memory.hpp"

namespace fdcache {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

template <typename T>
using InputArray = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HashArray = nb::ndarray<const std::uint8_t, nb::shape<-1, 32>, nb::c_contig, nb::device::cpu>;
using ByteView = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

std::uint8_t *pointer(std::uintptr_t address) {
    return reinterpret_cast<std::uint8_t *>(address);
}

// Waits without the GIL, in slices, so that a signal such as Ctrl-C is handled soon.
template <typename Wait>
bool wait_interruptibly(std::optional<double> timeout, Wait wait_until) {
    using Clock = std::chrono::steady_clock;
    constexpr auto kSlice = std::chrono::milliseconds(200);
    constexpr double kLongest = 1e9;
    const auto start = Clock::now();
    Deadline deadline;
    if (timeout) {
        const auto span = std::chrono::duration<double>(std::clamp(*timeout, 0.0, kLongest));
        deadline = start + std::chrono::duration_cast<Clock::duration>(span);
    }
    while (true) {
        const auto slice = Clock::now() + kSlice;
        const bool last = deadline && *deadline <= slice;
        {
            const nb::gil_scoped_release release;
            if (wait_until(last ? *deadline : slice)) return true;
        }
        if (last) return false;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

Digest digest_of(const nb::bytes &value, const char *field) {
    if (value.size() != sizeof(Digest))
        throw std::invalid_argument(std::string(field) + " must have 32 bytes");
    Digest digest;
    std::memcpy(digest.bytes.data(), value.c_str(), sizeof digest);
    return digest;
}

std::array<std::uint8_t, 16> fingerprint_of(const nb::bytes &value) {
    std::array<std::uint8_t, 16> prefix;
    if (value.size() < prefix.size()) throw std::invalid_argument("fingerprint must have at least 16 bytes");
    std::memcpy(prefix.data(), value.c_str(), prefix.size());
    return prefix;
}

template <typename T>
nb::bytes as_bytes(const T &value) {
    return nb::bytes(reinterpret_cast<const char *>(&value), sizeof value);
}

// Memory that someone else owns, with the Python object that keeps it alive.
struct BoundPlanes {
    std::vector<Plane> planes;
    nb::object owner;
};

struct BoundRecords {
    RecordTable table;
    nb::object owner;
};

// nanobind's own shared pointers would take the GIL when a copy thread drops the last of them.
struct BoundEvent {
    std::shared_ptr<Event> event = std::make_shared<Event>();
};

struct BoundCopy {
    std::shared_ptr<BlockCopy> copy;
    nb::object planes;
    nb::object records;
};

// A copy's memory stays referenced here until the copy is done, whatever Python drops meanwhile.
class BoundStream {
  public:
    BoundStream(unsigned threads, bool background)
        : stream_(std::make_unique<CopyStream>(threads, background)) {}
    ~BoundStream() { close(); }

    void copy(const nb::object &object, std::size_t first, std::size_t last) {
        auto &bound = nb::cast<BoundCopy &>(object);
        if (first >= last || last > bound.copy->num_planes()) throw nb::index_error("plane range");
        retire();
        held_.emplace_back(bound.copy, object);
        stream_->copy(bound.copy, {first, last});
    }

    void retire() {
        std::vector<std::pair<std::shared_ptr<BlockCopy>, nb::object>> dropped;
        const auto done = std::partition(held_.begin(), held_.end(),
                                         [](const auto &entry) { return !entry.first->done()->is_set(); });
        std::move(done, held_.end(), std::back_inserter(dropped));
        held_.erase(done, held_.end());
    }

    void close() {
        {
            const nb::gil_scoped_release release;
            stream_->close();
        }
        held_.clear();
    }

    CopyStream &stream() { return *stream_; }

  private:
    std::unique_ptr<CopyStream> stream_;
    std::vector<std::pair<std::shared_ptr<BlockCopy>, nb::object>> held_;
};

// A tensor of any framework, held through DLPack.
struct BoundTensor {
    nb::ndarray<> array;

    nb::tuple shape() const {
        nb::list sizes;
        for (std::size_t i = 0; i < array.ndim(); ++i) sizes.append(array.shape(i));
        return nb::tuple(sizes);
    }

    nb::tuple strides() const {
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
    return {std::move(planes), std::move(owner)};
}

BoundRecords make_records(const std::vector<std::uintptr_t> &extents, std::size_t records_per_extent,
                          std::size_t record_bytes, const std::vector<std::uintptr_t> &headers,
                          std::int32_t num_slots, nb::object owner) {
    if (records_per_extent == 0 || num_slots < 0 || headers.size() != extents.size() ||
        extents.size() * records_per_extent < static_cast<std::size_t>(num_slots)) {
        throw std::invalid_argument("the extents do not hold num_slots records");
    }
    RecordTable table;
    for (const auto address : extents) table.extents.push_back(pointer(address));
    table.records_per_extent = records_per_extent;
    table.record_bytes = record_bytes;
    for (const auto address : headers) table.headers.push_back(reinterpret_cast<SlotHeader *>(address));
    table.num_slots = num_slots;
    return {std::move(table), std::move(owner)};
}

void check_slot(const RecordTable &table, std::int32_t slot) {
    if (slot < 0 || slot >= table.num_slots) throw nb::index_error("host slot out of range");
}

BoundCopy make_copy(bool to_host, const nb::object &planes, const nb::object &records,
                    InputArray<std::int32_t> device_slots, InputArray<std::int32_t> host_slots,
                    InputArray<std::uint32_t> generations, HashArray hashes, HashArray parents,
                    const nb::bytes &fingerprint, const std::optional<InputArray<std::uint8_t>> &verify) {
    const auto &table = nb::cast<BoundRecords &>(records).table;
    const std::size_t count = device_slots.shape(0);
    if (host_slots.shape(0) != count || generations.shape(0) != count || hashes.shape(0) != count ||
        parents.shape(0) != count || (verify && verify->shape(0) != count)) {
        throw std::invalid_argument("the arrays of a copy differ in length");
    }
    std::vector<BlockPair> pairs(count);
    for (std::size_t i = 0; i < count; ++i) {
        check_slot(table, host_slots.data()[i]);
        pairs[i].device_slot = device_slots.data()[i];
        pairs[i].host_slot = host_slots.data()[i];
        pairs[i].generation = generations.data()[i];
        pairs[i].verify = verify && verify->data()[i];
        std::memcpy(pairs[i].hash.bytes.data(), hashes.data() + 32 * i, 32);
        std::memcpy(pairs[i].parent.bytes.data(), parents.data() + 32 * i, 32);
    }
    auto copy = std::make_shared<BlockCopy>(to_host ? Direction::kToHost : Direction::kToDevice,
                                            nb::cast<BoundPlanes &>(planes).planes, table, std::move(pairs),
                                            fingerprint_of(fingerprint));
    return {std::move(copy), planes, records};
}

void bind_checksum(nb::module_ &module) {
    module.def(
        "record_checksum",
        [](InputArray<std::uint8_t> record, const std::vector<std::size_t> &offsets,
           const std::vector<std::size_t> &sizes) {
            if (offsets.size() != sizes.size())
                throw std::invalid_argument("offsets and sizes differ in length");
            std::uint64_t sum = 0;
            std::uint64_t payload = 0;
            for (std::size_t i = 0; i < offsets.size(); ++i) {
                if (offsets[i] % 8 != 0)
                    throw std::invalid_argument("a plane's record offset must be a multiple of 8");
                if (offsets[i] > record.shape(0) || sizes[i] > record.shape(0) - offsets[i]) {
                    throw std::invalid_argument("a plane reaches beyond the record");
                }
                sum += checksum_part(record.data() + offsets[i], sizes[i], offsets[i] / 8);
                payload += sizes[i];
            }
            return finish_checksum(sum, payload);
        },
        "record"_a, "offsets"_a, "sizes"_a);
    module.def(
        "copy_with_checksum",
        [](nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> target,
           InputArray<std::uint8_t> source) {
            if (target.shape(0) != source.shape(0))
                throw std::invalid_argument("target and source differ in length");
            const nb::gil_scoped_release release;
            const auto sum = copy_with_checksum(target.data(), source.data(), source.shape(0), 0);
            return finish_checksum(sum, source.shape(0));
        },
        "target"_a, "source"_a);
}

void bind_header(nb::module_ &module) {
    nb::class_<SlotHeader>(module, "SlotHeader")
        .def(
            "__init__",
            [](SlotHeader *self, int state, std::uint32_t generation, const nb::bytes &hash,
               const nb::bytes &parent, const nb::bytes &fingerprint, std::uint64_t payload_bytes,
               std::uint64_t payload_checksum) {
                if (state < 0 || state > 2) throw std::invalid_argument("state must be 0, 1 or 2");
                new (self) SlotHeader();
                self->state = static_cast<SlotState>(state);
                self->generation = generation;
                self->hash = digest_of(hash, "block_hash");
                self->parent = digest_of(parent, "parent");
                self->fingerprint = fingerprint_of(fingerprint);
                self->payload_bytes = payload_bytes;
                self->payload_checksum = payload_checksum;
                self->seal();
            },
            "state"_a, "generation"_a, "block_hash"_a, "parent"_a, "fingerprint"_a, "payload_bytes"_a,
            "payload_checksum"_a)
        .def_static(
            "from_bytes",
            [](const nb::bytes &data) {
                if (data.size() != sizeof(SlotHeader))
                    throw std::invalid_argument("a slot header has 128 bytes");
                SlotHeader header;
                std::memcpy(&header, data.c_str(), sizeof header);
                return header;
            },
            "data"_a)
        .def("to_bytes", [](const SlotHeader &self) { return as_bytes(self); })
        .def_prop_ro("is_valid",
                     [](const SlotHeader &self) {
                         return self.magic == SlotHeader::kMagic && self.version == SlotHeader::kVersion &&
                                self.header_checksum == self.computed_checksum();
                     })
        .def_prop_ro("version", [](const SlotHeader &self) { return self.version; })
        .def_prop_ro("state", [](const SlotHeader &self) { return static_cast<int>(self.state); })
        .def_prop_ro("generation", [](const SlotHeader &self) { return self.generation; })
        .def_prop_ro("payload_bytes", [](const SlotHeader &self) { return self.payload_bytes; })
        .def_prop_ro("payload_checksum", [](const SlotHeader &self) { return self.payload_checksum; })
        .def_prop_ro("hash", [](const SlotHeader &self) { return as_bytes(self.hash.bytes); })
        .def_prop_ro("parent", [](const SlotHeader &self) { return as_bytes(self.parent.bytes); })
        .def_prop_ro("fingerprint", [](const SlotHeader &self) { return as_bytes(self.fingerprint); });
}

void bind_memory(nb::module_ &module) {
    nb::class_<HostMemory>(module, "HostMemory")
        .def(nb::init<std::size_t>(), "nbytes"_a)
        .def("populate", &HostMemory::populate, "threads"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("address",
                     [](const HostMemory &self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
        .def_prop_ro("nbytes", &HostMemory::size);
    nb::class_<BoundTensor>(module, "Tensor")
        .def(
            "__init__",
            [](BoundTensor *self, nb::ndarray<> tensor) { new (self) BoundTensor{std::move(tensor)}; },
            "tensor"_a)
        .def_prop_ro(
            "address",
            [](const BoundTensor &self) { return reinterpret_cast<std::uintptr_t>(self.array.data()); })
        .def_prop_ro("shape", &BoundTensor::shape)
        .def_prop_ro("strides", &BoundTensor::strides)
        .def_prop_ro("itemsize", [](const BoundTensor &self) { return self.array.itemsize(); })
        .def_prop_ro("device_type", [](const BoundTensor &self) { return self.array.device_type(); })
        .def_prop_ro("device_id", [](const BoundTensor &self) { return self.array.device_id(); });
    nb::class_<BoundPlanes>(module, "PlaneTable")
        .def(
            "__init__",
            [](BoundPlanes *self, const std::vector<std::uintptr_t> &addresses,
               const std::vector<std::int64_t> &strides, const std::vector<std::size_t> &sizes,
               const std::vector<std::size_t> &offsets, nb::object owner) {
                new (self) BoundPlanes(make_planes(addresses, strides, sizes, offsets, std::move(owner)));
            },
            "addresses"_a, "strides"_a, "sizes"_a, "offsets"_a, "owner"_a);
    nb::class_<BoundRecords>(module, "RecordTable")
        .def(
            "__init__",
            [](BoundRecords *self, const std::vector<std::uintptr_t> &extents, std::size_t records_per_extent,
               std::size_t record_bytes, const std::vector<std::uintptr_t> &headers, std::int32_t num_slots,
               nb::object owner) {
                new (self) BoundRecords(make_records(extents, records_per_extent, record_bytes, headers,
                                                     num_slots, std::move(owner)));
            },
            "extents"_a, "records_per_extent"_a, "record_bytes"_a, "headers"_a, "num_slots"_a, "owner"_a)
        .def_prop_ro("num_slots", [](const BoundRecords &self) { return self.table.num_slots; })
        .def(
            "record",
            [](nb::handle_t<BoundRecords> self, std::int32_t slot) {
                const auto &table = nb::cast<BoundRecords &>(self).table;
                check_slot(table, slot);
                return ByteView(table.record(slot), {table.record_bytes}, self);
            },
            "slot"_a)
        .def(
            "header",
            [](const BoundRecords &self, std::int32_t slot) {
                check_slot(self.table, slot);
                return load_header(self.table.header(slot));
            },
            "slot"_a)
        .def(
            "set_header",
            [](const BoundRecords &self, std::int32_t slot, const SlotHeader &header) {
                check_slot(self.table, slot);
                store_header(self.table.header(slot), header);
            },
            "slot"_a, "header"_a);
}

void bind_streams(nb::module_ &module) {
    nb::class_<BoundEvent>(module, "Event")
        .def(nb::init<>())
        .def(
            "set", [](BoundEvent &self) { self.event->set(); }, nb::call_guard<nb::gil_scoped_release>())
        .def("query", [](const BoundEvent &self) { return self.event->is_set(); })
        .def(
            "wait",
            [](BoundEvent &self, std::optional<double> timeout) {
                const auto wait_until = [&](Deadline deadline) { return self.event->wait_until(deadline); };
                return wait_interruptibly(timeout, wait_until);
            },
            "timeout"_a = nb::none());
    module.def(
        "wait_any",
        [](const nb::sequence &sequence, std::optional<double> timeout) {
            std::vector<std::shared_ptr<Event>> events;
            for (nb::handle each : sequence) events.push_back(nb::cast<BoundEvent &>(each).event);
            const auto wait_until = [&](Deadline deadline) { return Event::wait_any(events, deadline); };
            return wait_interruptibly(timeout, wait_until);
        },
        "events"_a, "timeout"_a = nb::none());
    nb::class_<BoundCopy>(module, "BlockCopy")
        .def(
            "__init__",
            [](BoundCopy *self, bool to_host, const nb::object &planes, const nb::object &records,
               InputArray<std::int32_t> device_slots, InputArray<std::int32_t> host_slots,
               InputArray<std::uint32_t> generations, HashArray hashes, HashArray parents,
               const nb::bytes &fingerprint, const std::optional<InputArray<std::uint8_t>> &verify) {
                new (self) BoundCopy(make_copy(to_host, planes, records, device_slots, host_slots,
                                               generations, hashes, parents, fingerprint, verify));
            },
            "to_host"_a, "planes"_a, "records"_a, "device_slots"_a, "host_slots"_a, "generations"_a,
            "hashes"_a, "parents"_a, "fingerprint"_a, "verify"_a = nb::none())
        .def(
            "cancel", [](BoundCopy &self) { return self.copy->cancel(); },
            nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("done", [](const BoundCopy &self) { return BoundEvent{self.copy->done()}; })
        .def_prop_ro("started", [](const BoundCopy &self) { return self.copy->started(); })
        .def_prop_ro("copied_bytes", [](const BoundCopy &self) { return self.copy->copied_bytes(); })
        .def_prop_ro("seconds", [](const BoundCopy &self) { return self.copy->seconds(); })
        .def("faults",
             [](const BoundCopy &self) {
                 std::vector<std::uint8_t> faults(self.copy->num_blocks());
                 for (std::size_t i = 0; i < faults.size(); ++i) {
                     faults[i] = static_cast<std::uint8_t>(self.copy->fault(i));
                 }
                 return nb::bytes(reinterpret_cast<const char *>(faults.data()), faults.size());
             })
        .def("checksums", [](const BoundCopy &self) {
            const auto sums = self.copy->checksums();
            return nb::bytes(reinterpret_cast<const char *>(sums.data()), 8 * sums.size());
        });
    nb::class_<BoundStream>(module, "CopyStream")
        .def(nb::init<unsigned, bool>(), "threads"_a, "background"_a = false)
        .def("copy", &BoundStream::copy, "copy"_a, "first_plane"_a, "last_plane"_a)
        .def(
            "record", [](BoundStream &self, const BoundEvent &event) { self.stream().record(event.event); },
            "event"_a)
        .def(
            "wait", [](BoundStream &self, const BoundEvent &event) { self.stream().wait(event.event); },
            "event"_a)
        .def("retire", &BoundStream::retire)
        .def("close", &BoundStream::close);
}

}  // namespace

void bind_copy(nb::module_ &module) {
    bind_checksum(module);
    bind_header(module);
    bind_memory(module);
    bind_streams(module);
}

}  // namespace fdcache
