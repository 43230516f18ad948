// Slot headers in memory and in the file.
#include "slab/slab_file.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace fdcache {
namespace {

constexpr std::size_t kScanSlots = 8192;

}  // namespace

SlabFile::SlabFile(int record_fd, int header_fd, SlabShape shape, unsigned threads)
    : record_fd_(record_fd),
      header_fd_(header_fd),
      shape_(std::move(shape)),
      headers_(shape_.slots),
      trusted_(shape_.slots, false),
      pool_(threads) {
    for (const PayloadPart &part : shape_.parts) payload_bytes_ += part.nbytes;
}

SlabScan SlabFile::scan(std::uint32_t first, std::uint32_t last, bool repair) {
    SlabScan found;
    last = std::min(last, shape_.slots);
    struct stat status{};
    if (fstat(header_fd_, &status) != 0) {
        found.error = errno;
        return found;
    }
    std::vector<SlotHeader> read;
    std::vector<std::uint32_t> damaged;
    for (std::uint32_t at = first; at < last; at += kScanSlots) {
        read.assign(std::min<std::size_t>(kScanSlots, last - at), SlotHeader{});
        const off_t offset = shape_.header_offset + static_cast<off_t>(at * sizeof(SlotHeader));
        const int error =
            move_vectors(header_fd_, {{read.data(), read.size() * sizeof(SlotHeader)}}, offset, false);
        if (error && error != kTruncated) {
            found.error = error;
            return found;
        }
        const std::lock_guard lock(mutex_);
        for (std::size_t i = 0; i < read.size(); ++i) {
            SlotHeader &header = read[i];
            const auto end = shape_.record_offset + static_cast<off_t>((at + i + 1) * shape_.record_bytes);
            const bool blank = header == SlotHeader{} || header.is_outdated();
            const bool sound = header.is_valid() && header.fingerprint == shape_.fingerprint;
            const bool ready = sound && header.state == HeaderState::kReady;
            const bool whole = header.payload_bytes == payload_bytes_ && end <= status.st_size;
            found.ready += ready && whole;
            if ((!blank && !sound) || (ready && !whole))
                damaged.push_back(at + static_cast<std::uint32_t>(i));
            headers_[at + i] = sound && (!ready || whole) ? header : SlotHeader{};
            trusted_[at + i] = false;
        }
    }
    found.corrupt = static_cast<std::uint32_t>(damaged.size());
    if (!repair || damaged.empty()) return found;
    if (const int error = erase(damaged); !is_full(error)) found.error = error;
    return found;
}

SlotHeader SlabFile::header(std::uint32_t slot) const {
    const std::lock_guard lock(mutex_);
    return headers_.at(slot);
}

SlotHeader SlabFile::empty_header(std::uint32_t slot) const {
    SlotHeader header;
    header.generation = headers_[slot].generation;
    header.fingerprint = shape_.fingerprint;
    header.seal();
    return header;
}

// Writes the headers of these slots from memory to the file, adjacent ones together. Returns an errno or 0.
int SlabFile::store_headers(std::span<const std::uint32_t> slots) {
    std::vector<std::uint32_t> sorted(slots.begin(), slots.end());
    std::sort(sorted.begin(), sorted.end());
    unsynced_ = true;
    for (std::size_t first = 0; first < sorted.size();) {
        std::size_t last = first + 1;
        while (last < sorted.size() && sorted[last] == sorted[last - 1] + 1) ++last;
        std::vector<SlotHeader> headers;
        {
            const std::lock_guard lock(mutex_);
            for (std::size_t i = first; i < last; ++i) headers.push_back(headers_[sorted[i]]);
        }
        const off_t offset = shape_.header_offset + static_cast<off_t>(sorted[first] * sizeof(SlotHeader));
        if (const int error = move_vectors(
                header_fd_, {{headers.data(), headers.size() * sizeof(SlotHeader)}}, offset, true))
            return error;
        first = last;
    }
    return 0;
}

int SlabFile::erase(std::span<const std::uint32_t> slots) {
    {
        const std::lock_guard lock(mutex_);
        for (const std::uint32_t slot : slots) {
            headers_.at(slot) = empty_header(slot);
            trusted_[slot] = false;
        }
    }
    return store_headers(slots);
}

int SlabFile::sync() {
    unsynced_ = false;
    if (fdatasync(header_fd_) == 0) return 0;
    unsynced_ = true;
    return errno;
}

}  // namespace fdcache
