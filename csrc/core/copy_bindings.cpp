#include "core/copy_bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

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
#include "core/bound_memory.hpp"
#include "core/copy_stream.hpp"
#include "core/event.hpp"

namespace fdcache {
namespace {

using namespace nb::literals;

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
        if (held_.empty() || held_.back().first != bound.copy) {
            retire();
            held_.emplace_back(bound.copy, object);
        }
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

BoundCopy make_copy(bool to_host, const nb::object &planes, const nb::object &records,
                    const InputArray<std::int32_t> &device_slots, const InputArray<std::int32_t> &host_slots,
                    const InputArray<std::uint32_t> &generations, const HashArray &hashes,
                    const HashArray &parents, const nb::bytes &fingerprint, bool verify) {
    const auto &table = nb::cast<BoundRecords &>(records).table;
    auto copy = std::make_shared<BlockCopy>(
        to_host ? Direction::kToHost : Direction::kToDevice, nb::cast<BoundPlanes &>(planes).planes, table,
        make_pairs(table, device_slots, host_slots, generations, hashes, parents),
        fingerprint_of(fingerprint), verify);
    return {std::move(copy), planes, records};
}

}  // namespace

void bind_copy(nb::module_ &module) {
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
               const nb::bytes &fingerprint, bool verify) {
                new (self) BoundCopy(make_copy(to_host, planes, records, device_slots, host_slots,
                                               generations, hashes, parents, fingerprint, verify));
            },
            "to_host"_a, "planes"_a, "records"_a, "device_slots"_a, "host_slots"_a, "generations"_a,
            "hashes"_a, "parents"_a, "fingerprint"_a, "verify"_a = false)
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

}  // namespace fdcache
