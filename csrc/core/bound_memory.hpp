// What the bindings of records and of copies share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "core/record.hpp"

namespace fdcache {

namespace nb = nanobind;

template <typename T>
using InputArray = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HashArray = nb::ndarray<const std::uint8_t, nb::shape<-1, 32>, nb::c_contig, nb::device::cpu>;

// Memory that someone else owns, with the Python object that keeps it alive.
struct BoundPlanes {
    std::vector<Plane> planes;
    nb::object owner;
};

struct BoundRecords {
    RecordTable table;
    nb::object owner;
};

inline std::array<std::uint8_t, 16> fingerprint_of(const nb::bytes &value) {
    std::array<std::uint8_t, 16> prefix;
    if (value.size() < prefix.size()) throw std::invalid_argument("fingerprint must have at least 16 bytes");
    std::memcpy(prefix.data(), value.c_str(), prefix.size());
    return prefix;
}

inline void check_slot(const RecordTable &table, std::int32_t slot) {
    if (slot < 0 || slot >= table.num_slots) throw nb::index_error("host slot out of range");
}

}  // namespace fdcache
