// Chained block hashes. docs/format.md writes every byte down.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/digest.hpp"
#include "core/sha256.hpp"

namespace fdcache {

struct HashingError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// An image, audio clip or the like, whose placeholders are the tokens [offset, offset + length) of a request.
struct MultimodalItem {
    std::int64_t offset;
    std::int64_t length;
    std::string hash;
    bool is_text;

    std::int64_t end() const { return offset + length; }
};

// What decides a request's KV beside its tokens and its root.
class ExtraKeys {
  public:
    ExtraKeys() = default;
    // Throws HashingError unless the items are non-empty, in order and disjoint.
    ExtraKeys(std::optional<std::string> adapter, std::vector<MultimodalItem> items);

    bool empty() const { return adapter_.empty() && items_.empty(); }
    const std::vector<MultimodalItem> &items() const { return items_; }

    // Positions of the items that the block of tokens [start, end) meets, looking from item `index` on;
    // `index` becomes the item from which to look for the next block.
    std::vector<std::size_t> block_items(std::int64_t start, std::int64_t end, std::size_t &index) const;

    // Appends the block's canonical extra keys to `out`; nothing when it has none.
    void encode(std::int64_t start, std::int64_t end, std::size_t &index,
                std::vector<std::uint8_t> &out) const;

  private:
    std::vector<std::uint8_t> adapter_;  // encoded
    std::vector<MultimodalItem> items_;
};

Digest root_hash(const Digest &fingerprint, std::optional<std::string_view> tenant);

// Continues a chain of block hashes; what is already hashed costs nothing again.
class BlockChain {
  public:
    // `parent` is the hash before the block at token `start`: the root when `start` is 0. A block's hash
    // covers `lookahead` tokens after it too. Throws HashingError unless block_size is positive, start a
    // non-negative multiple of it, and lookahead not negative.
    BlockChain(std::int64_t block_size, const Digest &parent, std::int64_t start, ExtraKeys extra_keys,
               std::int64_t lookahead = 0, const sha256::Backend &backend = sha256::best_backend());

    std::size_t block_size() const { return block_size_; }

    // How many blocks can be hashed of so many tokens.
    std::size_t blocks_in(std::size_t tokens) const {
        return tokens < lookahead_ ? 0 : (tokens - lookahead_) / block_size_;
    }

    // Hashes the next `out.size()` blocks, whose tokens lie at `tokens`, those they look ahead to behind
    // them.
    void extend(const std::int32_t *tokens, std::span<Digest> out);

  private:
    // Appends what the key of the block at `position_` covers beside its tokens and its parent.
    void encode_extra(const std::int32_t *following);

    std::size_t block_size_, lookahead_;
    Digest parent_;
    std::int64_t position_;
    ExtraKeys extra_keys_;
    std::size_t item_index_ = 0;
    const sha256::Backend *backend_;
    std::vector<std::uint8_t> tail_;
};

}  // namespace fdcache
