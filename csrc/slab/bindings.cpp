#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "slab/slab_file.hpp"

namespace fdcache {
namespace {

// Set once, from any thread, to cancel requests that have not started.
struct CancelFlag {
    std::shared_ptr<std::atomic<bool>> value = std::make_shared<std::atomic<bool>>(false);
};

SlabShape make_shape(std::uint64_t header_offset, std::uint64_t record_offset, std::size_t record_bytes,
                     std::uint32_t slots, const nb::bytes &fingerprint,
                     const std::vector<std::pair<std::size_t, std::size_t>> &parts) {
    SlabShape shape;
    if (record_bytes == 0 || record_bytes % 4096 || record_offset % 4096 || slots == 0)
        throw std::invalid_argument("records must be whole pages at page offsets, at least one");
    shape.header_offset = static_cast<off_t>(header_offset);
    shape.record_offset = static_cast<off_t>(record_offset);
    shape.record_bytes = record_bytes;
    shape.slots = slots;
    shape.fingerprint = fingerprint_of(fingerprint);
    std::size_t end = 0;
    for (const auto &[offset, nbytes] : parts) {
        if (offset % 8 || offset < end || offset + nbytes > record_bytes)
            throw std::invalid_argument("payload parts must lie in the record, in order, at multiples of 8");
        shape.parts.push_back({offset, nbytes});
        end = offset + nbytes;
    }
    return shape;
}

using Addresses = VectorIn<std::uint64_t>;

std::vector<SlabBlock> make_blocks(const VectorIn<std::int32_t> &slots,
                                   const VectorIn<std::uint32_t> &generations,
                                   const VectorIn<std::uint32_t> &host_generations, const HashesIn &hashes,
                                   const HashesIn &parents, const Addresses &records,
                                   const Addresses &headers, std::uint32_t num_slots) {
    const std::size_t count = slots.shape(0);
    for (const std::size_t size : {generations.shape(0), host_generations.shape(0), hashes.shape(0),
                                   parents.shape(0), records.shape(0), headers.shape(0)})
        if (size != count) throw std::invalid_argument("the arrays of a transfer differ in length");
    std::vector<SlabBlock> blocks(count);
    for (std::size_t i = 0; i < count; ++i) {
        const std::int32_t slot = slots.data()[i];
        if (slot < 0 || static_cast<std::uint32_t>(slot) >= num_slots)
            throw nb::index_error("storage slot out of range");
        blocks[i] = {static_cast<std::uint32_t>(slot),
                     generations.data()[i],
                     host_generations.data()[i],
                     digests_of(hashes)[i],
                     digests_of(parents)[i],
                     reinterpret_cast<std::uint8_t *>(records.data()[i]),
                     reinterpret_cast<SlotHeader *>(headers.data()[i])};
    }
    return blocks;
}

SlabLimits make_limits(double timeout, const CancelFlag *cancel) {
    using Clock = std::chrono::steady_clock;
    const auto span = std::chrono::duration<double>(std::clamp(timeout, 0.0, 1e9));
    return {Clock::now() + std::chrono::duration_cast<Clock::duration>(span),
            cancel ? cancel->value : nullptr};
}

using Outcome = std::tuple<VectorOut<std::uint8_t>, VectorOut<std::uint64_t>, VectorOut<std::int32_t>,
                           std::uint64_t, int>;

Outcome to_tuple(SlabOutcome &&out) {
    return {to_numpy<std::uint8_t>(std::move(out.faults)), to_numpy<std::uint64_t>(std::move(out.checksums)),
            to_numpy<std::int32_t>(std::move(out.errors)), out.bytes, out.file_error};
}

struct BoundSlab {
    std::unique_ptr<SlabFile> file;
    std::uint32_t slots;

