// Bindings of memory of peers on a GPU, and of the kernels that read it.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <ranges>
#include <span>
#include <stdexcept>
#include <vector>

#include "cuda/bound.hpp"
#include "cuda/peer_memory.hpp"
#include "cuda/peer_planes.hpp"

namespace fdcache {
namespace {

void require_some_slots(std::span<const std::int32_t> slots, std::int32_t num_blocks) {
    if (slots.empty()) throw nb::index_error("no slots");
    require_slots(slots, num_blocks);
}

cuda::BlockTable table_of(std::uintptr_t host, cuda::Address device, std::size_t nbytes, std::size_t rows) {
    if (rows > nbytes / sizeof(swap::Block)) throw std::invalid_argument("the table is too small");
    return {reinterpret_cast<swap::Block *>(host), device};
}

void bind_peer_memory(nb::module_ &module) {
    nb::class_<cuda::PeerMemory>(module, "CudaPeerMemory",
                                 "An allocation of another process, mapped until the object is deleted.")
        .def(
            "__init__",
            [](cuda::PeerMemory *self, ContextPtr context, const nb::bytes &handle) {
                cuda::IpcHandle opened{};
                if (handle.size() != sizeof opened) throw std::invalid_argument("not a handle of memory");
                std::memcpy(&opened, handle.data(), sizeof opened);
                const nb::gil_scoped_release release;
                new (self) cuda::PeerMemory(std::move(context), opened);
            },
            "context"_a, "handle"_a, "``handle``: of ``export_memory`` in the other process.")
        .def_prop_ro("address", &cuda::PeerMemory::address);
    module.def(
        "export_memory",
        [](cuda::Context &context, cuda::Address address) {
            const cuda::Exported found = cuda::export_memory(context, address);
            return nb::make_tuple(nb::bytes(found.handle.bytes, sizeof found.handle), found.base,
                                  found.nbytes);
        },
        "context"_a, "address"_a,
        nb::sig("def export_memory(context: CudaContext, address: int) -> tuple[bytes, int, int]"),
        "Return the handle, the address and the bytes of the allocation around an address. Raises CudaError "
        "for\nmemory that has no handle.");
    module.def("enable_peer_access", &cuda::enable_peer_access, "context"_a, "other"_a,
               "Give kernels access to the memory of another GPU of this process.");
}

void bind_work(nb::module_ &module) {
    nb::class_<cuda::PlaneWork>(module, "CudaPlaneWork", "A kernel over the planes of blocks.")
        .def_prop_ro(
            "done", [](const cuda::PlaneWork &self) { return self.done; },
            "Event of its end, reached even if the driver refused the kernel.")
        .def_ro("error", &cuda::PlaneWork::error, "Reason of the driver's refusal, empty without one.")
        .def_prop_ro("seconds", &cuda::PlaneWork::seconds, "Seconds on the GPU, once ``done`` is reached.");
    module.def(
        "read_planes",
        [](const BoundDevice &device, std::uintptr_t stream, const BoundSwapPlanes &source,
           const VectorIn<std::int32_t> &places, const BoundSwapPlanes &target,
           const VectorIn<std::int32_t> &slots, std::size_t first, std::size_t last, std::uintptr_t host,
           cuda::Address table, std::size_t table_bytes, unsigned thread_blocks, unsigned threads,
           const std::vector<EventPtr> &after) {
            const auto &theirs = *source.planes->planes, &mine = *target.planes->planes;
            if (!std::ranges::equal(theirs, mine, {}, &Plane::nbytes, &Plane::nbytes))
                throw std::invalid_argument("the caches have other planes");
            require_equal(places.shape(0), slots.shape(0));
            require_some_slots(span_of(places), source.num_blocks);
            require_some_slots(span_of(slots), target.num_blocks);
            if (thread_blocks == 0 || threads == 0 || threads % 32 != 0 || threads > 1024)
                throw std::invalid_argument("a grid has thread blocks of 32 to 1024 threads");
            const PlaneRange range = range_of(mine.size(), first, last);
            const auto memory = table_of(host, table, table_bytes, slots.shape(0));
            const nb::gil_scoped_release release;
            return cuda::read_planes(*device.device, handle_of<cuda::StreamHandle>(stream), *source.planes,
                                     *target.planes, {span_of(places), span_of(slots)}, range, memory,
                                     {thread_blocks, threads}, after);
        },
        "copier"_a, "stream"_a, "source"_a, "places"_a, "target"_a, "slots"_a, "first_plane"_a,
        "last_plane"_a, "host"_a, "table"_a, "table_bytes"_a, "thread_blocks"_a, "threads"_a, "after"_a,
        "Read planes [first_plane, last_plane) of blocks ``places`` of other planes into ``slots`` with one "
        "kernel,\nafter these events. ``host``, ``table``: a block table in pinned memory and on the GPU, in "
        "use until the end.\nRaises IndexError for a block that does not exist.");
    module.def(
        "sum_device_planes",
        [](const BoundDevice &device, std::uintptr_t stream, const BoundSwapPlanes &planes,
           const VectorIn<std::int32_t> &slots, std::size_t first, std::size_t last, std::uintptr_t host,
           cuda::Address table, std::size_t table_bytes) {
            require_some_slots(span_of(slots), planes.num_blocks);
            const PlaneRange range = range_of(planes.planes->planes->size(), first, last);
            const auto memory = table_of(host, table, table_bytes, slots.shape(0));
            const nb::gil_scoped_release release;
            return cuda::sum_planes(*device.device, handle_of<cuda::StreamHandle>(stream), *planes.planes,
                                    span_of(slots), range, memory);
        },
        "copier"_a, "stream"_a, "planes"_a, "slots"_a, "first_plane"_a, "last_plane"_a, "host"_a, "table"_a,
        "table_bytes"_a,
        "Sum planes [first_plane, last_plane) of blocks as ``sum_planes`` does; ``read_sums`` returns the\n"
        "sums once it has ended.");
    module.def(
        "read_sums",
        [](std::uintptr_t host, std::size_t count) {
            const std::span rows(reinterpret_cast<const swap::Block *>(host), count);
            std::vector<std::uint64_t> sums;
            for (const swap::Block &row : rows) sums.push_back(row.sum);
            return to_numpy<std::uint64_t>(std::move(sums));
        },
        "host"_a, "count"_a, "Return the sums in a block table.");
}

}  // namespace

void bind_peers(nb::module_ &module) {
    bind_peer_memory(module);
    bind_work(module);
}

}  // namespace fdcache
