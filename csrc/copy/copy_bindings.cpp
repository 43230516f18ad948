#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "copy/block_copy.hpp"
#include "copy/bound_memory.hpp"
#include "copy/copy_stream.hpp"
#include "copy/event.hpp"

namespace fdcache {
namespace {

// Not nanobind's own shared pointers: those take the GIL when a copy thread drops the last reference.
struct BoundEvent {
    std::shared_ptr<Event> event = std::make_shared<Event>();
};

struct BoundCopy {
    std::shared_ptr<BlockCopy> copy;
    PlanesRef planes;
    RecordsRef records;
};

// Keeps a reference to the memory of each copy until the copy is done, even if Python drops its own.
class BoundStream {
  public:
    BoundStream(unsigned threads, bool background)
        : stream_(std::make_unique<CopyStream>(threads, background)) {}
    ~BoundStream() { close(); }

    void copy(const nb::typed<nb::object, BoundCopy> &object, std::size_t first, std::size_t last) {
        auto &bound = nb::cast<BoundCopy &>(object);
        const PlaneRange range = range_of(bound.copy->num_planes(), first, last);
        if (held_.empty() || held_.back().first != bound.copy) {
            retire();
            held_.emplace_back(bound.copy, object);
        }
        stream_->copy(bound.copy, range);
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

BoundCopy make_copy(bool to_host, PlanesRef planes, RecordsRef records,
                    const VectorIn<std::int32_t> &device_slots, const VectorIn<std::int32_t> &host_slots,
                    const VectorIn<std::uint32_t> &generations, const HashesIn &hashes,
                    const HashesIn &parents, const nb::bytes &fingerprint,
                    const std::optional<VectorIn<std::uint8_t>> &verify) {
    const RecordTable &table = records_of(records);
    auto pairs = make_pairs(table, device_slots, host_slots, generations, hashes, parents);
    if (verify && verify->shape(0) != pairs.size())
        throw std::invalid_argument("the arrays of a copy differ in length");
    for (std::size_t i = 0; verify && i < pairs.size(); ++i) pairs[i].verify = verify->data()[i];
    auto copy = std::make_shared<BlockCopy>(direction_of(to_host), planes_of(planes), table, std::move(pairs),
                                            fingerprint_of(fingerprint));
    return {std::move(copy), std::move(planes), std::move(records)};
}

void bind_event(nb::module_ &module) {
    nb::class_<BoundEvent>(module, "Event", "A one-shot event between copy streams and the host.")
        .def(nb::init<>())
        .def(
            "set", [](BoundEvent &self) { self.event->set(); }, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "query", [](const BoundEvent &self) { return self.event->is_set(); },
            "Return True if the event is set.")
        .def(
            "wait",
            [](BoundEvent &self, std::optional<double> timeout) {
                const auto wait_until = [&](Deadline deadline) { return self.event->wait_until(deadline); };
                return wait_interruptibly(timeout, wait_until);
            },
            "timeout"_a = nb::none(), "Wait until the event is set; return False after ``timeout`` seconds.");
    module.def(
        "wait_any",
        [](const nb::typed<nb::sequence, BoundEvent> &sequence, std::optional<double> timeout) {
            std::vector<std::shared_ptr<Event>> events;
            for (nb::handle each : sequence) events.push_back(nb::cast<BoundEvent &>(each).event);
            const auto wait_until = [&](Deadline deadline) { return Event::wait_any(events, deadline); };
            return wait_interruptibly(timeout, wait_until);
        },
        "events"_a, "timeout"_a = nb::none(),
        "Wait until one of the events is set; return False after ``timeout`` seconds.");
}

void bind_batch(nb::module_ &module) {
    nb::class_<BoundCopy>(
        module, "BlockCopy",
        "A batch of block copies in one direction. Read ``faults()`` and ``checksums()`` once\n"
        "``done`` is set.")
        .def(
            "__init__",
            [](BoundCopy *self, bool to_host, PlanesRef planes, RecordsRef records,
               const VectorIn<std::int32_t> &device_slots, const VectorIn<std::int32_t> &host_slots,
               const VectorIn<std::uint32_t> &generations, const HashesIn &hashes, const HashesIn &parents,
               const nb::bytes &fingerprint, const std::optional<VectorIn<std::uint8_t>> &verify) {
                new (self)
                    BoundCopy(make_copy(to_host, std::move(planes), std::move(records), device_slots,
                                        host_slots, generations, hashes, parents, fingerprint, verify));
            },
            "to_host"_a, "planes"_a, "records"_a, "device_slots"_a, "host_slots"_a, "generations"_a,
            "hashes"_a, "parents"_a, "fingerprint"_a, "verify"_a = nb::none(),
            "``verify``: 1 for each block whose load fails unless its bytes have the record's checksum.")
        .def(
            "cancel", [](BoundCopy &self) { return self.copy->cancel(); },
            nb::call_guard<nb::gil_scoped_release>(),
            "Cancel the batch unless it has started. Return True if it will never touch memory.")
        .def_prop_ro("done", [](const BoundCopy &self) { return BoundEvent{self.copy->done()}; })
        .def_prop_ro("started", [](const BoundCopy &self) { return self.copy->started(); })
        .def_prop_ro("copied_bytes", [](const BoundCopy &self) { return self.copy->copied_bytes(); })
        .def_prop_ro("seconds", [](const BoundCopy &self) { return self.copy->seconds(); })
        .def(
            "faults",
            [](const BoundCopy &self) {
                std::vector<BlockFault> faults(self.copy->num_blocks());
                for (std::size_t i = 0; i < faults.size(); ++i) faults[i] = self.copy->fault(i);
                return vector_to_bytes(faults);
            },
            "A byte per block: 0 if it was copied, else the reason (BlockFault in csrc/copy/record.hpp).")
        .def(
            "checksums", [](const BoundCopy &self) { return vector_to_bytes(self.copy->checksums()); },
            "A 64-bit checksum per block of a copy to the host; empty for loads.");
}

}  // namespace

void bind_copies(nb::module_ &module) {
    bind_event(module);
    bind_batch(module);
    nb::class_<BoundStream>(module, "CopyStream",
                            "A stream of the CPU device: runs operations in order on its own threads.")
        .def(nb::init<unsigned, bool>(), "threads"_a, "background"_a = false)
        .def("copy", &BoundStream::copy, "copy"_a, "first_plane"_a, "last_plane"_a,
             "Enqueue planes [first_plane, last_plane) of a batch. Ranges of a batch come in order.")
        .def(
            "record", [](BoundStream &self, const BoundEvent &event) { self.stream().record(event.event); },
            "event"_a, "Set the event once all earlier operations are done.")
        .def(
            "wait", [](BoundStream &self, const BoundEvent &event) { self.stream().wait(event.event); },
            "event"_a, "Make later operations wait until the event is set.")
        .def("retire", &BoundStream::retire, "Drop the references to copies that are done.")
        .def("close", &BoundStream::close,
             "Stop after the blocks in flight, abandon queued copies and set queued events.");
}

}  // namespace fdcache
