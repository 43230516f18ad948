#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "copy/block_copy.hpp"
#include "copy/bound_memory.hpp"
#include "copy/copy_stream.hpp"
#include "copy/copy_window.hpp"
#include "copy/event.hpp"
#include "copy/transfer_array_bindings.hpp"

namespace fdcache {
namespace {

// Not nanobind's own shared pointers: those take the GIL when a copy thread drops the last reference.
struct BoundEvent {
    std::shared_ptr<Event> event = std::make_shared<Event>();
};

// A copy, and the memory and arrays that it refers to.
struct BoundCopy {
    std::shared_ptr<BlockCopy> copy;
    TransferArrays arrays;
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
        hold(bound.copy, object);
        stream_->copy(bound.copy, range);
    }

    std::vector<BoundEvent> copy_groups(const nb::typed<nb::object, BoundCopy> &object,
                                        const std::vector<std::pair<std::size_t, std::size_t>> &groups) {
        const auto &bound = nb::cast<const BoundCopy &>(object);
        std::vector<PlaneRange> ranges;
        for (const auto &[first, last] : groups) {
            ranges.push_back(range_of(bound.copy->num_planes(), first, last));
        }
        hold(bound.copy, object);
        std::vector<BoundEvent> events;
        for (auto &event : stream_->copy_groups(bound.copy, ranges)) events.push_back({std::move(event)});
        return events;
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
    void hold(const std::shared_ptr<BlockCopy> &copy, const nb::object &object) {
        if (!held_.empty() && held_.back().first == copy) return;
        retire();
        held_.emplace_back(copy, object);
    }

    std::unique_ptr<CopyStream> stream_;
    std::vector<std::pair<std::shared_ptr<BlockCopy>, nb::object>> held_;
};

std::optional<BoundCopy> make_copy(nb::handle swap, bool to_host, PlanesRef planes,
                                   std::int32_t device_blocks, RecordsRef records,
                                   const nb::bytes &fingerprint, bool verify) {
    auto arrays = arrays_of(swap);
    if (!arrays) return std::nullopt;
    const auto &table = records_of(records);
    auto blocks = blocks_of(*arrays, direction_of(to_host), device_blocks, table->num_slots);
    if (!blocks) return std::nullopt;
    blocks->verify_all = verify;
    auto copy = std::make_shared<BlockCopy>(direction_of(to_host), planes_of(planes), table,
                                            std::move(*blocks), fingerprint_of(fingerprint));
    return BoundCopy{std::move(copy), std::move(*arrays), std::move(planes), std::move(records)};
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
    nb::class_<BoundCopy>(module, "BlockCopy", "A batch of block copies in one direction.")
        .def(
            "cancel", [](BoundCopy &self) { return self.copy->cancel(); },
            nb::call_guard<nb::gil_scoped_release>(),
            "Cancel the batch unless it has started. Return True if it will never touch memory.")
        .def_prop_ro("done", [](const BoundCopy &self) { return BoundEvent{self.copy->done()}; })
        .def_prop_ro("started", [](const BoundCopy &self) { return self.copy->started(); })
        .def(
            "finish",
            [](const BoundCopy &self) {
                const BlockCopy &copy = *self.copy;
                return nb::make_tuple(faults_to_bytes(copy.faults()), sums_to_bytes(copy.checksums()),
                                      copy.copied_bytes(), copy.seconds(), "");
            },
            nb::sig("def finish(self) -> tuple[bytes, bytes, int, float, str]"), kOutcomeDoc);
    module.def("copy_blocks", &make_copy, "swap"_a, "to_host"_a, "planes"_a, "device_blocks"_a, "records"_a,
               "fingerprint"_a, "verify"_a,
               "Prepare the copies of a transfer; return None unless it is sound (``is_sound_transfer``).\n"
               "``verify``: loads fail unless their bytes have the record's checksum.");
}

}  // namespace

void bind_copies(nb::module_ &module) {
    bind_event(module);
    bind_batch(module);
    nb::class_<CopyWindow>(
        module, "CopyWindow",
        "The batches of one stream that have not ended. At most ``most`` bytes, or one batch, "
        "are\nenqueued behind the batch being copied.")
        .def(nb::init<std::size_t>(), "most"_a)
        .def("add", &CopyWindow::add, "nbytes"_a, "done"_a, "Add a batch; ``done`` is the event of its end.")
        .def("has_room", &CopyWindow::has_room, "Return True if another batch may be enqueued.")
        .def("drop_ended", &CopyWindow::drop_ended, "Forget the batches that have ended.")
        .def("next_end", &CopyWindow::next_end, nb::sig("def next_end(self) -> typing.Any"),
             "Return the end of the oldest batch.");
    nb::class_<BoundStream>(module, "CopyStream",
                            "A stream of the CPU device: runs operations in order on its own threads.")
        .def(nb::init<unsigned, bool>(), "threads"_a, "background"_a = false)
        .def("copy", &BoundStream::copy, "copy"_a, "first_plane"_a, "last_plane"_a,
             "Enqueue planes [first_plane, last_plane) of a batch. Ranges of a batch come in order.")
        .def("copy_groups", &BoundStream::copy_groups, "copy"_a, "ranges"_a,
             "Enqueue ranges of planes in order; return an event set after each.")
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
