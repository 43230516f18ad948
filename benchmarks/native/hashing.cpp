// Nanoseconds for each block's key, by implementation, block size and number of blocks, without Python.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <span>
#include <vector>

#include "hash/block_hash.hpp"

namespace {

using fdcache::BlockChain;
using fdcache::Digest;

constexpr int repeats = 60;
constexpr std::size_t most_blocks = 2048;

// The shortest time of one of `blocks` keys, when keys are made `blocks` at a time.
double best_ns(const fdcache::HashBackend &backend, std::int64_t block_size, std::size_t blocks,
               const fdcache::ExtraKeys &extra_keys, std::span<const std::int32_t> tokens) {
    std::vector<Digest> keys(most_blocks);
    const std::size_t total = most_blocks / blocks * blocks;
    double best = 1e30;
    for (int repeat = 0; repeat < repeats; ++repeat) {
        BlockChain chain(block_size, Digest{}, 0, extra_keys, 0, backend);
        const auto start = std::chrono::steady_clock::now();
        for (std::size_t done = 0; done < total; done += blocks)
            chain.extend(tokens.data() + done * static_cast<std::size_t>(block_size), {&keys[done], blocks});
        const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
        best = std::min(best, spent.count() / static_cast<double>(total));
    }
    return best;
}

}  // namespace

int main() {
    std::mt19937 random(0);
    std::vector<std::int32_t> tokens(most_blocks * 256);
    for (std::int32_t &token : tokens) token = static_cast<std::int32_t>(random() % 150'000);
    const fdcache::ExtraKeys none, adapter(std::string("sql-lora"), {});
    std::printf("ns per block");
    for (const auto &backend : fdcache::hash_backends()) std::printf("%12s", backend.name);
    std::printf("%12s\n", "adapter");
    for (const std::int64_t block_size : {16, 32, 64, 128, 256}) {
        for (const std::size_t blocks : {1, 4, 190, 2048}) {
            std::printf("%4d x %-5zu", static_cast<int>(block_size), blocks);
            for (const auto &backend : fdcache::hash_backends())
                std::printf("%12.1f", best_ns(backend, block_size, blocks, none, tokens));
            std::printf("%12.1f\n",
                        best_ns(fdcache::best_hash_backend(), block_size, blocks, adapter, tokens));
        }
    }
}
