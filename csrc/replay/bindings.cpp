// Bindings of replay's stand-in for a model.
#include "bindings.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <span>
#include <vector>

#include "replay/pattern.hpp"

namespace fdcache {
namespace {

using SegmentRows = nb::ndarray<const std::int32_t, nb::shape<6, -1>, nb::c_contig, nb::device::cpu>;
using ByteMatrix = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::device::cpu>;

std::vector<PatternPlane> pattern_planes(const std::vector<ByteMatrix> &tensors,
                                         const VectorIn<std::int32_t> &layers, std::uint64_t rank) {
    if (layers.size() != tensors.size()) throw nb::value_error("each plane needs one layer index");
    std::vector<PatternPlane> planes;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const ByteMatrix &tensor = tensors[i];
        if (tensor.stride(1) != 1) throw nb::value_error("a plane's block must be contiguous bytes");
        if (layers.data()[i] < 0) throw nb::value_error("a layer index is negative");
        planes.push_back({tensor.data(), static_cast<std::size_t>(tensor.stride(0)), tensor.shape(1),
                          static_cast<std::int32_t>(tensor.shape(0)), layers.data()[i], (rank << 32) + i});
    }
    return planes;
}

}  // namespace

void bind_pattern(nb::module_ &module) {
    nb::class_<PatternModel>(module, "PatternModel",
                             "A stand-in for a model: computing a token writes bytes derived from its whole "
                             "prefix.")
        .def(
            "__init__",
            [](PatternModel *self, const std::vector<ByteMatrix> &planes,
               const VectorIn<std::int32_t> &layers, std::int32_t num_layers, std::int32_t block_size,
               std::uint32_t rank) {
                new (self) PatternModel(pattern_planes(planes, layers, rank), block_size, num_layers);
            },
            "planes"_a, "layers"_a, "num_layers"_a, "block_size"_a, "rank"_a, nb::keep_alive<1, 2>(),
            "``planes[i]``, of shape (device blocks, bytes of a block) with contiguous rows, belongs to\n"
            "layer ``layers[i]``.")
        .def(
            "begin",
            [](PatternModel &self, std::int32_t sequence, const VectorIn<std::int32_t> &tokens) {
                const nb::gil_scoped_release unlocked;
                self.begin(sequence, span_of(tokens));
            },
            "sequence"_a, "tokens"_a, "Set the tokens of a sequence, replacing earlier ones.")
        .def("end", &PatternModel::end, "sequence"_a, "Forget a sequence.")
        .def(
            "prepare",
            [](PatternModel &self, const SegmentRows &segments, const VectorIn<std::int32_t> &blocks,
               std::int32_t every) {
                const std::size_t count = segments.shape(1);
                const auto row = [&](std::size_t index) {
                    return std::span(segments.data() + index * count, count);
                };
                const nb::gil_scoped_release unlocked;
                return self.prepare({row(0), row(1), row(2), row(3), row(4), row(5), span_of(blocks)}, every);
            },
            "segments"_a, "blocks"_a, "every"_a,
            "Prepare a step; return how many blocks it will compare.\n\n"
            "``segments`` has the rows sequence, start, end, keep, grow, verify: the step computes\n"
            "tokens [start, end) of the sequence. Its block table keeps ``keep`` entries and grows by\n"
            "the next ``grow`` of ``blocks``. Of its ``verify`` leading blocks, every ``every``-th and\n"
            "the last are compared before anything is written; none if ``every`` is 0. -1 stands for\n"
            "a block that is given up, and is neither compared nor written. Raises ValueError, and\n"
            "changes nothing, for values out of range.")
        .def("run_layer", &PatternModel::run_layer, "layer"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Compare, then write, one layer; layers come in order.\n\n"
             "Returns (segment, block of the sequence) of each block that differs. Such a sequence\n"
             "computes garbage until a later comparison of its prefix succeeds.");
}

}  // namespace fdcache
