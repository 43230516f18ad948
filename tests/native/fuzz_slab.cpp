// Fuzz target: a slab file whose bytes were damaged, cut off or forged between two processes.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "native/bytes.hpp"
#include "native/checks.hpp"
#include "native/slab_world.hpp"

namespace fdcache::tests {
namespace {

constexpr std::uint32_t kSlots = 5;
constexpr std::uint32_t kGeneration = 9;

class DamagedSlab {
  public:
    explicit DamagedSlab(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

    void run() {
        write();
        for (int i = 0; i < 8 && !bytes_.empty(); ++i) damage();
        world_.reopen();
        scan();
        if (bytes_.below(2)) verify();
        read();
        // What was read once is intact, and what was not is empty or stays refused.
        read();
    }

  private:
    void write() {
        for (std::uint32_t slot = 0; slot < kSlots; ++slot)
            if (bytes_.below(4)) slots_.push_back(slot);
        for (std::uint32_t i = 0; i < slots_.size(); ++i) records_.fill(i, slots_[i]);
        const auto out =
            world_.file().write(records_.blocks(slots_, kGeneration), kNoLimits, SyncPolicy::kLater, 3);
        expect(std::ranges::all_of(out.faults, is_none), "a record is not written");
    }

    off_t header_at(std::uint32_t slot) const {
        return world_.shape().header_offset + static_cast<off_t>(slot * sizeof(SlotHeader));
    }
    off_t record_at(std::uint32_t slot) const {
        return world_.shape().record_offset + static_cast<off_t>(slot * SlabWorld::kRecordBytes);
    }

    void put(off_t offset, const void *data, std::size_t nbytes) {
        expect(pwrite(world_.descriptor(), data, nbytes, offset) == static_cast<ssize_t>(nbytes), "pwrite");
    }

    void flip(off_t offset) {
        std::uint8_t byte = 0;
        if (pread(world_.descriptor(), &byte, 1, offset) != 1) return;  // behind the end
        byte ^= static_cast<std::uint8_t>(1u << bytes_.below(8));
        put(offset, &byte, 1);
    }

    void damage() {
        const std::uint32_t slot = bytes_.below(kSlots);
        damaged_.insert(slot);
        switch (bytes_.below(5)) {
            case 0:
                return flip(header_at(slot) + bytes_.below(sizeof(SlotHeader)));
            case 1:
                return flip(record_at(slot) + 16 * bytes_.next());
            case 2:
                return forge(slot);
            case 3:
                return swap(slot, bytes_.below(kSlots));
            default:
                return cut(slot);
        }
    }

    // A header with a right checksum and any fields.
    void forge(std::uint32_t slot) {
        SlotHeader header;
        if (pread(world_.descriptor(), &header, sizeof header, header_at(slot)) != sizeof header) return;
        for (int i = 0; i < 3; ++i) {
            const std::size_t at = 6 + bytes_.below(sizeof header - 6);
            reinterpret_cast<std::uint8_t *>(&header)[at] = bytes_.next();
        }
        header.seal();
        put(header_at(slot), &header, sizeof header);
    }

    // The headers of two slots change places: each leads to the record of the other.
    void swap(std::uint32_t slot, std::uint32_t other) {
        SlotHeader one, two;
        if (pread(world_.descriptor(), &one, sizeof one, header_at(slot)) != sizeof one) return;
        if (pread(world_.descriptor(), &two, sizeof two, header_at(other)) != sizeof two) return;
        put(header_at(slot), &two, sizeof two);
        put(header_at(other), &one, sizeof one);
        damaged_.insert(other);
    }

    void cut(std::uint32_t slot) {
        const off_t start = bytes_.below(2) ? record_at(slot) : header_at(slot);
        const off_t end = start + 16 * bytes_.next();
        if (end >= lseek(world_.descriptor(), 0, SEEK_END)) return;
        expect(ftruncate(world_.descriptor(), end) == 0, "ftruncate");
        for (std::uint32_t each = 0; each < kSlots; ++each)
            if (record_at(each + 1) > end || header_at(each + 1) > end) damaged_.insert(each);
    }

    bool is_written(std::uint32_t slot) const { return std::ranges::count(slots_, slot); }

    void scan() {
        const SlabScan scan = world_.file().scan(0, kSlots);
        std::uint32_t intact = 0;
        for (const std::uint32_t slot : slots_) intact += !damaged_.contains(slot);
        expect(scan.error == 0 && scan.ready >= intact && scan.ready + scan.corrupt <= kSlots,
               "a scan's figures");
        for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
            const SlotHeader header = world_.file().header(slot);
            expect(header == SlotHeader{} || header.is_valid(), "a scan keeps a header that is not valid");
            expect(header.state != HeaderState::kReady || header.payload_bytes == SlabWorld::kPayloadBytes,
                   "a scan keeps a record of another size");
        }
    }

    void verify() {
        const std::vector<std::uint32_t> all{0, 1, 2, 3, 4};
        const auto out = world_.file().verify(all);
        for (const std::uint32_t slot : all) {
            if (damaged_.contains(slot)) continue;
            expect(out.faults[slot] == (is_written(slot) ? SlabFault::kNone : SlabFault::kMiss), "verify");
        }
    }

    void read() {
        records_.clear();
        const auto out = world_.file().read(records_.blocks(slots_, kGeneration), kNoLimits, bytes_.below(2));
        for (std::uint32_t i = 0; i < slots_.size(); ++i) {
            expect(is_none(out.faults[i]) || damaged_.contains(slots_[i]),
                   "a slot that is intact is refused");
            expect(!is_none(out.faults[i]) || records_.has(i, slots_[i]), "another record is read");
        }
    }

    Bytes bytes_;
    SlabWorld world_{kSlots, 1};
    SlabRecords records_{world_, kSlots};
    std::vector<std::uint32_t> slots_;  // that were written
    std::set<std::uint32_t> damaged_;
};

}  // namespace
}  // namespace fdcache::tests

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    fdcache::tests::DamagedSlab({data, size}).run();
    return 0;
}
