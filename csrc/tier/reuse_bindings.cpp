// What was learned of reuse, and what clients say of it.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "tier/tier.hpp"

namespace fdcache {

void bind_reuse(nb::module_ &module) {
    const auto table = [](const ReuseTables &tables, auto value) {
        std::vector<double> rows;
        rows.reserve(ReuseTables::kClasses * ReuseTables::kAges);
        for (std::size_t kind = 0; kind < ReuseTables::kClasses; ++kind)
            for (std::size_t age = 0; age < ReuseTables::kAges; ++age)
                rows.push_back(value(tables, kind, age));
        return to_numpy<double>(std::move(rows));
    };
    nb::enum_<HintKind>(module, "HintKind", nb::is_arithmetic(), "What a client says of blocks.")
        .value("ONCE", HintKind::kOnce)
        .value("RELEASE", HintKind::kRelease)
        .value("RETAIN", HintKind::kRetain)
        .value("RETURN", HintKind::kReturn)
        .value("PRIORITY", HintKind::kPriority);
    nb::enum_<HintAnswer>(module, "HintAnswer", nb::is_arithmetic(), "What became of a hint.")
        .value("TAKEN", HintAnswer::kTaken)
        .value("NOT_LEARNING", HintAnswer::kNotLearning)
        .value("OVER_BUDGET", HintAnswer::kOverBudget)
        .value("NO_BLOCK", HintAnswer::kNoBlock)
        .value("REPLACED", HintAnswer::kReplaced);
    nb::enum_<HintFate>(module, "HintFate", nb::is_arithmetic(), "What became of a block with a hint.")
        .value("WAITING", HintFate::kWaiting)
        .value("USED", HintFate::kUsed)
        .value("EVICTED", HintFate::kEvicted)
        .value("GONE", HintFate::kGone);
    nb::class_<ReuseTables>(
        module, "ReuseTables",
        "What was learned of reuse, by class and age.\n\n"
        "Tables are flat, of ``ROLES`` x ``OUTPUTS`` x ``NEWS`` x ``AGES`` numbers, and of\n"
        "``HINTS`` x ``AGES`` for blocks that a client has told about; those that their path left behind "
        "are\n"
        "class ``LEFT``.")
        .def_prop_ro(
            "reused",
            [table](const ReuseTables &self) {
                return table(self, [](auto &all, auto kind, auto age) { return all.reused()[kind][age]; });
            },
            nb::rv_policy::automatic, "Blocks used again at an age; older counts fade.")
        .def_prop_ro(
            "at_risk",
            [table](const ReuseTables &self) {
                return table(self, [](auto &all, auto kind, auto age) { return all.at_risk()[kind][age]; });
            },
            nb::rv_policy::automatic, "Seconds that blocks spent at an age.")
        .def_prop_ro(
            "rate",
            [table](const ReuseTables &self) {
                return table(self, [](auto &all, auto kind, auto age) { return all.rate()[kind][age]; });
            },
            nb::rv_policy::automatic, "Reuses per second of one block.")
        .def_prop_ro(
            "index",
            [table](const ReuseTables &self) {
                return table(self, [](auto &all, auto kind, auto age) { return all.index(kind, age); });
            },
            nb::rv_policy::automatic, "Hits per second of keeping a block: its rank in the eviction order.")
        .def_prop_ro(
            "begins",
            [](const ReuseTables &) {
                std::vector<double> begins;
                for (std::size_t age = 0; age <= ReuseTables::kAges; ++age)
                    begins.push_back(ReuseTables::begin(age));
                return to_numpy<double>(std::move(begins));
            },
            nb::rv_policy::automatic, "Seconds at which the ages begin, and where the last one ends.")
        .def_ro_static("ROLES", &ReuseTables::kRoles)
        .def_ro_static("OUTPUTS", &ReuseTables::kOutputs)
        .def_ro_static("NEWS", &ReuseTables::kNews)
        .def_ro_static("AGES", &ReuseTables::kAges)
        .def_ro_static("HINTS", &ReuseTables::kHints)
        .def_ro_static("LEFT", &ReuseTables::kLeft);
}

}  // namespace fdcache
