// From host records into the slots of a slab file.
#include <utility>

#include "core/slab_file.hpp"

namespace fdcache {

SlabFault SlabFile::check_source(const SlabBlock &block, SlotHeader &found) const {
    found = load_header(block.host_header);
    const bool held = found.is_sound() && found.state == SlotState::kReady && found.hash == block.hash &&
                      found.generation == block.host_generation && found.fingerprint == shape_.fingerprint &&
                      found.payload_bytes == payload_bytes_;
    return held ? SlabFault::kNone : SlabFault::kSource;
}

SlabOutcome SlabFile::write(std::span<const SlabBlock> blocks, const SlabLimits &limits, SyncPolicy policy,
                            std::uint64_t now_ms) {
    SlabOutcome out;
    out.faults.resize(blocks.size(), SlabFault::kNone);
    out.checksums.resize(blocks.size(), 0);
    std::vector<SlotHeader> sources(blocks.size());
    std::vector<std::uint32_t> targets;
    bool reused = false;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        out.faults[i] = check_source(blocks[i], sources[i]);
        if (out.faults[i] != SlabFault::kNone) continue;
        out.checksums[i] = sources[i].payload_checksum;
        reused = reused || header(blocks[i].slot).state == SlotState::kReady;
        targets.push_back(blocks[i].slot);
    }
    const auto fail_all = [&](int error) {
        for (SlabFault &fault : out.faults)
            if (fault == SlabFault::kNone) fault = SlabFault::kError;
        if (!out.error) out.error = error;
        return out;
    };
    const bool every_batch = policy == SyncPolicy::kEveryBatch;
    // The slot is empty before the first byte of the new record, and full after its last one. Slots never
    // used are emptied as well, which gives their headers room on the disk before the records fill it.
    if (const int error = erase(targets)) return fail_all(error);
    if (every_batch && reused)
        if (const int error = sync()) return fail_all(error);
    unsynced_ = true;
    move_all(blocks, limits, true, out);
    if (every_batch)
        if (const int error = sync()) return fail_all(error);
    std::vector<std::uint32_t> written;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (out.faults[i] != SlabFault::kNone) continue;
        // The record may have been given to other content meanwhile.
        if (load_header(blocks[i].host_header) != sources[i]) {
            out.faults[i] = SlabFault::kSource;
            continue;
        }
        SlotHeader header = sources[i];
        header.generation = blocks[i].generation;
        header.parent = blocks[i].parent;
        header.written_ms = now_ms;
        header.seal();
        const std::lock_guard lock(mutex_);
        headers_[blocks[i].slot] = header;
        trusted_[blocks[i].slot] = true;
        written.push_back(blocks[i].slot);
        out.bytes += shape_.record_bytes;
    }
    int error = store_headers(written);
    if (!error && every_batch) error = sync();
    if (!error) return out;
    const std::lock_guard lock(mutex_);
    for (const std::uint32_t slot : written) headers_[slot] = empty_header(slot);
    return fail_all(error);
}

}  // namespace fdcache
