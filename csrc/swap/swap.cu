// Block copies between the layers' tensors and records, in place in host memory or staged on the device.
//
// A warp takes one chunk at a time and keeps eight 16-byte accesses a lane in flight, so that two CTAs cover
// the latency of the link. Copies out add each word, mixed with its position, to the record's checksum
// (csrc/hash/checksum.hpp).
#ifndef __CUDACC_RTC__
#include "swap/items.hpp"
#endif

namespace fdcache::swap {

constexpr unsigned kLanes = 32;
constexpr unsigned kInFlight = 8;

__device__ inline Word mix(Word word) {
    word ^= word >> 32;
    word *= 0xD6E8FEB86659FD93ULL;
    word ^= word >> 29;
    word *= 0xFF51AFD7ED558CCDULL;
    word ^= word >> 32;
    return word;
}

__device__ inline Word mix_at(Word word, Word position) {
    return mix(word + 0x9E3779B97F4A7C15ULL * (position + 1));
}

__device__ inline Word words_of(uint4 value, Word position) {
    const Word low = value.x | (static_cast<Word>(value.y) << 32);
    const Word high = value.z | (static_cast<Word>(value.w) << 32);
    return mix_at(low, position) + mix_at(high, position + 1);
}

// Up to eight bytes, the rest zero.
__device__ inline Word gather_word(const unsigned char *data, unsigned nbytes) {
    Word word = 0;
    for (unsigned i = 0; i < nbytes; ++i) word |= static_cast<Word>(data[i]) << (8 * i);
    return word;
}

struct Piece {
    unsigned char *to;  // null to sum only
    const unsigned char *from;
    unsigned nbytes;
    Word position;  // of its first word in the record
};

// Copies whole 16-byte elements, streaming past the caches: nothing is read twice.
template <bool kCopy, bool kSum>
__device__ inline Word move_vectors(const Piece &piece, unsigned lane) {
    const auto *from = reinterpret_cast<const uint4 *>(piece.from);
    auto *to = reinterpret_cast<uint4 *>(piece.to);
    const unsigned count = piece.nbytes / sizeof(uint4);
    Word sum = 0;
    unsigned at = lane;
    for (; at + kLanes * (kInFlight - 1) < count; at += kLanes * kInFlight) {
        uint4 held[kInFlight];
#pragma unroll
        for (unsigned i = 0; i < kInFlight; ++i) held[i] = __ldcs(from + at + kLanes * i);
#pragma unroll
        for (unsigned i = 0; i < kInFlight; ++i) {
            if (kCopy) __stcs(to + at + kLanes * i, held[i]);
            if (kSum) sum += words_of(held[i], piece.position + 2 * (at + kLanes * i));
        }
    }
    for (; at < count; at += kLanes) {
        const uint4 held = __ldcs(from + at);
        if (kCopy) __stcs(to + at, held);
        if (kSum) sum += words_of(held, piece.position + 2 * at);
    }
    return sum;
}

template <typename Element>
__device__ inline void move_elements(const Piece &piece, unsigned lane) {
    const auto *from = reinterpret_cast<const Element *>(piece.from);
    auto *to = reinterpret_cast<Element *>(piece.to);
    const unsigned count = piece.nbytes / sizeof(Element);
    for (unsigned at = lane; at < count; at += kLanes) to[at] = from[at];
}

__device__ inline Piece rest_of(const Piece &piece, unsigned done) {
    return {piece.to == nullptr ? nullptr : piece.to + done, piece.from + done, piece.nbytes - done,
            piece.position + done / 8};
}

// Copies pieces of any alignment and length: those that 16-byte accesses cannot reach, and their remainders.
template <bool kCopy, bool kSum>
__device__ inline Word move_rest(const Piece &piece, unsigned lane) {
    if (kCopy) {
        const Word both = reinterpret_cast<Word>(piece.to) | reinterpret_cast<Word>(piece.from);
        unsigned done = 0;
        if (both % 4 == 0) {
            move_elements<unsigned>(piece, lane);
            done = piece.nbytes / 4 * 4;
        }
        move_elements<unsigned char>(rest_of(piece, done), lane);
    }
    Word sum = 0;
    if (kSum) {
        for (unsigned word = lane; 8 * word < piece.nbytes; word += kLanes) {
            const unsigned left = piece.nbytes - 8 * word;
            sum += mix_at(gather_word(piece.from + 8 * word, left < 8 ? left : 8), piece.position + word);
        }
    }
    return sum;
}

template <bool kCopy, bool kSum>
__device__ inline Word move_piece(const Piece &piece, unsigned lane) {
    const Word both = reinterpret_cast<Word>(piece.to) | reinterpret_cast<Word>(piece.from);
    if (both % sizeof(uint4) != 0) return move_rest<kCopy, kSum>(piece, lane);
    Word sum = move_vectors<kCopy, kSum>(piece, lane);
    const unsigned done = piece.nbytes / sizeof(uint4) * sizeof(uint4);
    if (done != piece.nbytes) sum += move_rest<kCopy, kSum>(rest_of(piece, done), lane);
    return sum;
}

__device__ inline void add_to(Word *sum, Word part, unsigned lane) {
    for (unsigned step = kLanes / 2; step != 0; step /= 2) part += __shfl_down_sync(~0U, part, step);
    if (lane == 0) atomicAdd(sum, part);
}

enum class Way { kIn, kOut, kSumOnly };

template <Way kWay>
__device__ inline void move_blocks(const Chunk *chunks, Block *blocks, Range range, Target target) {
    constexpr bool kSum = kWay != Way::kIn;
    const unsigned lane = threadIdx.x % kLanes;
    const unsigned warps = gridDim.x * (blockDim.x / kLanes);
    const Word items = static_cast<Word>(range.num_blocks) * range.num_chunks;
    for (Word item = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes; item < items; item += warps) {
        const unsigned row = static_cast<unsigned>(item / range.num_chunks);
        const Chunk chunk = chunks[range.first_chunk + static_cast<unsigned>(item % range.num_chunks)];
        Block *block = blocks + range.first_block + row;
        auto *plane =
            reinterpret_cast<unsigned char *>(chunk.base + static_cast<Word>(chunk.stride * block->slot));
        const Word start = target.staging == 0 ? block->record : target.staging + row * target.pitch;
        auto *record = reinterpret_cast<unsigned char *>(start + chunk.offset - target.offset);
        if (kWay == Way::kIn) {
            move_piece<true, false>({plane, record, chunk.nbytes, 0}, lane);
            continue;
        }
        auto *to = kWay == Way::kOut ? record : nullptr;
        const Word sum =
            move_piece<kWay == Way::kOut, kSum>({to, plane, chunk.nbytes, chunk.offset / 8}, lane);
        // Staging rows are copied to records as a whole, and records hold zeros between planes.
        if (kWay == Way::kOut && target.staging != 0) {
            for (unsigned i = lane; i < chunk.padding; i += kLanes) record[chunk.nbytes + i] = 0;
        }
        add_to(&block->sum, sum, lane);
    }
}

}  // namespace fdcache::swap

