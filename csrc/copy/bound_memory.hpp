// Shared by the bindings of copies on all devices: bound memory, the pairs of a batch, waits.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings.hpp"
#include "copy/event.hpp"
#include "copy/record.hpp"

namespace fdcache {

// Planes and records, with the Python object that keeps their memory alive.
struct BoundPlanes {
    std::vector<Plane> planes;
    nb::object owner;
};

struct BoundRecords {
    RecordTable table;
    nb::object owner;
};

// References to Python objects of these types, for batches that must keep them alive.
using PlanesRef = nb::typed<nb::object, BoundPlanes>;
using RecordsRef = nb::typed<nb::object, BoundRecords>;

inline const std::vector<Plane> &planes_of(const PlanesRef &planes) {
    return nb::cast<const BoundPlanes &>(planes).planes;
}

inline const RecordTable &records_of(const RecordsRef &records) {
    return nb::cast<const BoundRecords &>(records).table;
}

inline Direction direction_of(bool to_host) {
    return to_host ? Direction::kToHost : Direction::kToDevice;
}

inline std::uint8_t *pointer(std::uintptr_t address) {
    return reinterpret_cast<std::uint8_t *>(address);
}

// Throws nb::index_error for a host slot out of range.
inline void check_slot(const RecordTable &table, std::int32_t slot) {
    if (slot < 0 || slot >= table.num_slots) throw nb::index_error("host slot out of range");
}

// Throws nb::index_error unless [first, last) is a non-empty range of `num_planes` planes.
inline PlaneRange range_of(std::size_t num_planes, std::size_t first, std::size_t last) {
    if (first >= last || last > num_planes) throw nb::index_error("plane range out of range");
    return {first, last};
}

// Block i of the batch from element i of each array. Throws for a host slot out of range.
inline std::vector<BlockPair> make_pairs(const RecordTable &table, const VectorIn<std::int32_t> &device_slots,
                                         const VectorIn<std::int32_t> &host_slots,
                                         const VectorIn<std::uint32_t> &generations, const HashesIn &hashes,
                                         const HashesIn &parents) {
    const std::size_t count = device_slots.shape(0);
    for (const std::size_t size :
         {host_slots.shape(0), generations.shape(0), hashes.shape(0), parents.shape(0)})
        if (size != count) throw std::invalid_argument("the arrays of a copy differ in length");
    std::vector<BlockPair> pairs(count);
    const auto own = digests_of(hashes), above = digests_of(parents);
    for (std::size_t i = 0; i < count; ++i) {
        BlockPair &pair = pairs[i];
        pair.device_slot = device_slots.data()[i];
        pair.host_slot = host_slots.data()[i];
        check_slot(table, pair.host_slot);
        pair.generation = generations.data()[i];
        pair.hash = own[i];
        pair.parent = above[i];
    }
    return pairs;
}

// Waits without the GIL, in slices, so that a signal such as Ctrl-C is handled soon. Returns false after the
// timeout.
template <typename Wait>
bool wait_interruptibly(std::optional<double> timeout, Wait wait_until) {
    using Clock = std::chrono::steady_clock;
    constexpr auto kSlice = std::chrono::milliseconds(200);
    constexpr double kLongest = 1e9;
    const auto start = Clock::now();
    Deadline deadline;
    if (timeout) {
        const auto span = std::chrono::duration<double>(std::clamp(*timeout, 0.0, kLongest));
        deadline = start + std::chrono::duration_cast<Clock::duration>(span);
    }
    while (true) {
        const auto slice = Clock::now() + kSlice;
        const bool last = deadline && *deadline <= slice;
        {
            const nb::gil_scoped_release release;
            if (wait_until(last ? *deadline : slice)) return true;
        }
        if (last) return false;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

}  // namespace fdcache
