#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
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
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/bindings.hpp"
#include "core/copy_bindings.hpp"
#include "core/cuda_context.hpp"
#include "core/cuda_lane.hpp"
#include "core/cuda_swap.hpp"
#include "core/submitter.hpp"
#include "core/swap_plan_bindings.hpp"

namespace fdcache {
namespace {

using namespace nb::literals;
using EventPtr = std::shared_ptr<cuda::Event>;
using ContextPtr = std::shared_ptr<cuda::Context>;
using LanePtr = std::shared_ptr<cuda::Lane>;
using TrafficPtr = std::shared_ptr<cuda::Traffic>;

std::uint8_t *pointer(std::uintptr_t address) {
    return reinterpret_cast<std::uint8_t *>(address);
}

template <typename Handle>
Handle handle_of(std::uintptr_t value) {
    return reinterpret_cast<Handle>(value);
}

// The driver has no wait with a deadline, so the host looks again and again, more seldom with time.
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

// Where the device sees the extents of an arena; made once, since an arena has thousands.
struct BoundExtents {
    std::vector<cuda::Address> addresses;
};

struct BoundRegistration {
    nb::object owner;  // goes last: memory is unpinned before it is freed
    std::unique_ptr<cuda::Registration> registration;
};

void bind_context(nb::module_ &module) {
    nb::exception<cuda::Error>(module, "CudaError", PyExc_RuntimeError);
    nb::class_<cuda::Context>(module, "CudaContext")
        .def(nb::new_([](int ordinal) { return std::make_shared<cuda::Context>(ordinal); }), "ordinal"_a)
        .def_prop_ro("lost", &cuda::Context::lost)
        .def(
            "is_stream_of",
            [](cuda::Context &self, std::uintptr_t stream) {
                return cuda::is_stream_of(self, handle_of<cuda::StreamHandle>(stream));
            },
            "stream"_a)
        .def(
            "is_capturing",
            [](cuda::Context &self, std::uintptr_t stream) {
                return cuda::is_capturing(self, handle_of<cuda::StreamHandle>(stream));
            },
            "stream"_a);
    module.def(
        "device_uuid",
        [](int ordinal) {
            const auto uuid = cuda::device_uuid(ordinal);
            return nb::bytes(reinterpret_cast<const char *>(uuid.data()), uuid.size());
        },
        "ordinal"_a);
    module.def("has_batched_copies", [] { return cuda::driver().copy_batch != nullptr; });
    nb::class_<cuda::Event>(module, "CudaEvent")
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
                    const auto is_kept = [&self] { return !self.is_promised(); };
                    wait_interruptibly(std::nullopt,
                                       [&](Deadline deadline) { return poll(is_kept, deadline); });
                }
                self.hold(handle_of<cuda::StreamHandle>(stream));
            },
            "stream"_a)
        .def("query", &cuda::Event::is_reached)
        .def("seconds_since", &cuda::Event::seconds_since, "earlier"_a);
    module.def("wait_cuda_events", &wait_events, "events"_a, "timeout"_a = nb::none());
    nb::class_<BoundRegistration>(module, "CudaRegistration")
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
            "context"_a, "address"_a, "nbytes"_a, "owner"_a)
        .def_prop_ro("device_address",
                     [](const BoundRegistration &self) { return self.registration->device_address(); });
    nb::class_<BoundExtents>(module, "CudaExtents")
        .def(
            "__init__",
            [](BoundExtents *self, std::vector<cuda::Address> addresses) {
                new (self) BoundExtents{std::move(addresses)};
            },
            "addresses"_a);
    nb::class_<cuda::Lane>(module, "CudaLane")
        .def(nb::new_([](ContextPtr context, std::uintptr_t main, std::uintptr_t copy, cuda::Address staging,
                         std::size_t slot_bytes, unsigned slots) {
                 if (slots == 0) throw std::invalid_argument("a ring has at least one slot");
                 return std::make_shared<cuda::Lane>(std::move(context), handle_of<cuda::StreamHandle>(main),
                                                     handle_of<cuda::StreamHandle>(copy), staging, slot_bytes,
                                                     slots);
             }),
             "context"_a, "main"_a, "copy"_a, "staging"_a, "slot_bytes"_a, "slots"_a);
}

void bind_submitter(nb::module_ &module) {
    nb::class_<cuda::Submitter>(module, "CudaSubmitter")
        .def(
            "__init__",
            [](cuda::Submitter *self, ContextPtr context, std::uintptr_t main, bool background) {
                new (self)
                    cuda::Submitter(std::move(context), handle_of<cuda::StreamHandle>(main), background);
            },
            "context"_a, "main"_a, "background"_a)
        .def("record", &cuda::Submitter::record, "event"_a)
        .def("wait", &cuda::Submitter::wait, "event"_a)
        .def(
            "enqueue",
            [](cuda::Submitter &self, const BoundSwap &batch, LanePtr lane, const Pairs &ranges) {
                if (ranges.empty()) throw std::invalid_argument("a batch has at least one range of planes");
                std::vector<PlaneRange> wanted;
                for (const auto &[first, last] : ranges) {
                    wanted.push_back(range_of(batch.swap->planes(), first, last));
                }
                const nb::gil_scoped_release release;
                return self.enqueue(batch.swap, std::move(lane), wanted);
            },
            "batch"_a, "lane"_a, "ranges"_a)
        .def(
            "refuse",
            [](cuda::Submitter &self, const BoundSwap &batch, std::string reason) {
                self.refuse(batch.swap, std::move(reason));
            },
            "batch"_a, "reason"_a)
        .def("close", &cuda::Submitter::close, nb::call_guard<nb::gil_scoped_release>());
}

