// Block hashes and arrays that readers keep while they grow.
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "hash/block_hash.hpp"
#include "hash/checksum.hpp"
#include "native/checks.hpp"
#include "native/threads.hpp"

namespace fdcache::tests {
namespace {

std::int32_t token(std::size_t position) {
    return static_cast<std::int32_t>(position * 2654435761u % 128000);
}

Digest root() {
    return root_hash(Digest{}, "tenant");
}

// What a reader has of an array: it stays the same whatever is appended later.
template <typename T>
struct View {
    std::shared_ptr<T[]> store;
    std::size_t size;
};

template <typename T>
View<T> view(const AppendOnly<T> &array) {
    return {array.share(), array.size()};
}

struct Views {
    View<std::int32_t> tokens;
    View<Digest> hashes;
};

// Hands views from the thread that appends to those that read.
class Channel {
  public:
    void send(Views views) {
        const std::lock_guard lock(mutex_);
        sent_.push_back(std::move(views));
        changed_.notify_one();
    }
    void close() {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        changed_.notify_all();
    }
    std::optional<Views> receive() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return closed_ || !sent_.empty(); });
        if (sent_.empty()) return std::nullopt;
        Views views = std::move(sent_.front());
        sent_.pop_front();
        return views;
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Views> sent_;
    bool closed_ = false;
};

void read_while_it_grows() {
    constexpr std::size_t kBlock = 4, kTokens = 6000;
    constexpr int kReaders = 3;
    std::vector<std::int32_t> tokens(kTokens);
    for (std::size_t i = 0; i < kTokens; ++i) tokens[i] = token(i);
    Digest wanted[kTokens / kBlock];
    BlockChain(kBlock, root(), 0, {}).extend(tokens.data(), wanted);
    Channel channel;
    std::size_t seen[kReaders]{};
    run_threads(kReaders + 1, [&](int thread) {
        if (thread < kReaders) {
            while (const auto views = channel.receive()) {
                for (std::size_t i = 0; i < views->tokens.size; ++i)
                    expect(views->tokens.store[i] == token(i), "a token changed under a reader");
                for (std::size_t i = 0; i < views->hashes.size; ++i)
                    expect(views->hashes.store[i] == wanted[i], "a hash changed under a reader");
                seen[thread] += views->tokens.size;
            }
            return;
        }
        TokenBlocks blocks(kBlock, root(), {}, 0);
        for (std::size_t at = 0; at < kTokens;) {
            const std::size_t count = std::min(1 + at % 7, kTokens - at);
            std::int32_t *out = blocks.extend(count);
            for (std::size_t i = 0; i < count; ++i) out[i] = token(at + i);
            blocks.commit(count);
            at += count;
            if (at % 5 == 0) channel.send({view(blocks.tokens()), view(blocks.hashes())});
        }
        expect(blocks.hashes().size() == kTokens / kBlock, "not every block is hashed");
        channel.close();
    });
    expect(seen[0] + seen[1] + seen[2] > kTokens, "the readers read next to nothing");
}

void hash_in_threads() {
    constexpr std::size_t kBlock = 16, kBlocks = 64;
    std::vector<std::int32_t> tokens(kBlock * kBlocks);
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = token(i);
    std::vector<Digest> wanted(kBlocks);
    BlockChain(kBlock, root(), 0, {}, 0, hash_backends().back()).extend(tokens.data(), wanted);
    run_threads(4, [&](int thread) {
        const auto backends = hash_backends();
        std::vector<Digest> hashes(kBlocks);
        for (int round = 0; round < 20; ++round) {
            const HashBackend &backend = backends[(thread + round) % backends.size()];
            BlockChain(kBlock, root(), 0, {}, 0, backend).extend(tokens.data(), hashes);
            expect(hashes == wanted, std::string(backend.name) + " hashes otherwise than portable");
        }
    });
}

// Sums of parts, at any alignment, up to the ends of their buffers.
void sum_parts() {
    for (const std::size_t nbytes : {1u, 7u, 8u, 63u, 64u, 1000u, 4096u, 70000u}) {
        for (std::size_t shift = 0; shift < 9; ++shift) {
            const auto source = std::make_unique<std::uint8_t[]>(nbytes + shift);
            const auto target = std::make_unique<std::uint8_t[]>(nbytes + shift);
            for (std::size_t i = 0; i < nbytes; ++i)
                source[shift + i] = static_cast<std::uint8_t>(token(i + nbytes));
            const std::uint64_t whole = checksum_part(source.get() + shift, nbytes, 5);
            expect(whole == copy_with_checksum(target.get() + shift, source.get() + shift, nbytes, 5),
                   "a copy has another sum");
            expect(std::equal(source.get() + shift, source.get() + shift + nbytes, target.get() + shift),
                   "a copy has other bytes");
            const std::size_t half = nbytes / 16 * 8;
            expect(whole == checksum_part(source.get() + shift, half, 5) +
                                checksum_part(source.get() + shift + half, nbytes - half, 5 + half / 8),
                   "two halves have another sum");
        }
    }
}

// Threads fill large arrays, let others of them go, and read what they keep: memory that is used again is
// nobody else's.
void use_memory_again() {
    constexpr std::size_t kLarge = SpareMemory::kLeast / sizeof(std::int32_t);
    const void *freed = nullptr;
    {
        AppendOnly<std::int32_t> first;
        freed = first.extend(2 * kLarge);
    }
    AppendOnly<std::int32_t> next;
    expect(next.extend(2 * kLarge) == freed, "a large array did not get the memory of the one before");
    run_threads(4, [](int thread) {
        std::vector<std::shared_ptr<std::int32_t[]>> kept;
        for (std::size_t round = 0; round < 40; ++round) {
            const std::size_t count = kLarge * (1 + round % 5);
            const auto value = 100 * thread + static_cast<std::int32_t>(round);
            AppendOnly<std::int32_t> array;
            std::fill_n(array.extend(count), count, value);
            array.commit(count);
            if (round % 4 == 0) kept.push_back(array.share());
            for (std::size_t i = 0; i < kept.size(); ++i)
                expect(kept[i][kLarge - 1] == 100 * thread + 4 * static_cast<std::int32_t>(i),
                       "an array that is in use was overwritten");
        }
    });
}

const Cases kCases{
    {"read-while-it-grows", read_while_it_grows},
    {"hash-in-threads", hash_in_threads},
    {"use-memory-again", use_memory_again},
    {"sum-parts", sum_parts},
};

}  // namespace
}  // namespace fdcache::tests

int main(int count, char **arguments) {
    return fdcache::tests::run_cases(fdcache::tests::kCases, count, arguments);
}
