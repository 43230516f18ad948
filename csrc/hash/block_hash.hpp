// Chained block hashes (docs/format.md has every byte), and the growing list of them that a request keeps.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hash/backends.hpp"
#include "hash/digest.hpp"
#include "hash/spare_memory.hpp"

namespace fdcache {

struct HashingError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An image, audio clip or the like; its placeholders are the tokens [offset, offset + length) of a request.
struct MultimodalItem {
    std::int64_t offset;
    std::int64_t length;
    std::string hash;
    bool is_text;

    std::int64_t end() const { return offset + length; }
};

// The inputs of a request, other than its tokens and its root, that its KV depends on.
class ExtraKeys {
  public:
    ExtraKeys() = default;
    // Throws HashingError unless the items are non-empty, in order and disjoint.
    ExtraKeys(std::optional<std::string> adapter, std::vector<MultimodalItem> items);

    const std::optional<std::string> &adapter() const { return adapter_; }
    const std::vector<MultimodalItem> &items() const { return items_; }

    // Positions of the items that overlap the block of tokens [start, end). The search starts at item
    // `index`, which becomes the start of the search for the next block.
    std::vector<std::size_t> block_items(std::int64_t start, std::int64_t end, std::size_t &index) const;

    // Appends the canonical form of the block's items to `out`, if it has any.
    void encode_items(std::int64_t start, std::int64_t end, std::size_t &index,
                      std::vector<std::uint8_t> &out) const;

  private:
    std::optional<std::string> adapter_;
    std::vector<MultimodalItem> items_;
};

Digest root_hash(const Digest &fingerprint, std::optional<std::string_view> tenant);

// Extends a chain of block hashes. Blocks hashed before are not hashed again.
class BlockChain {
  public:
    // `parent` is the hash before the block at token `start`: the root when `start` is 0. A block's hash
    // also covers the `lookahead` tokens after it. Throws HashingError unless block_size is positive, start
    // is a non-negative multiple of it, and lookahead is not negative.
    BlockChain(std::int64_t block_size, const Digest &parent, std::int64_t start, ExtraKeys extra_keys,
               std::int64_t lookahead = 0, const HashBackend &backend = best_hash_backend());

    std::size_t block_size() const { return block_size_; }

    // Number of blocks that can be hashed from this many tokens.
    std::size_t blocks_in(std::size_t tokens) const {
        return tokens < lookahead_ ? 0 : (tokens - lookahead_) / block_size_;
    }

    // Hashes the next `out.size()` blocks. Their tokens are at `tokens`, followed by the look-ahead tokens.
    void extend(const std::int32_t *tokens, std::span<Digest> out);

  private:
    struct Batch;

    // Digests the tokens of the batch's blocks, two halves each, beside the links of the batch before.
    void digest_tokens(const Batch &batch, const sha256::Links &before);
    // Replaces the second digest of each block that has extra keys.
    void digest_extra_keys(const Batch &batch);
    // Appends the extra keys of the block at `position` to `out`.
    void encode_extra_keys(std::int64_t position, const std::int32_t *following,
                           std::vector<std::uint8_t> &out);

    std::size_t block_size_, lookahead_;
    std::array<blake3::Key, 3>
        keys_;  // of the first half of a block's tokens, the second, and the extra keys
    Digest parent_;
    std::int64_t position_;
    ExtraKeys extra_keys_;
    std::size_t item_index_ = 0;
    const HashBackend *backend_;
    std::vector<std::uint8_t> texts_;  // the extra keys of a batch, kept for its memory
};

// An append-only array. Growing allocates a new store, and `share()` keeps the current one alive, so elements
// never change or move under a reader.
template <typename T>
class AppendOnly {
  public:
    std::size_t size() const { return size_; }
    const T *data() const { return store_.get(); }
    std::shared_ptr<T[]> share() const { return store_; }

    // Reserves room for `count` more elements; commit(count) makes them visible once they are written.
    T *extend(std::size_t count) {
        if (size_ + count > capacity_) {
            const std::size_t capacity = std::max(size_ + count, capacity_ + capacity_ / 2);
            auto store = std::allocate_shared_for_overwrite<T[]>(SpareAllocator<T>(), capacity);
            std::copy_n(store_.get(), size_, store.get());
            store_ = std::move(store);
            capacity_ = capacity;
        }
        return store_.get() + size_;
    }
    void commit(std::size_t count) { size_ += count; }

  private:
    std::shared_ptr<T[]> store_;
    std::size_t size_ = 0, capacity_ = 0;
};

// The tokens of a request and its block hashes, growing at the end.
class TokenBlocks {
  public:
    TokenBlocks(std::int64_t block_size, const Digest &root, ExtraKeys extra_keys, std::int64_t lookahead)
        : chain_(block_size, root, 0, std::move(extra_keys), lookahead) {}

    std::size_t block_size() const { return chain_.block_size(); }
    const AppendOnly<std::int32_t> &tokens() const { return tokens_; }
    const AppendOnly<Digest> &hashes() const { return hashes_; }

    std::int32_t *extend(std::size_t count) { return tokens_.extend(count); }

    // Accepts the `count` tokens written at extend(count) and hashes the blocks that they complete.
    void commit(std::size_t count) {
        const std::size_t blocks = chain_.blocks_in(tokens_.size() + count) - hashes_.size();
        if (blocks > 0) {
            Digest *out = hashes_.extend(blocks);
            chain_.extend(tokens_.data() + hashes_.size() * block_size(), {out, blocks});
            hashes_.commit(blocks);
        }
        tokens_.commit(count);
    }

  private:
    BlockChain chain_;
    AppendOnly<std::int32_t> tokens_;
    AppendOnly<Digest> hashes_;
};

}  // namespace fdcache
