#include "core/cuda_swap.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace fdcache::cuda {
namespace {

constexpr unsigned kThreads = 512;
constexpr unsigned kWarps = kThreads / 32;
constexpr std::size_t kBatchBytes = std::size_t{16} << 20;  // longer batches are slower
constexpr std::size_t kNarrowRun = std::size_t{128} << 10;

std::uint64_t payload_bytes(const std::vector<Plane> &planes) {
    return std::accumulate(planes.begin(), planes.end(), std::uint64_t{0},
                           [](std::uint64_t sum, const Plane &plane) { return sum + plane.nbytes; });
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

Swap::Swap(std::shared_ptr<Context> context, Kernels kernels, const SwapPolicy &policy, Direction direction,
           std::vector<Plane> planes, Address chunks, std::vector<unsigned> first_chunk, RecordTable records,
           const std::vector<Address> &extents, std::vector<BlockPair> pairs,
           const std::array<std::uint8_t, 16> &fingerprint, bool verify)
    : context_(std::move(context)),
      kernels_(kernels),
      policy_(policy),
      direction_(direction),
      planes_(std::move(planes)),
      chunks_(chunks),
      first_chunk_(std::move(first_chunk)),
      records_(std::move(records)),
      pairs_(std::move(pairs)),
      kind_{fingerprint, payload_bytes(planes_)},
      verify_(verify && direction == Direction::kToDevice),
      faults_(pairs_.size(), BlockFault::kNone),
      sums_(direction == Direction::kToHost ? pairs_.size() : 0, 0),
      headers_(pairs_.size()),
      begun_(std::make_shared<Event>(context_, true)),
      done_(std::make_shared<Event>(context_, true)) {
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
        if (direction_ == Direction::kToDevice) {
            headers_[i] = load_header(records_.headers + pairs_[i].host_slot);
            faults_[i] = check_source(headers_[i], pairs_[i], kind_);
        }
        if (faults_[i] == BlockFault::kNone) order_.push_back(i);
    }
    std::ranges::sort(order_, {}, [&](std::size_t pair) { return pairs_[pair].host_slot; });
    std::vector<std::int32_t> host_slots;
    for (const std::size_t pair : order_) {
        const auto slot = static_cast<std::size_t>(pairs_[pair].host_slot);
        host_slots.push_back(pairs_[pair].host_slot);
        device_slots_.push_back(pairs_[pair].device_slot);
        rows_.push_back({extents[slot / records_.records_per_extent] +
                             (slot % records_.records_per_extent) * records_.record_bytes,
                         0, pairs_[pair].device_slot});
    }
    runs_ = find_runs(host_slots, records_.records_per_extent);
}

void Swap::set_table(std::uint8_t *host, Address device) {
    host_table_ = reinterpret_cast<swap::Block *>(host);
    device_table_ = device;
    std::memcpy(host_table_, rows_.data(), rows_.size() * sizeof(swap::Block));
}

void Swap::enqueue(Lane &lane, PlaneRange range) {
    if (ended_) return;
    try {
        const Current current(*context_);
        if (!started_) begin(lane);
        if (!rows_.empty()) run(lane, range);
        if (range.last == planes_.size()) end(lane);
    } catch (const Error &error) {
        fail(lane, error);
    }
}

void Swap::refuse(StreamHandle main, const std::string &reason) {
    if (ended_) return;
    started_ = ended_ = true;
    error_ = reason;
    done_->record(main);
}

void Swap::begin(Lane &lane) {
    started_ = true;
    if (direction_ == Direction::kToHost) {
        for (const std::size_t pair : order_) {
            headers_[pair] = writing_header(pairs_[pair], kind_);
            store_header(records_.headers + pairs_[pair].host_slot, headers_[pair]);
        }
        // No byte of a record may change before its header says that it is being written.
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    begun_->record(lane.main());
    if (!rows_.empty()) {
        const auto table = reinterpret_cast<Address>(host_table_);
        check(driver().copy(device_table_, table, rows_.size() * sizeof(swap::Block), lane.main()),
              "cuMemcpyAsync");
    }
    lane.hand_over(lane.main(), lane.copy());
}

void Swap::end(Lane &lane) {
    if (verify_ && !rows_.empty()) {
        launch(kernels_.sum, policy_.transpose_ctas, {0, planes_.size()}, {0, rows_.size()}, {}, lane.main());
    }
    if ((verify_ || direction_ == Direction::kToHost) && !rows_.empty()) {
        const auto table = reinterpret_cast<Address>(host_table_);
        check(driver().copy(table, device_table_, rows_.size() * sizeof(swap::Block), lane.main()),
              "cuMemcpyAsync");
    }
    ended_ = true;
    done_->record(lane.main());
}

void Swap::fail(Lane &lane, const Error &error) {
    context_->note(error);
    error_ = error.what();
    started_ = ended_ = true;
    try {
        const Current current(*context_);
        lane.hand_over(lane.copy(), lane.main());
    } catch (const Error &second) {
        context_->note(second);
    }
    done_->record(lane.main());
}

const SwapThresholds &Swap::limits() const {
    return direction_ == Direction::kToHost ? policy_.to_host : policy_.to_device;
}

void Swap::run(Lane &lane, PlaneRange range) {
    const std::size_t record_bytes = records_.record_bytes;
    for (const PlaneRange part : split_range(planes_, range, record_bytes, lane.slot_bytes())) {
        switch (choose_method(policy_, direction_, planes_, part, record_bytes, rows_.size(), runs_.size())) {
            case SwapMethod::kKernel:
                run_kernel(lane, part);
                break;
            case SwapMethod::kStaged:
                run_staged(lane, part);
                break;
            case SwapMethod::kDirect:
                run_direct(lane, part);
                break;
        }
    }
}

void Swap::run_kernel(Lane &lane, PlaneRange range) {
    const auto function = direction_ == Direction::kToHost ? kernels_.copy_out : kernels_.copy_in;
    launch(function, policy_.kernel_ctas, range, {0, rows_.size()}, {}, lane.main());
}

void Swap::run_staged(Lane &lane, PlaneRange range) {
    const std::size_t column = column_bytes(planes_, range, records_.record_bytes);
    const std::size_t per_slot = lane.slot_bytes() / column;
    for (std::size_t first = 0; first < rows_.size(); first += per_slot) {
        const Rows rows{first, std::min(per_slot, rows_.size() - first)};
        const bool out = direction_ == Direction::kToHost;
        const Address staging = lane.take_slot(out ? lane.main() : lane.copy());
        const swap::Target target{staging, column, planes_[range.first].offset};
        if (out) {
            launch(kernels_.copy_out, policy_.transpose_ctas, range, rows, target, lane.main());
            lane.hand_over(lane.main(), lane.copy());
        }
        copy_rows(lane.copy(), staging, range, rows);
        if (!out) {
            lane.hand_over(lane.copy(), lane.main());
            launch(kernels_.copy_in, policy_.transpose_ctas, range, rows, target, lane.main());
        }
        lane.free_slot(out ? lane.copy() : lane.main());
    }
    if (direction_ == Direction::kToHost) lane.hand_over(lane.copy(), lane.main());
}

void Swap::run_direct(Lane &lane, PlaneRange range) {
    if (direction_ == Direction::kToHost) {
        const unsigned ctas = std::max(policy_.transpose_ctas, 1U);
        launch(kernels_.sum, ctas, range, {0, rows_.size()}, {}, lane.main());
    }
    for (std::size_t i = range.first; i < range.last; ++i) copy_plane(planes_[i], lane.copy());
    flush_pieces(lane.copy());
    lane.hand_over(lane.copy(), lane.main());
}

void Swap::copy_rows(StreamHandle stream, Address staging, PlaneRange range, Rows rows) {
    const std::size_t column = column_bytes(planes_, range, records_.record_bytes);
    const std::size_t offset = planes_[range.first].offset;
    for (const Rows &run : clip_runs(runs_, rows.first, rows.first + rows.count)) {
        copy_run({rows_[run.first].record + offset, records_.record_bytes},
                 {staging + (run.first - rows.first) * column, column}, column, run.count, stream);
    }
    flush_pieces(stream);
}

void Swap::copy_plane(const Plane &plane, StreamHandle stream) {
    const auto base = reinterpret_cast<Address>(plane.base);
    for (const Rows &run : runs_) {
        for (const Rows &part : find_device_runs(run, device_slots_)) {
            const auto first = static_cast<Address>(device_slots_[part.first] * plane.stride);
            copy_run({rows_[part.first].record + plane.offset, records_.record_bytes},
                     {base + first, static_cast<std::size_t>(plane.stride)}, plane.nbytes, part.count,
                     stream);
        }
    }
}

void Swap::copy_run(Side host, Side device, std::size_t width, std::size_t rows, StreamHandle stream) {
    if (host.pitch == width && device.pitch == width) {
        add_piece(host.address, device.address, width * rows, stream);
        return;
    }
    const std::size_t nbytes = width * rows;
    const bool narrow = width < limits().staged_column && nbytes >= kNarrowRun;
    if (rows > 1 && (narrow || nbytes >= limits().run_copy)) {
        copy_strided(host, device, width, rows, stream);
        return;
    }
    for (std::size_t row = 0; row < rows; ++row) {
        add_piece(host.address + row * host.pitch, device.address + row * device.pitch, width, stream);
    }
}

void Swap::copy_strided(Side host, Side device, std::size_t width, std::size_t rows, StreamHandle stream) {
    constexpr unsigned kHost = 1;
    constexpr unsigned kDevice = 2;
    Copy2D copy;
    copy.width = width;
    copy.height = rows;
    auto *host_data = reinterpret_cast<void *>(host.address);
    if (direction_ == Direction::kToHost) {
        copy.source_type = kDevice;
        copy.source_device = device.address;
        copy.source_pitch = device.pitch;
        copy.target_type = kHost;
        copy.target_host = host_data;
        copy.target_pitch = host.pitch;
    } else {
        copy.source_type = kHost;
        copy.source_host = host_data;
        copy.source_pitch = host.pitch;
        copy.target_type = kDevice;
        copy.target_device = device.address;
        copy.target_pitch = device.pitch;
    }
    check(driver().copy_2d(&copy, stream), "cuMemcpy2DAsync");
}

void Swap::add_piece(Address host, Address device, std::size_t nbytes, StreamHandle stream) {
    const bool out = direction_ == Direction::kToHost;
    pieces_.sources.push_back(out ? device : host);
    pieces_.targets.push_back(out ? host : device);
    pieces_.sizes.push_back(nbytes);
    pieces_.nbytes += nbytes;
    if (pieces_.nbytes >= kBatchBytes) flush_pieces(stream);
}

void Swap::flush_pieces(StreamHandle stream) {
    const std::size_t count = pieces_.sizes.size();
    if (count > 1 && policy_.batched) {
        const MemoryLocation host{2, 0};
        const MemoryLocation device{1, context_->ordinal()};
        const bool out = direction_ == Direction::kToHost;
        BatchAttributes attributes;
        attributes.source = out ? device : host;
        attributes.target = out ? host : device;
        std::size_t first = 0;
        check(driver().copy_batch(pieces_.targets.data(), pieces_.sources.data(), pieces_.sizes.data(), count,
                                  &attributes, &first, 1, stream),
              "cuMemcpyBatchAsync");
    } else {
        for (std::size_t i = 0; i < count; ++i) {
            check(driver().copy(pieces_.targets[i], pieces_.sources[i], pieces_.sizes[i], stream),
                  "cuMemcpyAsync");
        }
    }
    pieces_ = {};
}

void Swap::launch(FunctionHandle function, unsigned ctas, PlaneRange range, Rows rows, swap::Target target,
                  StreamHandle stream) {
    Address chunks = chunks_;
    Address table = device_table_;
    swap::Range rectangle{static_cast<unsigned>(rows.first), static_cast<unsigned>(rows.count),
                          first_chunk_[range.first], first_chunk_[range.last] - first_chunk_[range.first]};
    const std::size_t items = rows.count * rectangle.num_chunks;
    const std::size_t useful = (items + kWarps - 1) / kWarps;
    void *arguments[] = {&chunks, &table, &rectangle, &target};
    check(driver().launch(function, static_cast<unsigned>(std::min<std::size_t>(ctas, useful)), 1, 1,
                          kThreads, 1, 1, 0, stream, arguments, nullptr),
          "cuLaunchKernel");
}

std::uint64_t Swap::copied_bytes() const {
    const auto copied = std::count(faults_.begin(), faults_.end(), BlockFault::kNone);
    return kind_.payload_bytes * static_cast<std::uint64_t>(copied);
}

}  // namespace fdcache::cuda
