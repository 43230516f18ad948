#include <utility>

#include "core/cuda_swap.hpp"

namespace fdcache::cuda {
namespace {

constexpr std::size_t kBatchBytes = std::size_t{16} << 20;  // longer batches are slower

}  // namespace

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
    const bool narrow = width < kNarrowRow && rows >= kNarrowRows;
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

}  // namespace fdcache::cuda