    std::vector<std::uint32_t> checked(const VectorIn<std::int32_t> &given) const {
        std::vector<std::uint32_t> list;
        for (const std::int32_t slot : span_of(given)) {
            if (slot < 0 || static_cast<std::uint32_t>(slot) >= slots)
                throw nb::index_error("storage slot out of range");
            list.push_back(static_cast<std::uint32_t>(slot));
        }
        return list;
    }
};

struct ReadySlots {
    std::vector<std::int32_t> slots;
    std::vector<std::uint32_t> generations;
    std::vector<Digest> hashes, parents;
    std::vector<std::uint64_t> checksums, written;
};

ReadySlots ready_slots(const BoundSlab &self) {
    ReadySlots ready;
    for (std::uint32_t slot = 0; slot < self.slots; ++slot) {
        const SlotHeader header = self.file->header(slot);
        if (header.state != HeaderState::kReady) continue;
        ready.slots.push_back(static_cast<std::int32_t>(slot));
        ready.generations.push_back(header.generation);
        ready.hashes.push_back(header.hash);
        ready.parents.push_back(header.parent);
        ready.checksums.push_back(header.payload_checksum);
        ready.written.push_back(header.written_ms);
    }
    return ready;
}

using Entries = std::tuple<VectorOut<std::int32_t>, VectorOut<std::uint32_t>, HashesOut, HashesOut,
                           VectorOut<std::uint64_t>, VectorOut<std::uint64_t>>;

Entries entries(const BoundSlab &self) {
    ReadySlots ready;
    {
        const nb::gil_scoped_release release;
        ready = ready_slots(self);
    }
    return {to_numpy<std::int32_t>(std::move(ready.slots)),
            to_numpy<std::uint32_t>(std::move(ready.generations)),
            hashes_to_numpy(std::move(ready.hashes)),
            hashes_to_numpy(std::move(ready.parents)),
            to_numpy<std::uint64_t>(std::move(ready.checksums)),
            to_numpy<std::uint64_t>(std::move(ready.written))};
}

}  // namespace

void bind_slab(nb::module_ &module) {
    nb::class_<CancelFlag>(module, "CancelFlag",
                           "Set once, from any thread, to cancel requests that have not started.")
        .def(nb::init<>())
        .def("set", [](CancelFlag &self) { self.value->store(true); })
        .def_prop_ro("is_set", [](const CancelFlag &self) { return self.value->load(); });
    nb::class_<BoundSlab>(
        module, "SlabFile",
        "Records and headers of an open slab file (docs/format-storage.md).\n\n"
        "``read``, ``write`` and ``verify`` return the fault of each block, its checksum, its\n"
        "errno, the bytes of all copied records, and an errno that concerns the whole file. Faults:\n"
        "0 none, 1 miss, 2 corrupt, 3 source changed, 4 error, 5 timeout, 6 cancelled, 7 no room.")
        .def(
            "__init__",
            [](BoundSlab *self, int record_fd, int header_fd, std::uint64_t header_offset,
               std::uint64_t record_offset, std::size_t record_bytes, std::uint32_t slots,
               const nb::bytes &fingerprint, const std::vector<std::pair<std::size_t, std::size_t>> &parts,
               unsigned threads) {
                if (threads < 1 || threads > 256) throw std::invalid_argument("threads must be 1 to 256");
                SlabShape shape =
                    make_shape(header_offset, record_offset, record_bytes, slots, fingerprint, parts);
                new (self) BoundSlab{
                    std::make_unique<SlabFile>(record_fd, header_fd, std::move(shape), threads), slots};
            },
            "record_fd"_a, "header_fd"_a, "header_offset"_a, "record_offset"_a, "record_bytes"_a, "slots"_a,
            "fingerprint"_a, "parts"_a, "threads"_a,
            "``parts``: (offset, bytes) of each plane in a record, in order. The caller closes the\n"
            "descriptors.")
        .def(
            "scan",
            [](BoundSlab &self, std::uint32_t first, std::uint32_t last, bool repair) {
                SlabScan found;
                {
                    const nb::gil_scoped_release release;
                    found = self.file->scan(first, last, repair);
                }
                return std::tuple(found.ready, found.corrupt, found.error);
            },
            "first"_a, "last"_a, "repair"_a = false,
            "Read the headers of slots [first, last); return the numbers of ready and corrupt ones, and\n"
            "an errno or 0. ``repair``: empty the corrupt ones in the file.")
        .def("entries", &entries,
             "Return slots, generations, hashes, parents, checksums and write times (ms since 1970) of\n"
             "ready slots.")
        .def(
            "read",
            [](BoundSlab &self, const VectorIn<std::int32_t> &slots,
               const VectorIn<std::uint32_t> &generations, const VectorIn<std::uint32_t> &host_generations,
               const HashesIn &hashes, const HashesIn &parents, const Addresses &records,
               const Addresses &headers, double timeout, bool verify, const CancelFlag *cancel) {
                const auto blocks = make_blocks(slots, generations, host_generations, hashes, parents,
                                                records, headers, self.slots);
                const SlabLimits limits = make_limits(timeout, cancel);
                SlabOutcome out;
                {
                    const nb::gil_scoped_release release;
                    out = self.file->read(blocks, limits, verify);
                }
                return to_tuple(std::move(out));
            },
            "slots"_a, "generations"_a, "host_generations"_a, "hashes"_a, "parents"_a, "records"_a,
            "headers"_a, "timeout"_a, "verify"_a, "cancel"_a.none() = nb::none(),
            "Read slots into host records. ``records``, ``headers``: addresses. ``timeout``: seconds.\n\n"
            "Checks every record, unless ``verify`` is false and this object wrote or checked the slot\n"
            "before.")
        .def(
            "write",
            [](BoundSlab &self, const VectorIn<std::int32_t> &slots,
               const VectorIn<std::uint32_t> &generations, const VectorIn<std::uint32_t> &host_generations,
               const HashesIn &hashes, const HashesIn &parents, const Addresses &records,
               const Addresses &headers, double timeout, bool sync, std::uint64_t now_ms,
               const CancelFlag *cancel) {
                const auto blocks = make_blocks(slots, generations, host_generations, hashes, parents,
                                                records, headers, self.slots);
                const SlabLimits limits = make_limits(timeout, cancel);
                SlabOutcome out;
                {
                    const nb::gil_scoped_release release;
                    out = self.file->write(blocks, limits,
                                           sync ? SyncPolicy::kEveryBatch : SyncPolicy::kLater, now_ms);
                }
                return to_tuple(std::move(out));
            },
            "slots"_a, "generations"_a, "host_generations"_a, "hashes"_a, "parents"_a, "records"_a,
            "headers"_a, "timeout"_a, "sync"_a, "now_ms"_a, "cancel"_a.none() = nb::none(),
            "Write host records into slots. ``sync``: flush to disk before and after the headers change.")
        .def(
            "verify",
            [](BoundSlab &self, const VectorIn<std::int32_t> &slots) {
                const auto list = self.checked(slots);
                SlabOutcome out;
                {
                    const nb::gil_scoped_release release;
                    out = self.file->verify(list);
                }
                return to_tuple(std::move(out));
            },
            "slots"_a, "Check the records of ready slots against their headers.")
        .def(
            "erase",
            [](BoundSlab &self, const VectorIn<std::int32_t> &slots) {
                const auto list = self.checked(slots);
                const nb::gil_scoped_release release;
                return self.file->erase(list);
            },
            "slots"_a, "Empty slots; return an errno or 0.")
        .def(
            "sync", [](BoundSlab &self) { return self.file->sync(); },
            nb::call_guard<nb::gil_scoped_release>(),
            "Make all writes so far survive power loss; return an errno or 0.")
        .def_prop_ro(
            "unsynced", [](const BoundSlab &self) { return self.file->unsynced(); },
            "True if there are writes since the last ``sync``.");
}

}  // namespace fdcache
