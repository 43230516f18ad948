// Plans of loads and backups onto the streams of a GPU in one call from Python, and their reports in another.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "copy/copy_window.hpp"
#include "copy/slots.hpp"
#include "cuda/bound.hpp"

namespace fdcache {
namespace {

// Buffers of block tables that no batch uses. `take` makes more.
class TablePool {
  public:
    struct Table {
        std::uint8_t *host;
        cuda::Address device;
        std::size_t nbytes;
        nb::object owner;
    };

    explicit TablePool(nb::object take) : take_(std::move(take)) {}

    Table take(std::size_t nbytes) {
        for (auto table = idle_.rbegin(); table != idle_.rend(); ++table) {
            if (table->nbytes < nbytes) continue;
            std::swap(*table, idle_.back());
            Table found = std::move(idle_.back());
            idle_.pop_back();
            return found;
        }
        nb::object made = take_(nbytes);
        return {pointer(nb::cast<std::uintptr_t>(made.attr("host"))),
                nb::cast<cuda::Address>(made.attr("device")), nb::cast<std::size_t>(made.attr("nbytes")),
                made};
    }

    void give(Table table) { idle_.push_back(std::move(table)); }

  private:
    const nb::object take_;
    std::vector<Table> idle_;
};

// What the records of Python are made of.
struct RecordTypes {
    nb::object report, result, status;
    nb::object make_result;  // of a batch with failures
    nb::object no_positions;
};

struct Transfer {
    nb::object metadata;
    bool reads_device;
    nb::object batch;  // holds the swap, and the arrays that it refers to
    std::shared_ptr<cuda::Swap> swap;
    TablePool::Table table;
};

// Numbers of planes that share an event, and the group of each layer, for one size of a load.
struct LayerRanges {
    std::vector<PlaneRange> planes;
    std::vector<std::size_t> group_of_layer;
};

// A plan in flight. Its report is made once, at the end, and releases its transfers.
class LaunchedPlan {
  public:
    LaunchedPlan(nb::object id, int rank, std::size_t num_layers, std::shared_ptr<const RecordTypes> types,
                 std::shared_ptr<TablePool> tables)
        : id_(std::move(id)),
          rank_(rank),
          num_layers_(num_layers),
          types_(std::move(types)),
          tables_(std::move(tables)) {}

    const nb::object &id() const { return id_; }
    void add(Transfer transfer) { transfers_.push_back(std::move(transfer)); }
    void set_layers(std::vector<EventPtr> events, std::shared_ptr<const LayerRanges> ranges) {
        events_ = std::move(events);
        ranges_ = std::move(ranges);
    }

    EventPtr pending_event() const {
        for (const Transfer &each : transfers_) {
            if (!each.swap->done()->is_reached()) return each.swap->done();
        }
        return nullptr;
    }

    // The event after which no copy reads the device; none if no copy does any more.
    EventPtr pending_read() const {
        for (const Transfer &each : transfers_) {
            if (each.reads_device && !each.swap->done()->is_reached()) return each.swap->done();
        }
        return nullptr;
    }

    bool is_certain() const {
        const auto is_load = [](const Transfer &each) { return !each.reads_device; };
        return std::ranges::any_of(transfers_, is_load) &&
               std::ranges::all_of(transfers_, [&](const Transfer &each) {
                   return !is_load(each) || each.swap->is_certain();
               });
    }

    bool wait(std::optional<double> timeout) const {
        using Seconds = std::chrono::duration<double>;
        const auto start = std::chrono::steady_clock::now();
        while (const EventPtr event = pending_event()) {
            const double spent = Seconds(std::chrono::steady_clock::now() - start).count();
            if (!wait_events({event}, timeout ? std::optional(std::max(*timeout - spent, 0.0)) : timeout))
                return false;
        }
        return true;
    }

    nb::object report() {
        if (report_.is_valid()) return report_;
        nb::list results;
        for (const Transfer &each : std::vector<Transfer>(transfers_)) results.append(result_of(each));
        if (report_.is_valid()) return report_;  // made by another thread meanwhile
        report_ = types_->report("plan_id"_a = id_, "rank"_a = rank_, "results"_a = nb::tuple(results));
        for (Transfer &each : std::exchange(transfers_, {})) tables_->give(std::move(each.table));
        return report_;
    }

