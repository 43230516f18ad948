#include "core/presence_bindings.hpp"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "core/arrays.hpp"
#include "core/bindings.hpp"

namespace fdcache {

using namespace nb::literals;

PresenceTable presence_table(const void *memory, std::size_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(memory) % alignof(std::uint64_t) ||
        bytes % PresenceTable::kBucketBytes)
        throw std::invalid_argument("a presence table is whole buckets of 64 bytes");
    // Only a tier that mirrors itself writes, and it asks for an array that may be written.
    return {static_cast<std::uint64_t *>(const_cast<void *>(memory)), bytes / PresenceTable::kBucketBytes};
}

void bind_presence(nb::module_ &module) {
    nb::class_<PresenceTable>(module, "PresenceTable")
        .def(
            "__init__",
            [](PresenceTable *self, const VectorIn<std::uint8_t> &memory) {
                new (self) PresenceTable(presence_table(memory.data(), memory.shape(0)));
            },
            "memory"_a, nb::keep_alive<1, 2>())
        .def(
            "contains",
            [](const PresenceTable &table, const HashesIn &hashes) {
                std::vector<std::uint8_t> present;
                present.reserve(hashes.shape(0));
                for (const Digest &hash : digests_of(hashes)) present.push_back(table.holds(hash));
                return to_numpy<std::uint8_t>(std::move(present));
            },
            "hashes"_a)
        .def(
            "run",
            [](const PresenceTable &table, const HashesIn &path, std::size_t start) {
                return table.run(digests_of(path), start);
            },
            "path"_a, "start"_a = 0);
}

}  // namespace fdcache
