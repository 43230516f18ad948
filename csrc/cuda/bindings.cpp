#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copy/bound_memory.hpp"
#include "cuda/context.hpp"
#include "cuda/lane.hpp"
#include "cuda/submitter.hpp"
#include "cuda/swap.hpp"

namespace fdcache {
namespace {

using EventPtr = std::shared_ptr<cuda::Event>;
using ContextPtr = std::shared_ptr<cuda::Context>;
using LanePtr = std::shared_ptr<cuda::Lane>;
using TrafficPtr = std::shared_ptr<cuda::Traffic>;
using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

template <typename Handle>
Handle handle_of(std::uintptr_t value) {
    return reinterpret_cast<Handle>(value);
}

// The driver has no wait with a deadline, so the host polls, at growing intervals.
template <typename Condition>
bool poll(Condition is_true, Deadline deadline) {
    using Clock = std::chrono::steady_clock;
    constexpr Clock::duration kShortest = std::chrono::microseconds(2);
    constexpr Clock::duration kLongest = std::chrono::microseconds(100);
    const auto start = Clock::now();
    while (true) {
        if (is_true()) return true;
        const auto now = Clock::now();
        if (deadline && now >= *deadline) return false;
        std::this_thread::sleep_for(std::clamp((now - start) / 16, kShortest, kLongest));
    }
}

bool wait_events(const std::vector<EventPtr> &events, std::optional<double> timeout) {
    const auto is_one_reached = [&events] {
        return std::ranges::any_of(events, [](const EventPtr &event) { return event->is_reached(); });
    };
    return wait_interruptibly(timeout, [&](Deadline deadline) { return poll(is_one_reached, deadline); });
}

struct BoundSwap {
    std::shared_ptr<cuda::Swap> swap;
    nb::object owners;
};

// Device addresses of the extents of an arena. Built once, since an arena has thousands.
struct BoundExtents {
    std::vector<cuda::Address> addresses;
};

struct BoundRegistration {
    nb::object owner;  // destroyed last: memory is unpinned before it is freed
    std::unique_ptr<cuda::Registration> registration;
};

void bind_context(nb::module_ &module) {
    nb::exception<cuda::Error>(module, "CudaError", PyExc_RuntimeError).attr("__doc__") =
        "A call of the CUDA driver failed.";
    nb::class_<cuda::Context>(module, "CudaContext", "The primary context of one GPU.")
        .def(nb::new_([](int ordinal) { return std::make_shared<cuda::Context>(ordinal); }), "ordinal"_a)
        .def_prop_ro("lost", &cuda::Context::lost, "The error that made the GPU unusable, if any.")
        .def(
            "is_stream_of",
            [](cuda::Context &self, std::uintptr_t stream) {
                return cuda::is_stream_of(self, handle_of<cuda::StreamHandle>(stream));
            },
            "stream"_a, "Return True if the stream belongs to this context.")
        .def(
            "is_capturing",
            [](cuda::Context &self, std::uintptr_t stream) {
                return cuda::is_capturing(self, handle_of<cuda::StreamHandle>(stream));
            },
            "stream"_a, "Return True if the stream is being captured into a graph.");
    module.def(
        "device_uuid",
        [](int ordinal) {
            const auto uuid = cuda::device_uuid(ordinal);
            return nb::bytes(uuid.data(), uuid.size());
        },
        "ordinal"_a, "Return the 16-byte UUID of a GPU.");
    module.def(
        "has_batched_copies", [] { return cuda::driver().copy_batch != nullptr; },
        "Return True if the driver takes many copies in one call.");
}

void bind_events(nb::module_ &module) {
    nb::class_<cuda::Event>(module, "CudaEvent", "An event of a GPU that is recorded once.")
        .def(nb::new_([](ContextPtr context, bool timing) {
                 return std::make_shared<cuda::Event>(std::move(context), timing);
             }),
             "context"_a, "timing"_a = false)
        .def(
            "record",
            [](cuda::Event &self, std::uintptr_t stream) {
                if (const auto refusal = self.record(handle_of<cuda::StreamHandle>(stream))) throw *refusal;
            },
            "stream"_a)
        .def(
            "hold",
            [](cuda::Event &self, std::uintptr_t stream) {
                if (self.is_promised()) {
                    const auto is_recorded = [&self] { return !self.is_promised(); };
                    wait_interruptibly(std::nullopt,
                                       [&](Deadline deadline) { return poll(is_recorded, deadline); });
                }
                self.hold(handle_of<cuda::StreamHandle>(stream));
            },
            "stream"_a, "Make the stream wait for the event. Blocks until a promised event is recorded.")
        .def("query", &cuda::Event::is_reached, "Return True if the event is reached.");
    module.def("wait_cuda_events", &wait_events, "events"_a, "timeout"_a = nb::none(),
               "Wait until one of the events is reached; return False after ``timeout`` seconds.");
}

void bind_registration(nb::module_ &module) {
    nb::class_<BoundRegistration>(module, "CudaRegistration",
                                  "Host memory pinned for all GPUs, until the object is deleted.")
        .def(
            "__init__",
            [](BoundRegistration *self, ContextPtr context, std::uintptr_t address, std::size_t nbytes,
               nb::object owner) {
                auto pinned = [&] {
                    const nb::gil_scoped_release release;
                    return std::make_unique<cuda::Registration>(std::move(context), pointer(address), nbytes);
                }();
                new (self) BoundRegistration{std::move(owner), std::move(pinned)};
            },
            "context"_a, "address"_a, "nbytes"_a, "owner"_a, "``owner`` keeps the memory alive.")
        .def_prop_ro("device_address",
                     [](const BoundRegistration &self) { return self.registration->device_address(); });
    nb::class_<BoundExtents>(module, "CudaExtents",
                             "Addresses of the extents of an arena, as a GPU sees them.")
        .def(
            "__init__",
            [](BoundExtents *self, std::vector<cuda::Address> addresses) {
                new (self) BoundExtents{std::move(addresses)};
            },
            "addresses"_a);
}

void bind_submitter(nb::module_ &module) {
    nb::class_<cuda::Lane>(
        module, "CudaLane",
        "A stream for kernels, one for the copy engine, and the staging ring between them.")
        .def(nb::new_([](ContextPtr context, std::uintptr_t main, std::uintptr_t copy, cuda::Address staging,
                         std::size_t slot_bytes, unsigned slots) {
                 if (slots == 0) throw std::invalid_argument("a ring has at least one slot");
                 return std::make_shared<cuda::Lane>(std::move(context), handle_of<cuda::StreamHandle>(main),
                                                     handle_of<cuda::StreamHandle>(copy), staging, slot_bytes,
                                                     slots);
             }),
             "context"_a, "main"_a, "copy"_a, "staging"_a, "slot_bytes"_a, "slots"_a);
    nb::class_<cuda::Submitter>(
        module, "CudaSubmitter",
        "Enqueues work on one stream in order: small batches on the calling thread, others on a\n"
        "thread of its own.")
        .def(
            "__init__",
            [](cuda::Submitter *self, ContextPtr context, std::uintptr_t main, bool background) {
                new (self)
                    cuda::Submitter(std::move(context), handle_of<cuda::StreamHandle>(main), background);
            },
            "context"_a, "main"_a, "background"_a)
        .def("record", &cuda::Submitter::record, "event"_a)
        .def("wait", &cuda::Submitter::wait, "event"_a,
             "Make later work wait for the event. If the driver refuses, the next batch fails.")
        .def(
            "enqueue",
            [](cuda::Submitter &self, const BoundSwap &batch, LanePtr lane, const Pairs &ranges) {
                if (ranges.empty()) throw std::invalid_argument("a batch has at least one range of planes");
                std::vector<PlaneRange> wanted;
                for (const auto &[first, last] : ranges) {
                    wanted.push_back(range_of(batch.swap->planes().size(), first, last));
                }
                const nb::gil_scoped_release release;
                return self.enqueue(batch.swap, std::move(lane), wanted);
            },
            "batch"_a, "lane"_a, "ranges"_a, "Enqueue plane ranges of a batch and return the event of each.")
        .def(
            "refuse",
            [](cuda::Submitter &self, const BoundSwap &batch, std::string reason) {
                self.refuse(batch.swap, std::move(reason));
            },
            "batch"_a, "reason"_a, "End a batch that cannot be copied.")
        .def("close", &cuda::Submitter::close, nb::call_guard<nb::gil_scoped_release>(),
             "Run the queued work and end the thread; later work runs on the calling thread.");
}

BoundSwap make_swap(ContextPtr context, TrafficPtr traffic, const std::vector<std::uintptr_t> &kernels,
                    const cuda::SwapPolicy &policy, bool to_host, const PlanesRef &planes,
                    cuda::Address chunks, std::vector<unsigned> first_chunk, const RecordsRef &records,
                    const BoundExtents &extents, const VectorIn<std::int32_t> &device_slots,
                    const VectorIn<std::int32_t> &host_slots, const VectorIn<std::uint32_t> &generations,
                    const HashesIn &hashes, const HashesIn &parents, const nb::bytes &fingerprint,
                    bool verify) {
    const auto &table = records_of(records);
    const auto &bound = planes_of(planes);
    if (kernels.size() != 4) throw std::invalid_argument("kernels are copy_in, copy_out, sum, copy_words");
    if (first_chunk.size() != bound.size() + 1)
        throw std::invalid_argument("first_chunk and planes differ in length");
    if (extents.addresses.size() < table.extents.size())
        throw std::invalid_argument("extents are not all registered");
    const auto function = [&](std::size_t i) { return handle_of<cuda::FunctionHandle>(kernels[i]); };
    const cuda::Kernels functions{function(0), function(1), function(2), function(3)};
    auto swap = std::make_shared<cuda::Swap>(
        std::move(context), std::move(traffic), functions, policy, direction_of(to_host), bound, chunks,
        std::move(first_chunk), table, extents.addresses,
        make_pairs(table, device_slots, host_slots, generations, hashes, parents),
        fingerprint_of(fingerprint), verify);
    return {std::move(swap), nb::make_tuple(planes, records)};
}

void bind_batch(nb::module_ &module) {
    nb::class_<cuda::Traffic>(module, "CudaTraffic", "Number of batches in flight on one GPU, by direction.")
        .def(nb::new_([] { return std::make_shared<cuda::Traffic>(); }));
    nb::class_<BoundSwap>(module, "CudaSwap",
                          "A batch of block copies on a GPU. Read ``faults()`` and ``checksums()`` after "
                          "``finish()``.")
        .def(
            "__init__",
            [](BoundSwap *self, ContextPtr context, TrafficPtr traffic,
               const std::vector<std::uintptr_t> &kernels, const cuda::SwapPolicy &policy, bool to_host,
               const PlanesRef &planes, cuda::Address chunks, std::vector<unsigned> first_chunk,
               const RecordsRef &records, const BoundExtents &extents,
               const VectorIn<std::int32_t> &device_slots, const VectorIn<std::int32_t> &host_slots,
               const VectorIn<std::uint32_t> &generations, const HashesIn &hashes, const HashesIn &parents,
               const nb::bytes &fingerprint, bool verify) {
                new (self) BoundSwap(make_swap(std::move(context), std::move(traffic), kernels, policy,
                                               to_host, planes, chunks, std::move(first_chunk), records,
                                               extents, device_slots, host_slots, generations, hashes,
                                               parents, fingerprint, verify));
            },
            "context"_a, "traffic"_a, "kernels"_a, "policy"_a, "to_host"_a, "planes"_a, "chunks"_a,
            "first_chunk"_a, "records"_a, "extents"_a, "device_slots"_a, "host_slots"_a, "generations"_a,
            "hashes"_a, "parents"_a, "fingerprint"_a, "verify"_a,
            "``kernels``: copy_in, copy_out, sum, copy_words. ``chunks``, ``first_chunk``: of\n"
            "``swap_chunks``.")
        .def_prop_ro(
            "table_bytes", [](const BoundSwap &self) { return self.swap->table_bytes(); },
            "Size of the block table.")
        .def(
            "set_table",
            [](BoundSwap &self, std::uintptr_t host, cuda::Address device) {
                self.swap->set_table(pointer(host), device);
            },
            "host"_a, "device"_a,
            "Set the addresses of the block table in pinned host memory and on the GPU.")
        .def(
            "finish", [](BoundSwap &self) { self.swap->finish(); },
            "Check the headers again and mark complete records ready. Call once ``done`` is reached.")
        .def_prop_ro("started", [](const BoundSwap &self) { return self.swap->started(); })
        .def_prop_ro("done", [](const BoundSwap &self) { return self.swap->done(); })
        .def_prop_ro("copied_bytes", [](const BoundSwap &self) { return self.swap->copied_bytes(); })
        .def_prop_ro("seconds", [](const BoundSwap &self) { return self.swap->seconds(); })
        .def_prop_ro("error", [](const BoundSwap &self) { return self.swap->error(); })
        .def(
            "faults", [](const BoundSwap &self) { return vector_to_bytes(self.swap->faults()); },
            "A byte per block: 0 if it was copied, else the reason (BlockFault in csrc/copy/record.hpp).")
        .def(
            "checksums", [](const BoundSwap &self) { return vector_to_bytes(self.swap->checksums()); },
            "A 64-bit checksum per block of a copy to the host; empty for loads.");
}

}  // namespace

void bind_cuda(nb::module_ &module) {
    bind_context(module);
    bind_events(module);
    bind_registration(module);
    bind_submitter(module);
    bind_batch(module);
}

}  // namespace fdcache
