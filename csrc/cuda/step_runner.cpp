#include "cuda/step_runner.hpp"

#include <algorithm>
#include <variant>

namespace fdcache::cuda {
namespace {

Grid in_place(unsigned thread_blocks) {
    return {thread_blocks, kWide};
}

}  // namespace

ChunkTable make_chunks(const std::vector<Plane> &planes, std::size_t record_bytes) {
    ChunkTable table;
    for (std::size_t i = 0; i < planes.size(); ++i) {
        const Plane &plane = planes[i];
        table.first.push_back(static_cast<unsigned>(table.chunks.size()));
        for (std::size_t at = 0; at < plane.nbytes; at += swap::kChunkBytes) {
            const std::size_t nbytes = std::min<std::size_t>(swap::kChunkBytes, plane.nbytes - at);
            table.chunks.push_back({reinterpret_cast<Address>(plane.base) + at, plane.stride,
                                    plane.offset + at, static_cast<unsigned>(nbytes), 0});
        }
        const std::size_t next = i + 1 < planes.size() ? planes[i + 1].offset : record_bytes;
        table.chunks.back().padding = static_cast<unsigned>(next - plane.offset - plane.nbytes);
    }
    table.first.push_back(static_cast<unsigned>(table.chunks.size()));
    return table;
}

void StepRunner::run(const StepList &list) {
    pieces_ = list.pieces;
    for (const Step &step : list.steps) {
        std::visit([this](const auto &each) { run(each); }, step);
    }
}

void StepRunner::run(const TakeSlot &step) {
    slot_ = lane_.take_slot(stream(step.user));
}

void StepRunner::run(const FreeSlot &step) {
    lane_.free_slot(stream(step.user));
}

void StepRunner::run(const HandOver &step) {
    lane_.hand_over(stream(step.from), stream(step.to));
}

void StepRunner::run(const CopyPieces &step) {
    const bool out = direction_ == Direction::kToHost;
    sources_.clear();
    targets_.clear();
    sizes_.clear();
    for (const Piece &piece : pieces_.subspan(step.first, step.count)) {
        const Address device = piece.device + (step.staged ? slot_ : 0);
        sources_.push_back(out ? device : piece.host);
        targets_.push_back(out ? piece.host : device);
        sizes_.push_back(piece.nbytes);
    }
    if (step.count > 1 && policy_.batched) {
        const MemoryLocation host{2, 0};
        const MemoryLocation device{1, context_.ordinal()};
        BatchAttributes attributes;
        attributes.source = out ? device : host;
        attributes.target = out ? host : device;
        std::size_t first = 0;
        check(driver().copy_batch(targets_.data(), sources_.data(), sizes_.data(), step.count, &attributes,
                                  &first, 1, lane_.copy()),
              "cuMemcpyBatchAsync");
        return;
    }
    for (std::size_t i = 0; i < step.count; ++i) {
        check(driver().copy(targets_[i], sources_[i], sizes_[i], lane_.copy()), "cuMemcpyAsync");
    }
}

void StepRunner::run(const CopyRows &step) {
    constexpr unsigned kHost = 1;
    constexpr unsigned kDevice = 2;
    const Address device = step.device + (step.staged ? slot_ : 0);
    auto *host = reinterpret_cast<void *>(step.host);
    Copy2D copy;
    copy.width = step.width;
    copy.height = step.rows;
    if (direction_ == Direction::kToHost) {
        copy.source_type = kDevice;
        copy.source_device = device;
        copy.source_pitch = step.device_pitch;
        copy.target_type = kHost;
        copy.target_host = host;
        copy.target_pitch = step.host_pitch;
    } else {
        copy.source_type = kHost;
        copy.source_host = host;
        copy.source_pitch = step.host_pitch;
        copy.target_type = kDevice;
        copy.target_device = device;
        copy.target_pitch = step.device_pitch;
    }
    check(driver().copy_2d(&copy, lane_.copy()), "cuMemcpy2DAsync");
}

void StepRunner::run(const RunKernel &step) {
    if (step.kind == RunKernel::Kind::kSum) {
        sum(step.planes, step.rows);
        return;
    }
    swap::Target target{};
    if (step.staged) target = {slot_, step.pitch, tables_.planes[step.planes.first].offset};
    const auto move = direction_ == Direction::kToHost ? kernels_.copy_out : kernels_.copy_in;
    launch(move, step.staged ? spread(policy_.transpose_ctas) : in_place(policy_.kernel_ctas), step.planes,
           step.rows, target);
}

void StepRunner::sum(PlaneRange planes, Rows rows) {
    launch(kernels_.sum, spread(std::max(policy_.transpose_ctas, 1U)), planes, rows, {});
}

void StepRunner::copy_table(Address from, Address to, std::size_t nbytes) {
    constexpr unsigned kMostBlocks = 4;
    auto words = static_cast<unsigned>(nbytes / sizeof(swap::Word));
    const unsigned blocks = std::min(kMostBlocks, (words + kWide - 1) / kWide);
    void *arguments[] = {&from, &to, &words};
    check(
        driver().launch(kernels_.copy_words, blocks, 1, 1, kWide, 1, 1, 0, lane_.main(), arguments, nullptr),
        "cuLaunchKernel");
}

void StepRunner::launch(FunctionHandle function, Grid most, PlaneRange planes, Rows rows,
                        swap::Target target) {
    Address chunks = tables_.chunks;
    Address table = tables_.blocks;
    const unsigned first = tables_.first_chunk[planes.first];
    swap::Range rectangle{static_cast<unsigned>(rows.first), static_cast<unsigned>(rows.count), first,
                          tables_.first_chunk[planes.last] - first};
    const std::size_t warps = most.threads / kLanes;
    const std::size_t useful = (rows.count * rectangle.num_chunks + warps - 1) / warps;
    const auto blocks = static_cast<unsigned>(std::min<std::size_t>(most.blocks, useful));
    void *arguments[] = {&chunks, &table, &rectangle, &target};
    check(driver().launch(function, blocks, 1, 1, most.threads, 1, 1, 0, lane_.main(), arguments, nullptr),
          "cuLaunchKernel");
}

}  // namespace fdcache::cuda
