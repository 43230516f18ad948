#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "core/bindings.hpp"
#include "core/pattern.hpp"

namespace nb = nanobind;

namespace fdcache {
namespace {

using Int32Array = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SegmentRows = nb::ndarray<const std::int32_t, nb::shape<6, -1>, nb::c_contig, nb::device::cpu>;
using ByteMatrix = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::device::cpu>;

std::span<const std::int32_t> span_of(const Int32Array &array) {
    return {array.data(), array.size()};
}

std::vector<PatternPlane> planes_of(const std::vector<ByteMatrix> &tensors, const Int32Array &layers,
                                    std::uint64_t rank) {
    if (layers.size() != tensors.size()) throw nb::value_error("one layer index is needed for each plane");
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
    nb::class_<PatternModel>(module, "PatternModel")
        .def(
            "__init__",
            [](PatternModel *self, const std::vector<ByteMatrix> &planes, const Int32Array &layers,
               std::int32_t num_layers, std::int32_t block_size, std::uint32_t rank) {
                new (self) PatternModel(planes_of(planes, layers, rank), block_size, num_layers);
            },
            nb::arg("planes"), nb::arg("layers"), nb::arg("num_layers"), nb::arg("block_size"),
            nb::arg("rank"), nb::keep_alive<1, 2>())
        .def(
            "begin",
            [](PatternModel &self, std::int32_t sequence, const Int32Array &tokens) {
                const nb::gil_scoped_release unlocked;
                self.begin(sequence, span_of(tokens));
            },
            nb::arg("sequence"), nb::arg("tokens"))
        .def("end", &PatternModel::end, nb::arg("sequence"))
        .def(
            "prepare",
            [](PatternModel &self, const SegmentRows &rows, const Int32Array &blocks, std::int32_t every) {
                const std::size_t count = rows.shape(1);
                const auto row = [&](std::size_t index) {
                    return std::span(rows.data() + index * count, count);
                };
                const nb::gil_scoped_release unlocked;
                return self.prepare({row(0), row(1), row(2), row(3), row(4), row(5), span_of(blocks)}, every);
            },
            nb::arg("segments"), nb::arg("blocks"), nb::arg("every"))
        .def("run_layer", &PatternModel::run_layer, nb::arg("layer"),
             nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace fdcache