BoundSwap make_swap(ContextPtr context, TrafficPtr traffic, const std::vector<std::uintptr_t> &kernels,
                    const SwapPolicy &policy, bool to_host, const nb::object &planes, cuda::Address chunks,
                    std::vector<unsigned> first_chunk, const nb::object &records, const BoundExtents &extents,
                    const InputArray<std::int32_t> &device_slots, const InputArray<std::int32_t> &host_slots,
                    const InputArray<std::uint32_t> &generations, const HashArray &hashes,
                    const HashArray &parents, const nb::bytes &fingerprint, bool verify) {
    const auto &table = nb::cast<BoundRecords &>(records).table;
    const auto &bound = nb::cast<BoundPlanes &>(planes).planes;
    if (kernels.size() != 4) throw std::invalid_argument("kernels are copy_in, copy_out, sum, copy_words");
    if (first_chunk.size() != bound.size() + 1) throw std::invalid_argument("first_chunk and planes differ");
    if (extents.addresses.size() < table.extents.size())
        throw std::invalid_argument("extents are not all registered");
    const auto function = [&](std::size_t i) { return handle_of<cuda::FunctionHandle>(kernels[i]); };
    const cuda::Kernels functions{function(0), function(1), function(2), function(3)};
    auto swap = std::make_shared<cuda::Swap>(
        std::move(context), std::move(traffic), functions, policy,
        to_host ? Direction::kToHost : Direction::kToDevice, bound, chunks, std::move(first_chunk), table,
        extents.addresses, make_pairs(table, device_slots, host_slots, generations, hashes, parents),
        fingerprint_of(fingerprint), verify);
    return {std::move(swap), nb::make_tuple(planes, records)};
}

void bind_batch(nb::module_ &module) {
    nb::class_<cuda::Traffic>(module, "CudaTraffic").def(nb::new_([] {
        return std::make_shared<cuda::Traffic>();
    }));
    nb::class_<BoundSwap>(module, "CudaSwap")
        .def(
            "__init__",
            [](BoundSwap *self, ContextPtr context, TrafficPtr traffic,
               const std::vector<std::uintptr_t> &kernels, const SwapPolicy &policy, bool to_host,
               const nb::object &planes, cuda::Address chunks, std::vector<unsigned> first_chunk,
               const nb::object &records, const BoundExtents &extents,
               const InputArray<std::int32_t> &device_slots, const InputArray<std::int32_t> &host_slots,
               const InputArray<std::uint32_t> &generations, const HashArray &hashes,
               const HashArray &parents, const nb::bytes &fingerprint, bool verify) {
                new (self) BoundSwap(make_swap(std::move(context), std::move(traffic), kernels, policy,
                                               to_host, planes, chunks, std::move(first_chunk), records,
                                               extents, device_slots, host_slots, generations, hashes,
                                               parents, fingerprint, verify));
            },
            "context"_a, "traffic"_a, "kernels"_a, "policy"_a, "to_host"_a, "planes"_a, "chunks"_a,
            "first_chunk"_a, "records"_a, "extents"_a, "device_slots"_a, "host_slots"_a, "generations"_a,
            "hashes"_a, "parents"_a, "fingerprint"_a, "verify"_a)
        .def_prop_ro("table_bytes", [](const BoundSwap &self) { return self.swap->table_bytes(); })
        .def(
            "set_table",
            [](BoundSwap &self, std::uintptr_t host, cuda::Address device) {
                self.swap->set_table(pointer(host), device);
            },
            "host"_a, "device"_a)
        .def("finish", [](BoundSwap &self) { self.swap->finish(); })
        .def_prop_ro("started", [](const BoundSwap &self) { return self.swap->started(); })
        .def_prop_ro("done", [](const BoundSwap &self) { return self.swap->done(); })
        .def_prop_ro("copied_bytes", [](const BoundSwap &self) { return self.swap->copied_bytes(); })
        .def_prop_ro("seconds", [](const BoundSwap &self) { return self.swap->seconds(); })
        .def_prop_ro("error", [](const BoundSwap &self) { return self.swap->error(); })
        .def("faults",
             [](const BoundSwap &self) {
                 const auto &faults = self.swap->faults();
                 return nb::bytes(reinterpret_cast<const char *>(faults.data()), faults.size());
             })
        .def("checksums", [](const BoundSwap &self) {
            const auto &sums = self.swap->checksums();
            return nb::bytes(reinterpret_cast<const char *>(sums.data()), 8 * sums.size());
        });
}

}  // namespace

void bind_swap(nb::module_ &module) {
    bind_context(module);
    bind_batch(module);
    bind_submitter(module);
}

}  // namespace fdcache
