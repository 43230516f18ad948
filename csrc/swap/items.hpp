// Arguments of the swap kernels. Compiled by the C++ core, by nvcc and by NVRTC, which has no headers.
#ifndef FDCACHE_SWAP_ITEMS_HPP
#define FDCACHE_SWAP_ITEMS_HPP

namespace fdcache::swap {

using Word = unsigned long long;

// Largest chunk: the bytes that one warp copies at a time.
constexpr unsigned kChunkBytes = 8192;

// A piece of one plane, the same in every device block and every record.
struct Chunk {
    Word base;         // device address of the piece in block 0
    long long stride;  // bytes to the same piece of the next block
    Word offset;       // of the piece in the record, a multiple of 8
    unsigned nbytes;
    unsigned padding;  // zero bytes up to the next plane
};

// One block of a batch.
struct Block {
    Word
        record;  // device-visible address of the record; of a read from a peer, the number of the block there
    Word sum;    // of its words so far, for the record checksum
    long long slot;
};

// The other side of a copy: the records themselves, or rows of a staging buffer.
struct Target {
    Word staging;  // address of the first block's row; 0: the records
    Word pitch;    // bytes from row to row
    Word offset;   // of the rows' first byte in the record
};

// A rectangle of blocks x chunks.
struct Range {
    unsigned first_block;
    unsigned num_blocks;
    unsigned first_chunk;
    unsigned num_chunks;
};

}  // namespace fdcache::swap

#endif
