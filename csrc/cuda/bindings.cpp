#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copy/bound_memory.hpp"
#include "copy/transfer_array_bindings.hpp"
#include "cuda/bound.hpp"
#include "cuda/context.hpp"
#include "cuda/lane.hpp"
#include "cuda/submitter.hpp"
#include "cuda/swap.hpp"

namespace fdcache {
namespace {

// The driver has no wait with a deadline, so the host polls, at growing intervals. The kernel lets a thread
// sleep for 50 us at least, so short waits are spent awake.
template <typename Condition>
bool poll(Condition is_true, Deadline deadline) {
    using Clock = std::chrono::steady_clock;
    constexpr Clock::duration kAwake = std::chrono::microseconds(100);
    constexpr Clock::duration kShortest = std::chrono::microseconds(2);
    constexpr Clock::duration kLongest = std::chrono::microseconds(100);
    const auto start = Clock::now();
    while (true) {
        if (is_true()) return true;
        const auto now = Clock::now();
        if (deadline && now >= *deadline) return false;
        if (now - start < kAwake) {
            while (Clock::now() - now < kShortest) std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::clamp((now - start) / 16, kShortest, kLongest));
        }
    }
}

}  // namespace

bool wait_events(const std::vector<EventPtr> &events, std::optional<double> timeout) {
    for (const EventPtr &event : events) event->hurry();
    const auto is_one_reached = [&events] {
        return std::ranges::any_of(events, [](const EventPtr &event) { return event->is_reached(); });
    };
    return wait_interruptibly(timeout, [&](Deadline deadline) { return poll(is_one_reached, deadline); });
}

namespace {

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
            "stream"_a, "Return True if the stream belongs to this context.");
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
            "record_unless_captured",
            [](cuda::Event &self, std::uintptr_t stream) {
                if (self.is_capturing(handle_of<cuda::StreamHandle>(stream))) return false;
                if (const auto refusal = self.record(handle_of<cuda::StreamHandle>(stream))) throw *refusal;
                return true;
            },
            "stream"_a, "Record the event. Do nothing and return False if the stream is being captured.")
        .def(
            "hold_unless_captured",
            [](cuda::Event &self, std::uintptr_t stream) {
                if (self.is_capturing(handle_of<cuda::StreamHandle>(stream))) return false;
                if (self.is_promised()) {
                    self.hurry();
                    const auto is_recorded = [&self] { return !self.is_promised(); };
                    wait_interruptibly(std::nullopt,
                                       [&](Deadline deadline) { return poll(is_recorded, deadline); });
                }
                self.hold(handle_of<cuda::StreamHandle>(stream));
                return true;
            },
            "stream"_a,
            "Make the stream wait for the event. Blocks until a promised event is recorded. Do nothing and\n"
            "return False if the stream is being captured.")
        .def(
            "record", [](nb::handle_t<cuda::Event> self, nb::handle stream) { stream.attr("record")(self); },
            "stream"_a, "Reach the event once the stream has completed everything enqueued so far.")
        .def("query", &cuda::Event::is_reached,
             "Return True once the event is reached, or the GPU has failed.")
        .def(
            "wait",
            [](EventPtr self, std::optional<double> timeout) {
                return wait_events({std::move(self)}, timeout);
            },
            "timeout"_a = nb::none(),
            "Wait up to ``timeout`` seconds, None for ever; return True when the event is reached.");
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
                new (self)
                    BoundExtents{std::make_shared<const std::vector<cuda::Address>>(std::move(addresses))};
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
    nb::class_<BoundSubmitter>(
        module, "CudaSubmitter",
        "Enqueues work on one stream in order: small batches on the calling thread, others on a\n"
        "thread of its own.")
        .def(
            "__init__",
            [](BoundSubmitter *self, ContextPtr context, std::uintptr_t main, bool background) {
                new (self)
                    BoundSubmitter(std::move(context), handle_of<cuda::StreamHandle>(main), background);
            },
            "context"_a, "main"_a, "background"_a)
        .def(
            "record", [](BoundSubmitter &self, EventPtr event) { self.submitter.record(std::move(event)); },
            "event"_a)
        .def(
            "wait", [](BoundSubmitter &self, EventPtr event) { self.submitter.wait(std::move(event)); },
            "event"_a, "Make later work wait for the event. If the driver refuses, the next batch fails.")
        .def(
            "enqueue",
            [](BoundSubmitter &self, const BoundSwap &batch, nb::object owner, LanePtr lane,
               const Pairs &ranges, std::vector<EventPtr> after) {
                if (ranges.empty()) throw std::invalid_argument("a batch has at least one range of planes");
                std::vector<PlaneRange> wanted;
                wanted.reserve(ranges.size());
                for (const auto &[first, last] : ranges) {
                    wanted.push_back(range_of(batch.swap->planes().size(), first, last));
                }
                self.hold(batch.swap, std::move(owner));
                const nb::gil_scoped_release release;
                return self.submitter.enqueue(batch.swap, std::move(lane), wanted, std::move(after));
            },
            "batch"_a, "owner"_a, "lane"_a, "ranges"_a, "after"_a,
            "Enqueue plane ranges of a batch after these events; return the event of each. ``owner`` is "
            "kept\n"
            "until the batch has ended.")
        .def(
            "refuse",
            [](BoundSubmitter &self, const BoundSwap &batch, nb::object owner, std::string reason) {
                self.hold(batch.swap, std::move(owner));
                self.submitter.refuse(batch.swap, std::move(reason));
            },
            "batch"_a, "owner"_a, "reason"_a, "End a batch that cannot be copied.")
        .def("retire", &BoundSubmitter::retire, "Release the owners of batches that have ended.")
        .def("ends", &BoundSubmitter::ends, "Return the ends of the batches whose owners are kept.")
        .def("close", &BoundSubmitter::close,
             "Run the queued work, end the thread and release all owners; later work runs on the calling\n"
             "thread.");
}