    nb::object status() {
        if (pending_event()) {
            return types_->status.attr(is_started() ? "IN_PROGRESS" : "PENDING");
        }
        for (nb::handle result : nb::tuple(report().attr("results"))) {
            if (!nb::cast<bool>(result.attr("success"))) return types_->status.attr("FAILED");
        }
        return types_->status.attr("COMPLETED");
    }

    bool is_started() const {
        return std::ranges::any_of(transfers_, [](const Transfer &each) { return each.swap->started(); });
    }

    // The event of each layer, None for one without copies.
    nb::list layers() {
        if (!layers_.is_valid()) {
            nb::list layers;
            for (std::size_t layer = 0; layer < num_layers_; ++layer) {
                layers.append(ranges_ ? nb::cast(events_[ranges_->group_of_layer[layer]]) : nb::none());
            }
            layers_ = layers;
        }
        return nb::borrow<nb::list>(layers_);
    }

  private:
    nb::object result_of(const Transfer &transfer) const {
        cuda::Swap &swap = *transfer.swap;
        swap.finish();
        const auto &faults = swap.faults();
        if (!std::ranges::all_of(faults, [](BlockFault fault) { return fault == BlockFault::kNone; })) {
            const nb::object outcome =
                nb::make_tuple(faults_to_bytes(faults), sums_to_bytes(swap.checksums()), swap.copied_bytes(),
                               swap.seconds(), swap.error());
            return types_->make_result(transfer.metadata, outcome);
        }
        const nb::object &none = types_->no_positions;
        return types_->result("purpose"_a = transfer.metadata.attr("purpose"), "failed"_a = none,
                              "checksums"_a = to_numpy<std::uint64_t>(std::vector(swap.checksums())),
                              "copied_bytes"_a = swap.copied_bytes(), "seconds"_a = swap.seconds(),
                              "error_message"_a = nb::none(), "lost"_a = none, "corrupt"_a = none,
                              "bad_slots"_a = none, "no_room"_a = none);
    }

    const nb::object id_;
    const int rank_;
    const std::size_t num_layers_;
    const std::shared_ptr<const RecordTypes> types_;
    const std::shared_ptr<TablePool> tables_;
    std::vector<Transfer> transfers_;
    std::vector<EventPtr> events_;  // of the load's groups
    std::shared_ptr<const LayerRanges> ranges_;
    nb::object layers_;
    nb::object report_;
};

// One stream with the thread that submits to it.
struct Way {
    nb::object stream;
    nb::object submitter;
    LanePtr lane;

    explicit Way(nb::object of) : stream(std::move(of)), submitter(stream.attr("submitter")) {}

    // The first use allocates the ring.
    const LanePtr &ready_lane() {
        if (!lane) lane = nb::cast<LanePtr>(stream.attr("lane")());
        return lane;
    }

    BoundSubmitter &bound() const { return nb::cast<BoundSubmitter &>(submitter); }

