#include "native/slab_world.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "hash/checksum.hpp"
#include "native/checks.hpp"

namespace fdcache::tests {
namespace {

Digest digest(std::uint32_t seed) {
    Digest made;
    made.bytes.fill(0xAB);
    std::memcpy(made.bytes.data(), &seed, sizeof seed);
    return made;
}

}  // namespace

SlabWorld::SlabWorld(std::uint32_t slots, unsigned threads)
    : threads_(threads), descriptor_(memfd_create("slab", MFD_CLOEXEC)) {
    expect(descriptor_ >= 0, "no file in memory");
    shape_.header_offset = 64;
    shape_.record_offset = static_cast<off_t>(64 + slots * sizeof(SlotHeader));
    shape_.record_bytes = kRecordBytes;
    shape_.slots = slots;
    shape_.fingerprint.fill(5);
    shape_.parts = {{0, 500}, {2048, 400}};
    reopen();
}

SlabWorld::~SlabWorld() {
    file_.reset();
    close(descriptor_);
}

void SlabWorld::reopen() {
    file_ = std::make_unique<SlabFile>(descriptor_, descriptor_, shape_, threads_);
}

SlabRecords::SlabRecords(const SlabWorld &world, std::uint32_t count)
    : shape_(world.shape()), bytes_(count * SlabWorld::kRecordBytes), headers_(count), hashes_(count) {}

std::vector<std::uint8_t> SlabRecords::content(const SlabShape &shape, std::uint32_t seed) {
    std::vector<std::uint8_t> bytes(SlabWorld::kRecordBytes);
    for (const PayloadPart &part : shape.parts)
        for (std::size_t i = part.offset; i < part.offset + part.nbytes; ++i)
            bytes[i] = static_cast<std::uint8_t>((seed + 1) * 2654435761u * (i + 3) >> 11);
    return bytes;
}

void SlabRecords::fill(std::uint32_t i, std::uint32_t seed) {
    std::ranges::copy(content(shape_, seed), record(i));
    std::uint64_t sum = 0;
    for (const PayloadPart &part : shape_.parts)
        sum += checksum_part(record(i) + part.offset, part.nbytes, part.offset / 8);
    SlotHeader header;
    header.state = HeaderState::kReady;
    header.generation = kHostGeneration;
    header.payload_bytes = SlabWorld::kPayloadBytes;
    header.payload_checksum = finish_checksum(sum, SlabWorld::kPayloadBytes);
    header.hash = hashes_[i] = digest(seed);
    header.fingerprint = shape_.fingerprint;
    header.seal();
    store_header(&headers_[i], header);
}

bool SlabRecords::has(std::uint32_t i, std::uint32_t seed) const {
    const auto wanted = content(shape_, seed);
    return std::equal(wanted.begin(), wanted.end(), bytes_.begin() + i * SlabWorld::kRecordBytes);
}

void SlabRecords::clear() {
    std::ranges::fill(bytes_, 0xEE);
}

std::vector<SlabBlock> SlabRecords::blocks(std::span<const std::uint32_t> slots, std::uint32_t generation) {
    std::vector<SlabBlock> made;
    for (std::uint32_t i = 0; i < slots.size(); ++i)
        made.push_back(
            {slots[i], generation, kHostGeneration, hashes_[i], Digest{}, record(i), &headers_[i]});
    return made;
}

}  // namespace fdcache::tests
