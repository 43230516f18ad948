// Fuzz target: the keys of a request's blocks, however its tokens arrive and whichever instructions hash
// them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hash/block_hash.hpp"
#include "hash/checksum.hpp"
#include "native/bytes.hpp"
#include "native/checks.hpp"

namespace fdcache::tests {
namespace {

using Hashes = std::vector<Digest>;

struct Arguments {
    std::int64_t block_size;
    std::int64_t lookahead;
    ExtraKeys extra_keys;
};

std::string some_text(Bytes &bytes) {
    std::string text(bytes.below(70), 'x');
    for (char &each : text) each = static_cast<char>(bytes.next());
    return text;
}

// Throws HashingError for items that overlap, or have no token.
ExtraKeys some_extra_keys(Bytes &bytes) {
    std::optional<std::string> adapter;
    if (bytes.one_in(3)) adapter = some_text(bytes);
    std::vector<MultimodalItem> items(bytes.below(4));
    std::int64_t end = 0;
    for (MultimodalItem &item : items) {
        item.offset = end + bytes.below(60) - bytes.one_in(32);
        item.length = bytes.below(100) + !bytes.one_in(32);
        item.hash = some_text(bytes);
        item.is_text = bytes.below(2);
        end = item.end();
    }
    return {std::move(adapter), std::move(items)};
}

class Keys {
  public:
    Keys(Bytes &bytes, Arguments arguments) : bytes_(bytes), arguments_(std::move(arguments)) {
        const std::size_t count = bytes_.next() * 4;
        tokens_.resize(count);
        std::uint32_t state = bytes_.next();
        for (auto &each : tokens_) {
            state = state * 1664525u + 1013904223u;
            each = static_cast<std::int32_t>(state);
        }
    }

    void check() {
        const auto backends = hash_backends();
        const Hashes wanted = at_once(backends.back(), tokens_);
        for (const HashBackend &backend : backends) {
            expect(at_once(backend, tokens_) == wanted, std::string(backend.name) + " hashes otherwise");
            expect(in_pieces(backend, wanted.size()) == wanted, std::string(backend.name) + " in pieces");
        }
        expect(appended() == wanted, "tokens that arrive in pieces give other hashes");
        if (wanted.empty()) return;
        check_from_the_middle(wanted);
        check_another_token(wanted);
    }

  private:
    BlockChain chain(const HashBackend &backend, const Digest &parent, std::size_t block) const {
        return {arguments_.block_size,
                parent,
                static_cast<std::int64_t>(block) * arguments_.block_size,
                arguments_.extra_keys,
                arguments_.lookahead,
                backend};
    }

    Hashes at_once(const HashBackend &backend, const std::vector<std::int32_t> &tokens) const {
        BlockChain whole = chain(backend, kRoot, 0);
        Hashes hashes(whole.blocks_in(tokens.size()));
        whole.extend(tokens.data(), hashes);
        return hashes;
    }

    Hashes in_pieces(const HashBackend &backend, std::size_t count) {
        BlockChain growing = chain(backend, kRoot, 0);
        Hashes hashes(count);
        for (std::size_t done = 0; done < count;) {
            const std::size_t piece = std::min<std::size_t>(1 + bytes_.below(40), count - done);
            growing.extend(tokens_.data() + done * growing.block_size(),
                           std::span(hashes).subspan(done, piece));
            done += piece;
        }
        return hashes;
    }

    Hashes appended() {
        TokenBlocks blocks(arguments_.block_size, kRoot, arguments_.extra_keys, arguments_.lookahead);
        for (std::size_t done = 0; done < tokens_.size();) {
            const std::size_t piece = std::min<std::size_t>(1 + bytes_.next(), tokens_.size() - done);
            std::copy_n(tokens_.begin() + static_cast<std::ptrdiff_t>(done), piece, blocks.extend(piece));
            blocks.commit(piece);
            done += piece;
        }
        return {blocks.hashes().data(), blocks.hashes().data() + blocks.hashes().size()};
    }

    void check_from_the_middle(const Hashes &wanted) {
        const std::size_t first = bytes_.below(wanted.size());
        BlockChain rest = chain(best_hash_backend(), first ? wanted[first - 1] : kRoot, first);
        Hashes hashes(wanted.size() - first);
        rest.extend(tokens_.data() + first * rest.block_size(), hashes);
        expect(std::equal(hashes.begin(), hashes.end(), wanted.begin() + static_cast<std::ptrdiff_t>(first)),
               "a chain that starts at a later block has other hashes");
    }

    // Another token changes the block that has it, those that look ahead to it, and all after them.
    void check_another_token(const Hashes &wanted) {
        const auto size = static_cast<std::size_t>(arguments_.block_size);
        const auto lookahead = static_cast<std::size_t>(arguments_.lookahead);
        const std::size_t covered = wanted.size() * size + lookahead;
        const std::size_t changed = (std::size_t{bytes_.next()} << 8 | bytes_.next()) % covered;
        std::vector<std::int32_t> tokens = tokens_;
        tokens[changed] ^= 1 << bytes_.below(31);
        const Hashes hashes = at_once(best_hash_backend(), tokens);
        for (std::size_t block = 0; block < wanted.size(); ++block) {
            const bool same = (block + 1) * size + lookahead <= changed;
            expect((hashes[block] == wanted[block]) == same, "the wrong blocks change with a token");
        }
    }

    static inline const Digest kRoot = root_hash(Digest{}, std::nullopt);

    Bytes &bytes_;
    Arguments arguments_;
    std::vector<std::int32_t> tokens_;
};

// Sums of parts at any address, between buffers of their exact size.
void check_sums(Bytes &bytes) {
    const std::size_t nbytes = bytes.next() * (bytes.one_in(4) ? 37 : 1);
    const std::size_t shift = bytes.below(9);
    const std::uint64_t first = bytes.next();
    const auto source = std::make_unique<std::uint8_t[]>(nbytes + shift);
    const auto target = std::make_unique<std::uint8_t[]>(nbytes + shift);
    for (std::size_t i = 0; i < nbytes; ++i) source[shift + i] = bytes.empty() ? i * 7 : bytes.next();
    const std::uint8_t *data = source.get() + shift;
    const std::uint64_t whole = checksum_part(data, nbytes, first);
    expect(copy_with_checksum(target.get() + shift, data, nbytes, first) == whole, "a copy has another sum");
    expect(std::equal(data, data + nbytes, target.get() + shift), "a copy has other bytes");
    const std::size_t words = bytes.below(nbytes / 8 + 1);
    expect(checksum_part(data, 8 * words, first) +
                   checksum_part(data + 8 * words, nbytes - 8 * words, first + words) ==
               whole,
           "two parts have another sum");
}

void check(Bytes bytes) {
    check_sums(bytes);
    Arguments arguments{};
    arguments.block_size = bytes.below(80) + !bytes.one_in(64);
    arguments.lookahead = bytes.below(4);
    try {
        arguments.extra_keys = some_extra_keys(bytes);
        Keys(bytes, std::move(arguments)).check();
    } catch (const HashingError &) {
    }
}

}  // namespace
}  // namespace fdcache::tests

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    fdcache::tests::check(fdcache::tests::Bytes({data, size}));
    return 0;
}
