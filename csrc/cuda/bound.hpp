// Shared by the bindings of a GPU: batches, the memory they refer to, and the threads that submit them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "copy/bound_memory.hpp"
#include "copy/transfer_array_bindings.hpp"
#include "cuda/context.hpp"
#include "cuda/lane.hpp"
#include "cuda/submitter.hpp"
#include "cuda/swap.hpp"

namespace fdcache {

using EventPtr = std::shared_ptr<cuda::Event>;
using ContextPtr = std::shared_ptr<cuda::Context>;
using LanePtr = std::shared_ptr<cuda::Lane>;
using Pairs = std::vector<std::pair<std::size_t, std::size_t>>;

template <typename Handle>
Handle handle_of(std::uintptr_t value) {
    return reinterpret_cast<Handle>(value);
}

// What all batches of a GPU share; `owner` keeps its kernels loaded.
struct BoundDevice {
    std::shared_ptr<const cuda::SwapDevice> device;
    nb::object owner;
};

struct BoundSwapPlanes {
    std::shared_ptr<const cuda::SwapPlanes> planes;
    std::int32_t num_blocks;
    nb::object owner;
};

// Device addresses of the extents of an arena. Built once, since an arena has thousands.
struct BoundExtents {
    std::shared_ptr<const std::vector<cuda::Address>> addresses;
};

// A batch, and the arrays and memory that it refers to.
struct BoundSwap {
    std::shared_ptr<cuda::Swap> swap;
    TransferArrays arrays;
    nb::object owners;
};

// Keeps each batch, and the memory that it refers to, alive until it has ended.
class BoundSubmitter {
  public:
    BoundSubmitter(ContextPtr context, cuda::StreamHandle main, bool background)
        : submitter(std::move(context), main, background) {}

    void hold(const std::shared_ptr<cuda::Swap> &swap, nb::object owner) {
        if (!held_.empty() && held_.back().first == swap) return;
        retire();
        held_.emplace_back(swap, std::move(owner));
    }

    // Batches end in order, so the first that has not ended is the only one asked in vain.
    void retire() {
        while (!held_.empty() && held_.front().first->done()->is_reached()) held_.pop_front();
    }

    std::vector<EventPtr> ends() const {
        std::vector<EventPtr> events;
        for (const auto &[swap, owner] : held_) events.push_back(swap->done());
        return events;
    }

    void close() {
        {
            const nb::gil_scoped_release release;
            submitter.close();
        }
        held_.clear();
    }

  private:
    std::deque<std::pair<std::shared_ptr<cuda::Swap>, nb::object>> held_;

  public:
    cuda::Submitter submitter;  // ends before the owners are released
};

// Waits until one of the events is reached; returns false after `timeout` seconds.
bool wait_events(const std::vector<EventPtr> &events, std::optional<double> timeout);

// The copies of a transfer; none unless it is sound.
std::optional<BoundSwap> make_swap(const BoundDevice &device, nb::handle transfer, bool to_host,
                                   nb::handle_t<BoundSwapPlanes> planes, const RecordsRef &records,
                                   const BoundExtents &extents, const nb::bytes &fingerprint, bool verify);

void bind_launches(nb::module_ &module);
void bind_peers(nb::module_ &module);

}  // namespace fdcache