cuda::Kernels kernels_of(const std::vector<std::uintptr_t> &handles) {
    if (handles.size() != 5)
        throw std::invalid_argument("kernels are copy_in, copy_out, sum, copy_words, read_peer");
    const auto function = [&](std::size_t i) { return handle_of<cuda::FunctionHandle>(handles[i]); };
    return {function(0), function(1), function(2), function(3), function(4)};
}

BoundSwapPlanes make_swap_planes(const PlanesRef &table, cuda::Address chunks,
                                 std::vector<unsigned> first_chunk, std::int32_t num_blocks,
                                 nb::object owner) {
    const auto &planes = planes_of(table);
    if (first_chunk.size() != planes->size() + 1)
        throw std::invalid_argument("first_chunk and planes differ in length");
    return {std::make_shared<const cuda::SwapPlanes>(planes, chunks, std::move(first_chunk)), num_blocks,
            std::move(owner)};
}

}  // namespace

std::optional<BoundSwap> make_swap(const BoundDevice &device, nb::handle transfer, bool to_host,
                                   nb::handle_t<BoundSwapPlanes> planes, const RecordsRef &records,
                                   const BoundExtents &extents, const nb::bytes &fingerprint, bool verify) {
    const auto &table = records_of(records);
    const auto &bound = nb::cast<const BoundSwapPlanes &>(planes);
    if (extents.addresses->size() < table->extents.size())
        throw std::invalid_argument("extents are not all registered");
    auto arrays = arrays_of(transfer);
    if (!arrays) return std::nullopt;
    auto blocks = blocks_of(*arrays, direction_of(to_host), bound.num_blocks, table->num_slots);
    if (!blocks) return std::nullopt;
    verify = verify || std::ranges::any_of(blocks->unverified, std::identity{});
    auto swap = std::make_shared<cuda::Swap>(device.device, direction_of(to_host), bound.planes,
                                             cuda::SwapRecords{table, extents.addresses}, std::move(*blocks),
                                             fingerprint_of(fingerprint), verify);
    return BoundSwap{std::move(swap), std::move(*arrays), nb::make_tuple(planes, records, device.owner)};
}

namespace {

void bind_swap_batch(nb::module_ &module) {
    nb::class_<BoundSwapPlanes>(module, "CudaPlanes",
                                "Planes of a device cache, and the table of their chunks on the GPU.")
        .def(
            "__init__",
            [](BoundSwapPlanes *self, const PlanesRef &table, cuda::Address chunks,
               std::vector<unsigned> first_chunk, std::int32_t num_blocks, nb::object owner) {
                new (self) BoundSwapPlanes(
                    make_swap_planes(table, chunks, std::move(first_chunk), num_blocks, std::move(owner)));
            },
            "table"_a, "chunks"_a, "first_chunk"_a, "num_blocks"_a, "owner"_a,
            "``chunks``, ``first_chunk``: of ``swap_chunks``. ``owner`` keeps the memory of both alive.");
    nb::class_<BoundDevice>(module, "CudaCopier", "Prepares the batches of one GPU.")
        .def(
            "__init__",
            [](BoundDevice *self, ContextPtr context, const std::vector<std::uintptr_t> &kernels,
               const cuda::SwapPolicy &policy, nb::object owner) {
                new (self) BoundDevice{
                    std::make_shared<const cuda::SwapDevice>(std::move(context), kernels_of(kernels), policy),
                    std::move(owner)};
            },
            "context"_a, "kernels"_a, "policy"_a, "owner"_a,
            "``kernels``: copy_in, copy_out, sum, copy_words, read_peer, which ``owner`` keeps loaded.")
        .def("prepare", &make_swap, "swap"_a, "to_host"_a, "planes"_a, "records"_a, "extents"_a,
             "fingerprint"_a, "verify"_a,
             "Prepare the copies of a transfer; return None unless it is sound (``is_sound_transfer``).\n"
             "``verify``: loads fail unless their bytes have the record's checksum.");
    nb::class_<BoundSwap>(module, "CudaSwap", "A batch of block copies on a GPU.")
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
        .def_prop_ro("started", [](const BoundSwap &self) { return self.swap->started(); })
        .def_prop_ro("is_certain", [](const BoundSwap &self) { return self.swap->is_certain(); })
        .def_prop_ro("done", [](const BoundSwap &self) { return self.swap->done(); })
        .def(
            "finish",
            [](BoundSwap &self) {
                cuda::Swap &swap = *self.swap;
                swap.finish();
                return nb::make_tuple(faults_to_bytes(swap.faults()), sums_to_bytes(swap.checksums()),
                                      swap.copied_bytes(), swap.seconds(), swap.error());
            },
            nb::sig("def finish(self) -> tuple[bytes, bytes, int, float, str]"), kOutcomeDoc);
}

}  // namespace

void bind_cuda(nb::module_ &module) {
    bind_context(module);
    bind_events(module);
    bind_registration(module);
    bind_submitter(module);
    bind_swap_batch(module);
    bind_launches(module);
    bind_peers(module);
}

}  // namespace fdcache
