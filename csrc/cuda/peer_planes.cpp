#include "cuda/peer_planes.hpp"

#include <algorithm>

#include "cuda/step_runner.hpp"

namespace fdcache::cuda {
namespace {

constexpr Grid kTable{4, 512};

// Launches as much of the grid as there is work for its warps.
void launch(FunctionHandle function, Grid most, std::size_t items, StreamHandle stream, void **arguments) {
    const std::size_t warps = most.threads / kLanes;
    const auto blocks =
        static_cast<unsigned>(std::min<std::size_t>(most.blocks, (items + warps - 1) / warps));
    check(driver().launch(function, blocks, 1, 1, most.threads, 1, 1, 0, stream, arguments, nullptr),
          "cuLaunchKernel");
}

void copy_table(const SwapDevice &device, StreamHandle stream, Address from, Address to, std::size_t rows) {
    auto words = static_cast<unsigned>(rows * sizeof(swap::Block) / sizeof(swap::Word));
    void *arguments[] = {&from, &to, &words};
    launch(device.kernels.copy_words, kTable, (words + kLanes - 1) / kLanes, stream, arguments);
}

// Runs `work` between two events; if the driver refuses a part, the rest is left out.
template <typename Work>
PlaneWork start(const SwapDevice &device, StreamHandle stream, Work enqueue) {
    Context &context = *device.context;
    PlaneWork work{std::make_shared<Event>(device.context, true),
                   std::make_shared<Event>(device.context, true), ""};
    try {
        const Current current(context);
        if (const auto refusal = work.begun->record(stream)) throw *refusal;
        enqueue();
    } catch (const Error &error) {
        context.note(error);
        work.error = error.what();
    }
    if (const auto refusal = work.done->record(stream); refusal && work.error.empty())
        work.error = refusal->what();
    return work;
}

}  // namespace

PlaneWork read_planes(const SwapDevice &device, StreamHandle stream, const SwapPlanes &source,
                      const SwapPlanes &target, PlaneMoves moves, PlaneRange planes, BlockTable table,
                      Grid most, const std::vector<std::shared_ptr<Event>> &after) {
    const std::size_t rows = moves.slots.size();
    for (std::size_t i = 0; i < rows; ++i)
        table.host[i] = {static_cast<swap::Word>(moves.places[i]), 0, moves.slots[i]};
    return start(device, stream, [&] {
        for (const auto &event : after) event->hold(stream);
        copy_table(device, stream, reinterpret_cast<Address>(table.host), table.device, rows);
        const unsigned first = target.first_chunk[planes.first];
        swap::Range range{0, static_cast<unsigned>(rows), first, target.first_chunk[planes.last] - first};
        Address mine = target.chunks, theirs = source.chunks, blocks = table.device;
        void *arguments[] = {&mine, &theirs, &blocks, &range};
        launch(device.kernels.read_peer, most, rows * range.num_chunks, stream, arguments);
    });
}

PlaneWork sum_planes(const SwapDevice &device, StreamHandle stream, const SwapPlanes &planes,
                     std::span<const std::int32_t> slots, PlaneRange summed, BlockTable table) {
    const std::size_t rows = slots.size();
    for (std::size_t i = 0; i < rows; ++i) table.host[i] = {0, 0, slots[i]};
    return start(device, stream, [&] {
        const auto host = reinterpret_cast<Address>(table.host);
        copy_table(device, stream, host, table.device, rows);
        const unsigned first = planes.first_chunk[summed.first];
        swap::Range range{0, static_cast<unsigned>(rows), first, planes.first_chunk[summed.last] - first};
        swap::Target target{};
        Address chunks = planes.chunks, blocks = table.device;
        void *arguments[] = {&chunks, &blocks, &range, &target};
        const Grid most = spread(std::max(device.policy.transpose_ctas, 1U));
        launch(device.kernels.sum, most, rows * range.num_chunks, stream, arguments);
        copy_table(device, stream, table.device, host, rows);
    });
}

}  // namespace fdcache::cuda