    // Enqueues a batch; a failure ends this batch alone. Returns the event of each range.
    std::vector<EventPtr> enqueue(const Transfer &transfer, std::span<const PlaneRange> ranges,
                                  const EventPtr &after) const {
        BoundSubmitter &own = bound();
        own.hold(transfer.swap, nb::make_tuple(transfer.batch, transfer.table.owner));
        const nb::gil_scoped_release release;
        try {
            return own.submitter.enqueue(transfer.swap, lane, ranges, {after});
        } catch (const std::exception &error) {
            own.submitter.refuse(transfer.swap, error.what());
            return std::vector<EventPtr>(ranges.size(), transfer.swap->done());
        }
    }
};

// Submits the plans of one controller between these planes and this arena; `arena` names the one of a service
// that the slots of plans refer to, none: its own.
class PlanLauncher {
  public:
    PlanLauncher(nb::object copier, nb::object planes, nb::object records, nb::object extents,
                 nb::bytes fingerprint, bool verify, nb::object loads, nb::object backups, nb::object window,
                 nb::object ranges_of, nb::object as_stream, nb::object stream_type, nb::object take_table,
                 nb::object record_types, nb::object purposes, nb::object arena, std::string name, int rank,
                 std::size_t num_layers)
        : copier_(std::move(copier)),
          planes_(std::move(planes)),
          records_(std::move(records)),
          extents_(std::move(extents)),
          fingerprint_(std::move(fingerprint)),
          verify_(verify),
          loads_(std::move(loads)),
          backups_(std::move(backups)),
          window_(std::move(window)),
          ranges_of_(std::move(ranges_of)),
          as_stream_(std::move(as_stream)),
          stream_type_(std::move(stream_type)),
          tables_(std::make_shared<TablePool>(std::move(take_table))),
          types_(std::make_shared<const RecordTypes>(RecordTypes{
              record_types[0], record_types[1], record_types[2], record_types[3], record_types[4]})),
          load_(purposes[0]),
          backup_(purposes[1]),
          host_(load_.attr("source")),
          device_level_(load_.attr("target")),
          arena_(std::move(arena)),
          name_(std::move(name)),
          rank_(rank),
          num_layers_(num_layers) {
        all_planes_ = {0, nb::cast<const BoundSwapPlanes &>(planes_).planes->planes->size()};
    }

    // The plan, which is in `in_flight` then; the driver's error as text; or none if the plan needs more than
    // this. Neither of the latter has enqueued anything.
    nb::object submit(nb::handle plan, nb::handle stream, nb::dict in_flight) {
        const auto &device = *nb::cast<const BoundDevice &>(copier_).device;
        if (device.context->lost() || !is_plain(plan)) return nb::none();
        const nb::object id = plan.attr("plan_id");
        const nb::object loads = plan.attr("loads"), backups = plan.attr("backups");
        if (in_flight.contains(id) || (loads.is_none() && backups.is_none())) return nb::none();
        if (!loads.is_none() && !nb::cast<CopyWindow &>(window_).has_room()) return nb::none();
        try {
            const auto compute = handle_for(stream);
            if (!compute) return nb::none();
            const auto computed = std::make_shared<cuda::Event>(device.context, false);
            if (computed->is_capturing(*compute)) return nb::none();
            if (const auto refusal = computed->record(*compute)) throw *refusal;
            return enqueue(id, loads, backups, computed, in_flight);
        } catch (const cuda::Error &error) {
            return nb::str((name_ + ": " + error.what()).c_str());
        } catch (nb::python_error &) {
            return nb::none();  // the other way of submitting meets it again, and says to whom it belongs
        }
    }

    void retire() {
        loads_.bound().retire();
        backups_.bound().retire();
        nb::cast<CopyWindow &>(window_).drop_ended();
    }

  private:
    bool is_plain(nb::handle plan) const {
        const auto is_empty = [plan](const char *name) { return nb::len(nb::object(plan.attr(name))) == 0; };
        // Plans whose earlier readers are named need waits that this way does not have.
        const nb::object after = nb::getattr(plan, "after", nb::none());
        if (!after.is_none() && nb::len(after) != 0) return false;
        return plan.attr("evictions").is_none() && arena_.equal(plan.attr("arena")) && is_empty("storage") &&
               is_empty("peers") && is_empty("cancelled") && !nb::cast<bool>(plan.attr("clear_storage"));
    }

    std::optional<cuda::StreamHandle> handle_for(nb::handle stream) {
        if (stream.is_none()) return std::nullopt;
        if (!last_stream_.is(stream)) {
            const nb::object found = as_stream_(stream);
            if (!nb::isinstance(found, stream_type_)) return std::nullopt;
            last_handle_ = handle_of<cuda::StreamHandle>(nb::cast<std::uintptr_t>(found.attr("handle")));
            last_stream_ = nb::borrow(stream);
        }
        return last_handle_;
    }

