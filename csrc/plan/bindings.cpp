#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/block_copies.hpp"
#include "plan/block_queue.hpp"
#include "python_arrays.hpp"

namespace fdcache {
namespace {

std::vector<Digest> copy_of(const HashesIn &hashes) {
    const auto given = digests_of(hashes);
    return {given.begin(), given.end()};
}

void bind_block_queue(nb::module_ &module) {
    nb::class_<BlockQueue>(module, "BlockQueue",
                           "A first-in, first-out queue of at most ``most`` block hashes.\n\n"
                           "A full queue drops what was added first, one call's blocks at a time.")
        .def(nb::init<std::size_t>(), "most"_a)
        .def("__len__", &BlockQueue::size)
        .def(
            "add", [](BlockQueue &self, const HashesIn &hashes) { return self.add(copy_of(hashes)); },
            "hashes"_a, "Append blocks; return the number of blocks dropped.")
        .def(
            "take", [](BlockQueue &self, std::size_t count) { return hashes_to_numpy(self.take(count)); },
            "count"_a, "Remove and return the first blocks, or as many as there are.")
        .def(
            "holds",
            [](const BlockQueue &self, const HashesIn &hashes) {
                return to_numpy<std::uint8_t>(self.holds(digests_of(hashes)));
            },
            "hashes"_a, "For each block 1 if it is queued, else 0; walks the whole queue.")
        .def("clear", &BlockQueue::clear, "Drop every block.");
}

// The columns of copies as read-only arrays.
nb::tuple take_columns(BlockCopies &self) {
    const BlockCopies copies = std::exchange(self, {});
    const auto column = []<typename T>(const std::vector<T> &values) {
        return copied_array<T>(std::span<const T>(values));
    };
    const auto slots = [](const std::vector<Slot> &values) {
        return copied_array<Slot, std::int32_t>(std::span<const Slot>(values));
    };
    const nb::object unverified = copies.unverified.empty() ? nb::none() : column(copies.unverified);
    return nb::make_tuple(slots(copies.sources), slots(copies.targets), column(copies.source_generations),
                          column(copies.target_generations), column(copies.hashes), column(copies.parents),
                          unverified);
}

// A transfer's class, purpose, and tiers.
using TransferForm = std::tuple<nb::object, nb::object, nb::object, nb::object>;

nb::object make_transfer(const TransferForm &form, const nb::tuple &columns) {
    static PyObject *const names = [] {
        nb::list all;
        for (const char *name :
             {"purpose", "src_type", "dst_type", "src_block_ids", "dst_block_ids", "src_generations",
              "dst_generations", "hash_values", "parent_hashes", "unverified"})
            all.append(nb::steal(PyUnicode_InternFromString(name)));
        return nb::tuple(all).release().ptr();
    }();
    const auto &[type, purpose, source, target] = form;
    std::array<PyObject *, 10> arguments{purpose.ptr(), source.ptr(), target.ptr()};
    for (std::size_t i = 0; i < nb::len(columns); ++i) arguments[3 + i] = PyTuple_GET_ITEM(columns.ptr(), i);
    nb::object transfer = nb::steal(PyObject_Vectorcall(type.ptr(), arguments.data(), 0, names));
    if (!transfer.is_valid()) nb::raise_python_error();
    return transfer;
}

// The copies of each list as a transfer, emptied; None for an empty list.
nb::list take_transfers(const std::vector<BlockCopies *> &lists, const std::vector<TransferForm> &forms) {
    require_equal(lists.size(), forms.size());
    nb::list transfers;
    for (std::size_t i = 0; i < lists.size(); ++i) {
        if (lists[i]->size())
            transfers.append(make_transfer(forms[i], take_columns(*lists[i])));
        else
            transfers.append(nb::none());
    }
    return transfers;
}

std::size_t append_copies(BlockCopies &self, nb::handle slots, nb::handle generations, nb::handle hashes,
                          nb::handle parents, nb::handle unverified, nb::handle targets,
                          nb::handle target_generations) {
    const ArrayValues<std::int32_t> from(slots), to(targets);
    const ArrayValues<std::uint32_t> from_generations(generations);
    const ArrayValues<Digest> digests(hashes), above(parents);
    std::optional<ArrayValues<std::uint8_t>> marks;
    std::optional<ArrayValues<std::uint32_t>> to_generations;
    if (!unverified.is_none()) marks.emplace(unverified);
    if (!target_generations.is_none()) to_generations.emplace(target_generations);
    const std::size_t count = from.span().size(), offset = self.size();
    for (const auto size :
         {from_generations.span().size(), digests.span().size(), above.span().size(), to.span().size(),
          marks ? marks->span().size() : count, to_generations ? to_generations->span().size() : count})
        require_equal(count, size);
    const auto slots_in = [](const ArrayValues<std::int32_t> &values) {
        return std::span(reinterpret_cast<const Slot *>(values.span().data()), values.span().size());
    };
    self.append({slots_in(from), from_generations.span(), digests.span(), above.span(),
                 marks ? marks->span() : std::span<const std::uint8_t>{}},
                slots_in(to), to_generations ? to_generations->span() : std::span<const std::uint32_t>{});
    return offset;
}

std::size_t append_run(BlockCopies &self, const HostRun &run, nb::handle path, std::size_t start,
                       nb::handle targets, nb::handle target_generations) {
    const ArrayValues<Digest> digests(path);
    const ArrayValues<std::int32_t> to(targets);
    std::optional<ArrayValues<std::uint32_t>> generations;
    if (!target_generations.is_none()) generations.emplace(target_generations);
    const std::size_t count = run.size(), offset = self.size();
    if (start > digests.span().size() || count > digests.span().size() - start)
        throw std::out_of_range("the path has no such blocks");
    require_equal(count, to.span().size());
    if (generations) require_equal(count, generations->span().size());
    const std::span<const Digest> hashes = digests.span().subspan(start, count);
    const std::span<const Digest> parents = start   ? digests.span().subspan(start - 1, count)
                                            : count ? digests.span().first(count - 1)
                                                    : hashes;
    self.append({run.slots, run.generations, hashes, parents, run.unverified},
                std::span(reinterpret_cast<const Slot *>(to.span().data()), count),
                generations ? generations->span() : std::span<const std::uint32_t>{});
    return offset;
}

// The hashes of the blocks above the first `stop` of a path: the root's, and all but the last.
nb::object parents_from_root(nb::handle path, std::size_t stop) {
    const ArrayValues<Digest> hashes(path);
    if (!stop || stop > hashes.span().size()) throw std::out_of_range("the path has no such blocks");
    nb::object memory =
        nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(stop * sizeof(Digest))));
    if (!memory.is_valid()) nb::raise_python_error();
    char *const bytes = PyBytes_AS_STRING(memory.ptr());
    std::memset(bytes, 0, sizeof(Digest));
    std::memcpy(bytes + sizeof(Digest), hashes.span().data(), (stop - 1) * sizeof(Digest));
    return array_over<Digest>(memory, stop);
}

