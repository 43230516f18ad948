// What the bindings of copies share, on whatever device.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "core/bound_memory.hpp"
#include "core/event.hpp"
#include "core/record_check.hpp"

namespace fdcache {

// Waits without the GIL, in slices, so that a signal such as Ctrl-C is handled soon.
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

// The blocks of a batch, element i of each array being one. Throws for a host slot out of range.
inline std::vector<BlockPair> make_pairs(const RecordTable &table,
                                         const InputArray<std::int32_t> &device_slots,
                                         const InputArray<std::int32_t> &host_slots,
                                         const InputArray<std::uint32_t> &generations,
                                         const HashArray &hashes, const HashArray &parents) {
    const std::size_t count = device_slots.shape(0);
    if (host_slots.shape(0) != count || generations.shape(0) != count || hashes.shape(0) != count ||
        parents.shape(0) != count) {
        throw std::invalid_argument("the arrays of a copy differ in length");
    }
    std::vector<BlockPair> pairs(count);
    for (std::size_t i = 0; i < count; ++i) {
        check_slot(table, host_slots.data()[i]);
        pairs[i].device_slot = device_slots.data()[i];
        pairs[i].host_slot = host_slots.data()[i];
        pairs[i].generation = generations.data()[i];
        std::memcpy(pairs[i].hash.bytes.data(), hashes.data() + 32 * i, 32);
        std::memcpy(pairs[i].parent.bytes.data(), parents.data() + 32 * i, 32);
    }
    return pairs;
}

}  // namespace fdcache