using namespace fdcache::swap;

extern "C" __global__ void __launch_bounds__(1024)
    fdcache_copy_in(const Chunk *chunks, Block *blocks, Range range, Target target) {
    move_blocks<Way::kIn>(chunks, blocks, range, target);
}

extern "C" __global__ void __launch_bounds__(1024)
    fdcache_copy_out(const Chunk *chunks, Block *blocks, Range range, Target target) {
    move_blocks<Way::kOut>(chunks, blocks, range, target);
}

extern "C" __global__ void __launch_bounds__(1024)
    fdcache_sum(const Chunk *chunks, Block *blocks, Range range, Target target) {
    move_blocks<Way::kSumOnly>(chunks, blocks, range, target);
}

// Copies blocks between planes: `theirs` are the same chunks of a peer, and the record of a block is its
// number there. Planes of other GPUs are read in place, so that no piece costs a call.
extern "C" __global__ void __launch_bounds__(1024)
    fdcache_read_peer(const Chunk *chunks, const Chunk *theirs, const Block *blocks, Range range) {
    const unsigned lane = threadIdx.x % kLanes;
    const unsigned warps = gridDim.x * (blockDim.x / kLanes);
    const Word items = static_cast<Word>(range.num_blocks) * range.num_chunks;
    for (Word item = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes; item < items; item += warps) {
        const Block &block = blocks[range.first_block + static_cast<unsigned>(item / range.num_chunks)];
        const unsigned index = range.first_chunk + static_cast<unsigned>(item % range.num_chunks);
        const Chunk &mine = chunks[index];
        const Chunk &other = theirs[index];
        const auto place = static_cast<long long>(block.record);
        auto *to = reinterpret_cast<unsigned char *>(mine.base + static_cast<Word>(mine.stride * block.slot));
        auto *from =
            reinterpret_cast<const unsigned char *>(other.base + static_cast<Word>(other.stride * place));
        move_piece<true, false>({to, from, mine.nbytes, 0}, lane);
    }
}

// Copies a small table to or from pinned host memory. On a copy engine it would wait behind the large copies
// of other batches in the same direction.
extern "C" __global__ void __launch_bounds__(1024)
    fdcache_copy_words(const Word *from, Word *to, unsigned count) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        to[i] = from[i];
    }
}