void bind_copies_of_blocks(nb::module_ &module) {
    nb::class_<BlockCopies>(module, "BlockCopies",
                            "Copies of blocks between slots of two tiers, planned one after the other.")
        .def(nb::init<>())
        .def("__len__", &BlockCopies::size)
        .def("append", &append_copies, "slots"_a, "generations"_a, "hashes"_a, "parents"_a,
             "unverified"_a.none(), "targets"_a, "target_generations"_a.none(),
             nb::sig("def append(self, slots: numpy.typing.NDArray[numpy.int32], "
                     "generations: numpy.typing.NDArray[numpy.uint32], "
                     "hashes: numpy.typing.NDArray[numpy.uint8], parents: numpy.typing.NDArray[numpy.uint8], "
                     "unverified: numpy.typing.NDArray[numpy.uint8] | None, "
                     "targets: numpy.typing.NDArray[numpy.int32], "
                     "target_generations: numpy.typing.NDArray[numpy.uint32] | None) -> int"),
             "Add copies; return the number of copies before them. ``target_generations``: None for zeros.")
        .def("append_run", &append_run, "run"_a, "path"_a, "start"_a, "targets"_a,
             "target_generations"_a.none(),
             nb::sig("def append_run(self, run: HostRun, path: numpy.typing.NDArray[numpy.uint8], "
                     "start: int, targets: numpy.typing.NDArray[numpy.int32], "
                     "target_generations: numpy.typing.NDArray[numpy.uint32] | None) -> int"),
             "Do so with the blocks of a run, which are those of a path from block ``start`` on.")
        .def(
            "remove",
            [](BlockCopies &self, std::size_t first, std::size_t count) {
                if (first > self.size() || count > self.size() - first)
                    throw std::out_of_range("there are no such copies");
                const std::span<const Slot> sources = std::span(self.sources).subspan(first, count);
                nb::object slots = copied_array<Slot, std::int32_t>(sources);
                self.erase(first, count);
                return slots;
            },
            "first"_a, "count"_a,
            nb::sig("def remove(self, first: int, count: int) -> numpy.typing.NDArray[numpy.int32]"),
            "Remove copies; return their source slots.")
        .def("take", &take_columns,
             nb::sig("def take(self) -> tuple[numpy.typing.NDArray[numpy.int32], "
                     "numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.uint32], "
                     "numpy.typing.NDArray[numpy.uint32], numpy.typing.NDArray[numpy.uint8], "
                     "numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint8] | None]"),
             "Remove everything and return it: source slots, target slots, source generations, target\n"
             "generations, hashes, parents, and the marks of unverified blocks or None.");
    module.def("parents_from_root", &parents_from_root, "path"_a, "stop"_a,
               nb::sig("def parents_from_root(path: numpy.typing.NDArray[numpy.uint8], stop: int) -> "
                       "numpy.typing.NDArray[numpy.uint8]"),
               "Return the parent hashes of the first ``stop`` blocks of a path, at least one.");
    module.def(
        "take_transfers", &take_transfers, "lists"_a, "forms"_a,
        nb::sig("def take_transfers(lists: collections.abc.Sequence[BlockCopies], "
                "forms: collections.abc.Sequence[tuple[typing.Any, typing.Any, typing.Any, typing.Any]]) -> "
                "list[typing.Any]"),
        "Empty lists of copies. Return a transfer for each, None for an empty one. A form has the\n"
        "transfer's class, purpose, source and target.");
}

}  // namespace

void bind_plans(nb::module_ &module) {
    bind_block_queue(module);
    bind_copies_of_blocks(module);
    bind_ledger(module);
    bind_copy_out(module);
}

}  // namespace fdcache
