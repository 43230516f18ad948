// Writes host records into slots of a slab file.
#include <utility>

#include "slab/slab_file.hpp"

namespace fdcache {

SlabFault SlabFile::check_source(const SlabBlock &block, SlotHeader &found) const {
    found = load_header(block.host_header);
    const bool held = found.is_valid() && found.state == HeaderState::kReady && found.hash == block.hash &&
                      found.generation == block.host_generation && found.fingerprint == shape_.fingerprint &&
                      found.payload_bytes == payload_bytes_;
    return held ? SlabFault::kNone : SlabFault::kSource;
}

// Empties the slots to write. On a full disk, leaves out the blocks whose header finds no room. Returns an
// errno that concerns the whole file, or 0.
int SlabFile::empty_targets(std::span<const SlabBlock> blocks, SlabOutcome &out) {
    std::vector<std::uint32_t> targets;
    for (std::size_t i = 0; i < blocks.size(); ++i)
        if (out.faults[i] == SlabFault::kNone) targets.push_back(blocks[i].slot);
    if (const int error = erase(targets); !is_full(error)) return error;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (out.faults[i] != SlabFault::kNone) continue;
        const int error = erase({&blocks[i].slot, 1});
        if (error && !is_full(error)) return error;
        if (!error) continue;
        out.faults[i] = SlabFault::kNoRoom;
        out.errors[i] = error;
    }
    return 0;
}

SlabOutcome SlabFile::write(std::span<const SlabBlock> blocks, const SlabLimits &limits, SyncPolicy policy,
                            std::uint64_t now_ms) {
    SlabOutcome out(blocks.size());
    std::vector<SlotHeader> sources(blocks.size());
    bool reused = false;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        out.faults[i] = check_source(blocks[i], sources[i]);
        if (out.faults[i] != SlabFault::kNone) continue;
        out.checksums[i] = sources[i].payload_checksum;
        reused = reused || header(blocks[i].slot).state == HeaderState::kReady;
    }
    const auto fail_all = [&](int error) {
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            if (out.faults[i] != SlabFault::kNone) continue;
            out.faults[i] = is_full(error) ? SlabFault::kNoRoom : SlabFault::kError;
            out.errors[i] = error;
        }
        if (!is_full(error)) out.file_error = error;
        return out;
    };
    const bool every_batch = policy == SyncPolicy::kEveryBatch;
    // A slot is empty before the first byte of its new record, and ready after the last one. Emptying slots
    // that were never used gives their headers room on the disk before the records fill it.
    if (const int error = empty_targets(blocks, out)) return fail_all(error);
    if (every_batch && reused)
        if (const int error = sync()) return fail_all(error);
    unsynced_ = true;
    move_all(blocks, limits, true, out);
    if (every_batch)
        if (const int error = sync()) return fail_all(error);
    std::vector<std::uint32_t> written;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (out.faults[i] != SlabFault::kNone) continue;
        // The host slot may have been reused meanwhile.
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
