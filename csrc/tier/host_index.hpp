// The host tier as the planners of an engine see it: `Tier`, one of this process, or `SharedHost`, that of a
// service.
//
// A request finds and pins a run (`find_and_pin`) and gives it back (`release`); a load that was planned from
// it reads the slots meanwhile (`begin_load`, `end_load`). A copy to the host reserves slots (`reserve`) as
// far as there is `room`, and makes their blocks findable (`complete`). The host is closed under prefixes:
// with a block it has all those above it, so blocks are reserved and completed parents first.
//
// A service that cannot be reached is a host with nothing in it and without room: no call fails because of
// it. What was reserved or loaded before still has to be ended here.
//
// Whoever calls has the lock of its manager, and with a service the interpreter lock; `Tier` has a lock of
// its own besides. Each call looks at many blocks, so that none of them costs a virtual call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hash/digest.hpp"
#include "tier/block_list.hpp"

namespace fdcache {

using LeaseId = std::uint64_t;

// May a look-up be answered from shared memory although the service may read blocks from storage?
enum class StorageUse : std::uint8_t {
    kNone,          // yes: nothing is read for this request
    kIfIncomplete,  // if everything is found
    kRunning,       // no: blocks of this request are being read
};

// Blocks of a path on the host, from some block on, in path order. `lease` pins them until it is released.
struct HostRun {
    LeaseId lease = 0;  // 0: there is no run
    std::vector<Slot> slots;
    std::vector<std::uint32_t> generations;
    std::vector<std::uint8_t> unverified;  // 1: the record is not verified; empty: all are
    std::size_t from_storage = 0;          // blocks that were read from storage for the request

    std::size_t size() const { return slots.size(); }
    void keep_first(std::size_t count);
    void drop_first(std::size_t count);
    // Some of the blocks, pinned by the same lease.
    HostRun part(std::size_t first, std::size_t stop) const;
};

// A load that every rank has reported, or of which some copies failed.
struct EndedLoad {
    std::span<const Slot> slots;
    std::span<const Digest> hashes;
    std::span<const std::uint8_t> copied;    // 1: every rank has the block
    std::span<const std::uint8_t> bad = {};  // 1: the record is to be forgotten; empty: none is
};

class HostIndex {
  public:
    static constexpr std::size_t kMostAsked = 64;

    virtual ~HostIndex() = default;

    struct Found {
        HostRun run;
        bool pending = false;     // the block after the run is on its way to the host
        std::size_t ask_for = 0;  // if not 0: the service has to be asked for as many blocks of the path
    };
    // Pins the leading run of a path from `start` on.
    virtual Found find_and_pin(std::span<const Digest> path, std::size_t start, StorageUse storage) = 0;
    // Unpins a run. Blocks of it that are being loaded stay until the load ends, and count as used. Returns
    // false if it was released before.
    virtual bool release(LeaseId lease) = 0;
    // Keeps slots of a run that is not released until the load of them ends.
    virtual void begin_load(LeaseId lease, std::span<const Slot> slots) = 0;
    virtual void end_load(const EndedLoad &ended) = 0;
    // Ends a load that was planned and reads nothing: it tells nothing of the records.
    virtual void cancel_load(std::span<const Slot> slots) = 0;
    // Takes note of what precedes blocks, some of which may have come as runs with an unknown parent. A
    // service learns it from look-ups and copies.
    virtual void join(std::span<const Digest>, std::span<const Digest>) {}

    virtual std::vector<Presence> contains(std::span<const Digest> hashes) const = 0;
    // A bit for each of up to `kMostAsked` blocks that is there or on its way.
    virtual std::uint64_t holds(std::span<const Digest *const> digests) const = 0;
    // About how many blocks are there.
    virtual std::size_t blocks() const = 0;

    // The most blocks that may be copied now, of all blocks of the tier. A service grants room in the
    // background: if there is less than the whole tier, more may come.
    virtual std::size_t room() const = 0;
    virtual std::size_t capacity() const = 0;
    // The longest path that there can ever be room for, as far as that is known: a service's tier may grow.
    virtual std::size_t longest_path() const { return SIZE_MAX; }
    // Reserves a slot for a copy of each hash that is absent and whose parent is there or reserved earlier in
    // this call; none at all if some are missing. `below_pending`: the copy of a parent may be in flight.
    virtual CopyReservation reserve(std::span<const Digest> parents, std::span<const Digest> hashes,
                                    bool below_pending) = 0;
    // Ends copies into reserved slots. Returns 1 for each block that is there, or will be.
    virtual std::vector<std::uint8_t> complete(std::span<const Slot> slots,
                                               std::span<const std::uint8_t> copied,
                                               std::span<const std::uint64_t> checksums) = 0;
};

}  // namespace fdcache
