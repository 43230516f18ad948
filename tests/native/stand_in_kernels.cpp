#include "native/stand_in_kernels.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hash/checksum.hpp"
#include "native/stand_in_gpus.hpp"
#include "native/stand_in_memory.hpp"
#include "swap/items.hpp"

namespace fdcache::stand_in {
namespace {

using namespace fdcache::swap;

template <typename Value>
Value argument(void **arguments, std::size_t index) {
    return *static_cast<Value *>(arguments[index]);
}

std::function<void()> bind_copy_words(void **arguments) {
    return [from = argument<const Word *>(arguments, 0), to = argument<Word *>(arguments, 1),
            count = argument<unsigned>(arguments, 2)] {
        expect_reached(from, count * sizeof(Word));
        expect_reached(to, count * sizeof(Word));
        std::memcpy(to, from, count * sizeof(Word));
    };
}

enum class Way { kIn, kOut, kSum };

void move_chunk(Way way, const Chunk &chunk, Block &block, Word record_start, const Target &target) {
    auto *plane = reinterpret_cast<std::uint8_t *>(chunk.base + static_cast<Word>(chunk.stride * block.slot));
    auto *record = reinterpret_cast<std::uint8_t *>(record_start + chunk.offset - target.offset);
    expect_reached(plane, chunk.nbytes);
    if (way == Way::kIn) {
        expect_reached(record, chunk.nbytes);
        std::memcpy(plane, record, chunk.nbytes);
        return;
    }
    block.sum += checksum_part(plane, chunk.nbytes, chunk.offset / sizeof(Word));
    if (way == Way::kSum) return;
    const unsigned padding = target.staging != 0 ? chunk.padding : 0;
    expect_reached(record, chunk.nbytes + padding);
    std::memcpy(record, plane, chunk.nbytes);
    std::memset(record + chunk.nbytes, 0, padding);
}

template <Way kWay>
std::function<void()> bind_move(void **arguments) {
    return [chunks = argument<const Chunk *>(arguments, 0), blocks = argument<Block *>(arguments, 1),
            range = argument<Range>(arguments, 2), target = argument<Target>(arguments, 3)] {
        for (unsigned row = 0; row < range.num_blocks; ++row) {
            Block &block = blocks[range.first_block + row];
            const Word start = target.staging == 0 ? block.record : target.staging + row * target.pitch;
            for (unsigned i = 0; i < range.num_chunks; ++i) {
                move_chunk(kWay, chunks[range.first_chunk + i], block, start, target);
            }
        }
    };
}

std::function<void()> bind_read_peer(void **arguments) {
    return [chunks = argument<const Chunk *>(arguments, 0), theirs = argument<const Chunk *>(arguments, 1),
            blocks = argument<const Block *>(arguments, 2), range = argument<Range>(arguments, 3)] {
        for (unsigned row = 0; row < range.num_blocks; ++row) {
            const Block &block = blocks[range.first_block + row];
            for (unsigned i = range.first_chunk; i < range.first_chunk + range.num_chunks; ++i) {
                const auto place = static_cast<long long>(block.record);
                auto *to = reinterpret_cast<std::uint8_t *>(chunks[i].base + chunks[i].stride * block.slot);
                auto *from = reinterpret_cast<std::uint8_t *>(theirs[i].base + theirs[i].stride * place);
                expect_reached(to, chunks[i].nbytes);
                expect_reached(from, chunks[i].nbytes);
                std::memcpy(to, from, chunks[i].nbytes);
            }
        }
    };
}

}  // namespace

cuda::Kernels kernels(int gpu) {
    using Functions = std::array<cuda::CUfunc_st, 5>;
    static std::array<Functions, kMostGpus> of_gpus = [] {
        std::array<Functions, kMostGpus> made;
        for (int each = 0; each < kMostGpus; ++each) {
            made[each] = {{{bind_move<Way::kIn>, each},
                           {bind_move<Way::kOut>, each},
                           {bind_move<Way::kSum>, each},
                           {bind_copy_words, each},
                           {bind_read_peer, each}}};
        }
        return made;
    }();
    auto &[copy_in, copy_out, sum, copy_words, read_peer] = of_gpus.at(gpu);
    return {&copy_in, &copy_out, &sum, &copy_words, &read_peer};
}

}  // namespace fdcache::stand_in
