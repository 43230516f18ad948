// A request's tokens and block hashes, growing at the end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/block_hash.hpp"

namespace fdcache {

// An append-only array. What is in it never changes or moves under a reader: growing allocates a new store,
// and `share()` keeps the one it saw alive.
template <typename T>
class AppendOnly {
  public:
    std::size_t size() const { return size_; }
    const T *data() const { return store_.get(); }
    std::shared_ptr<T[]> share() const { return store_; }

    // Room for `count` more, to be written before commit(count) makes them visible.
    T *extend(std::size_t count) {
        if (size_ + count > capacity_) {
            const std::size_t capacity = std::max(size_ + count, capacity_ + capacity_ / 2);
            auto store = std::make_shared_for_overwrite<T[]>(capacity);
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

class TokenBlocks {
  public:
    TokenBlocks(std::int64_t block_size, const Digest &root, ExtraKeys extra_keys, std::int64_t lookahead)
        : chain_(block_size, root, 0, std::move(extra_keys), lookahead) {}

    std::size_t block_size() const { return chain_.block_size(); }
    const AppendOnly<std::int32_t> &tokens() const { return tokens_; }
    const AppendOnly<Digest> &hashes() const { return hashes_; }

    std::int32_t *extend(std::size_t count) { return tokens_.extend(count); }

    // Accepts `count` tokens written at extend(count) and hashes the blocks that they complete.
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