    // None if the transfer is not sound, or has another purpose than its field.
    std::optional<Transfer> prepare(const nb::object &metadata, nb::handle purpose) {
        const bool out = purpose.is(backup_);
        const nb::object &source = out ? device_level_ : host_, &target = out ? host_ : device_level_;
        if (!metadata.attr("purpose").is(purpose) || !metadata.attr("src_type").is(source) ||
            !metadata.attr("dst_type").is(target)) {
            return std::nullopt;
        }
        auto bound = make_swap(nb::cast<const BoundDevice &>(copier_), metadata, out, planes_,
                               nb::borrow<RecordsRef>(records_), nb::cast<const BoundExtents &>(extents_),
                               fingerprint_, verify_);
        if (!bound || bound->arrays.size() == 0) return std::nullopt;
        auto swap = bound->swap;
        auto table = tables_->take(swap->table_bytes());
        swap->set_table(table.host, table.device);
        return Transfer{metadata, out, nb::cast(std::move(*bound)), std::move(swap), std::move(table)};
    }

    nb::object enqueue(const nb::object &id, const nb::object &loads, const nb::object &backups,
                       const EventPtr &computed, nb::dict &in_flight) {
        std::optional<Transfer> load, backup;
        std::shared_ptr<const LayerRanges> ranges;
        if (!loads.is_none()) {
            if (!(load = prepare(loads, load_))) return nb::none();
            ranges = ranges_for(load->swap->size());
            loads_.ready_lane();
        }
        if (!backups.is_none()) {
            if (!(backup = prepare(backups, backup_)) || (load && !are_apart(*load, *backup)))
                return abandoned(load, backup);
            backups_.ready_lane();
        }
        auto launched = std::make_shared<LaunchedPlan>(id, rank_, num_layers_, types_, tables_);
        nb::object shown = nb::cast(launched);
        in_flight[id] = shown;
        // Nothing is raised from here on: copies may be in flight.
        if (load) {
            auto events = loads_.enqueue(*load, ranges->planes, computed);
            launched->set_layers(std::move(events), std::move(ranges));
            nb::cast<CopyWindow &>(window_).add(load->swap->total_bytes(), nb::cast(load->swap->done()));
            launched->add(std::move(*load));
        }
        if (backup) {
            backups_.enqueue(*backup, {&all_planes_, 1}, computed);
            launched->add(std::move(*backup));
        }
        return shown;
    }

    nb::object abandoned(std::optional<Transfer> &load, std::optional<Transfer> &backup) {
        for (auto *each : {&load, &backup}) {
            if (*each) tables_->give(std::move((*each)->table));
        }
        return nb::none();
    }

    static bool are_apart(const Transfer &load, const Transfer &backup) {
        return are_disjoint_slots(span_of(nb::cast<const BoundSwap &>(backup.batch).arrays.sources),
                                  span_of(nb::cast<const BoundSwap &>(load.batch).arrays.targets));
    }

    const std::shared_ptr<const LayerRanges> &ranges_for(std::size_t num_blocks) {
        auto &found = ranges_[num_blocks];
        if (!found) {
            const nb::object made = ranges_of_(num_blocks);
            auto ranges = std::make_shared<LayerRanges>();
            for (nb::handle each : made.attr("planes")) {
                ranges->planes.push_back(range_of(all_planes_.last, nb::cast<std::size_t>(each[0]),
                                                  nb::cast<std::size_t>(each[1])));
            }
            for (nb::handle each : made.attr("group_of_layer")) {
                ranges->group_of_layer.push_back(nb::cast<std::size_t>(each));
            }
            found = std::move(ranges);
        }
        return found;
    }

