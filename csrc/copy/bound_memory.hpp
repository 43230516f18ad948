// Shared by the bindings of copies on all devices: bound memory and waits.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings.hpp"
#include "copy/event.hpp"
#include "copy/record.hpp"

namespace fdcache {

// Planes and records, with the Python object that keeps their memory alive.
struct BoundPlanes {
    std::shared_ptr<const std::vector<Plane>> planes;
    nb::object owner;
};

struct BoundRecords {
    std::shared_ptr<const RecordTable> table;
    nb::object owner;
};

// References to Python objects of these types, for batches that must keep them alive.
using PlanesRef = nb::typed<nb::object, BoundPlanes>;
using RecordsRef = nb::typed<nb::object, BoundRecords>;

inline const std::shared_ptr<const std::vector<Plane>> &planes_of(const PlanesRef &planes) {
    return nb::cast<const BoundPlanes &>(planes).planes;
}

inline const std::shared_ptr<const RecordTable> &records_of(const RecordsRef &records) {
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

inline constexpr const char *kOutcomeDoc =
    "End a batch whose ``done`` is reached: mark complete records ready, and return\n"
    "\n"
    "- a byte per block: 0 if it was copied, else the reason (BlockFault in csrc/copy/record.hpp); empty if "
    "all\n"
    "  were copied,\n"
    "- a 64-bit checksum per block of a copy to the host; empty for loads,\n"
    "- the bytes and seconds of the copies, and the device's error.";

inline nb::bytes faults_to_bytes(const std::vector<BlockFault> &faults) {
    const bool complete =
        std::ranges::all_of(faults, [](BlockFault fault) { return fault == BlockFault::kNone; });
    return complete ? nb::bytes("", 0) : vector_to_bytes(faults);
}

inline nb::bytes sums_to_bytes(std::span<const std::uint64_t> sums) {
    return nb::bytes(reinterpret_cast<const char *>(sums.data()), sums.size_bytes());
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