    const nb::object copier_, planes_, records_, extents_;
    const nb::bytes fingerprint_;
    const bool verify_;
    Way loads_, backups_;
    const nb::object window_, ranges_of_, as_stream_, stream_type_;
    const std::shared_ptr<TablePool> tables_;
    const std::shared_ptr<const RecordTypes> types_;
    const nb::object load_, backup_, host_, device_level_, arena_;
    const std::string name_;
    const int rank_;
    const std::size_t num_layers_;
    PlaneRange all_planes_{0, 0};
    std::unordered_map<std::size_t, std::shared_ptr<const LayerRanges>> ranges_;
    nb::object last_stream_ = nb::none();
    cuda::StreamHandle last_handle_ = nullptr;
};

// Removes the plans that have ended from a dictionary in order of submission, and returns their reports.
nb::list take_ended(nb::dict executions) {
    nb::list reports;
    std::vector<nb::object> ended;
    for (auto [id, execution] : nb::dict(executions)) {
        if (nb::isinstance<LaunchedPlan>(execution)) {
            auto &plan = nb::cast<LaunchedPlan &>(execution);
            if (plan.pending_event()) continue;
            reports.append(plan.report());
        } else {
            if (!execution.attr("pending_event")().is_none()) continue;
            reports.append(execution.attr("result")());
        }
        ended.push_back(nb::borrow(id));
    }
    for (const nb::object &id : ended) nb::del(executions[id]);
    return reports;
}

}  // namespace

void bind_launches(nb::module_ &module) {
    nb::class_<LaunchedPlan>(module, "LaunchedPlan",
                             "A plan in flight on a GPU, and the events of its layers.")
        .def_prop_ro("plan_id", &LaunchedPlan::id, nb::for_getter(nb::sig("def plan_id(self) -> int")))
        .def("pending_event", &LaunchedPlan::pending_event,
             "Return an event that comes before the end of the plan, or None if it has ended.")
        .def("pending_read", &LaunchedPlan::pending_read,
             "Return the event after which the plan reads the device no more, or None if it does not now.")
        .def_prop_ro("is_certain", &LaunchedPlan::is_certain,
                     "True once the load can only fail with the device.")
        .def("wait", &LaunchedPlan::wait, "timeout"_a.none(),
             "Wait up to ``timeout`` seconds, None without limit; return True if the plan has ended.")
        .def(
            "cancel", [](const LaunchedPlan &) { return false; },
            "Return False: work that is enqueued on a GPU cannot be cancelled.")
        .def("status", &LaunchedPlan::status, nb::sig("def status(self) -> typing.Any"),
             "Return the status of the plan.")
        .def("result", &LaunchedPlan::report, nb::sig("def result(self) -> typing.Any"),
             "Return the report of a plan that has ended.")
        .def("known", &LaunchedPlan::layers, nb::sig("def known(self) -> list[typing.Any]"),
             "Return the event of each layer.")
        .def("required", &LaunchedPlan::layers, nb::sig("def required(self) -> list[typing.Any]"),
             "Return the event of each layer.");
    nb::class_<PlanLauncher>(module, "PlanLauncher",
                             "Submits plans of loads and backups between the planes of a GPU and an arena.")
        .def(nb::init<nb::object, nb::object, nb::object, nb::object, nb::bytes, bool, nb::object, nb::object,
                      nb::object, nb::object, nb::object, nb::object, nb::object, nb::object, nb::object,
                      nb::object, std::string, int, std::size_t>(),
             nb::kw_only(), "copier"_a, "planes"_a, "records"_a, "extents"_a, "fingerprint"_a, "verify"_a,
             "loads"_a, "backups"_a, "window"_a, "ranges_of"_a, "as_stream"_a, "stream_type"_a,
             "take_table"_a, "record_types"_a, "purposes"_a, "arena"_a.none(), "name"_a, "rank"_a,
             "num_layers"_a)
        .def("submit", &PlanLauncher::submit, "plan"_a, "stream"_a.none(), "in_flight"_a,
             nb::sig("def submit(self, plan: object, stream: object | None, in_flight: dict[int, "
                     "typing.Any]) -> typing.Any"),
             "Enqueue the copies of a plan after the work that the stream has now, and add it to "
             "``in_flight``.\n"
             "\n"
             "Return None for a plan that needs another way of submitting, or has a mistake, and the "
             "driver's error\n"
             "as a text; nothing is enqueued then.")
        .def("retire", &PlanLauncher::retire, "Release the memory of copies that have ended.");
    module.def(
        "take_ended", &take_ended, "executions"_a,
        nb::sig("def take_ended(executions: dict[int, typing.Any]) -> list[typing.Any]"),
        "Remove the plans that have ended from a dictionary by id, and return their reports in its order.");
}

}  // namespace fdcache
