// The least that a prefix cache can cost: a hash table of block digests, reference counts, and one list of
// free blocks in order of last use. It has one tier and one full-attention group; it plans no copies, keeps
// no tree, counts nothing, checks nothing, and XXH3 resists no attacker. Only a measure for managers that do
// more.

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

namespace {

using BlockId = std::int32_t;
using Token = std::int32_t;

constexpr BlockId kNone = -1;

struct Digest {
    std::uint64_t low = 0, high = 0;

    bool operator==(const Digest &) const = default;
};

// Open addressing with linear probing, at most half full; removal moves later entries back.
class Index {
  public:
    explicit Index(std::size_t entries) : slots_(std::bit_ceil(2 * entries + 2)), mask_(slots_.size() - 1) {}

    BlockId find(const Digest &digest) const {
        std::size_t at = home(digest);
        while (slots_[at].block != kNone && slots_[at].digest != digest) {
            at = next(at);
        }
        return slots_[at].block;
    }

    void insert(const Digest &digest, BlockId block) {
        std::size_t at = home(digest);
        while (slots_[at].block != kNone) {
            at = next(at);
        }
        slots_[at] = {digest, block};
    }

    void remove(const Digest &digest) {
        std::size_t hole = home(digest);
        while (slots_[hole].digest != digest || slots_[hole].block == kNone) {
            hole = next(hole);
        }
        for (std::size_t at = next(hole); slots_[at].block != kNone; at = next(at)) {
            const std::size_t displacement = (at - home(slots_[at].digest)) & mask_;
            if (displacement >= ((at - hole) & mask_)) {
                slots_[hole] = slots_[at];
                hole = at;
            }
        }
        slots_[hole].block = kNone;
    }

  private:
    struct Slot {
        Digest digest;
        BlockId block = kNone;
    };

    std::size_t home(const Digest &digest) const { return digest.low & mask_; }
    std::size_t next(std::size_t at) const { return (at + 1) & mask_; }

    std::vector<Slot> slots_;
    std::size_t mask_;
};

struct Request {
    std::span<const Token> prompt;
    std::vector<Digest> digests;
    std::vector<BlockId> table;
    std::vector<Token> tail;
    std::size_t tokens = 0, published = 0;
};

class Pool {
  public:
    Pool(std::size_t block_size, std::size_t blocks)
        : block_size_(block_size),
          blocks_(blocks + 1),
          end_(static_cast<BlockId>(blocks)),
          free_(blocks),
          index_(blocks),
          bytes_(sizeof(Digest) + block_size * sizeof(Token)) {
        blocks_[end_].previous = blocks_[end_].next = end_;
        for (BlockId block = 0; block < end_; ++block) {
            link_before(block, end_);
        }
    }

    void hash(Request &request) {
        const std::size_t full = request.tokens / block_size_;
        request.digests.reserve(full + 1);
        for (std::size_t block = 0; block < full; ++block) {
            append_digest(request, request.prompt.data() + block * block_size_);
        }
        request.tail.assign(request.prompt.begin() + full * block_size_, request.prompt.end());
    }

    // At least one token is left to compute.
    std::size_t match(Request &request) const {
        const std::size_t most = (request.tokens - 1) / block_size_;
        for (std::size_t block = 0; block < most; ++block) {
            const BlockId found = index_.find(request.digests[block]);
            if (found == kNone) {
                break;
            }
            request.table.push_back(found);
        }
        request.published = request.table.size();
        return request.published * block_size_;
    }

    bool allocate(Request &request) {
        const std::size_t wanted = blocks_for(request.tokens);
        std::size_t needed = wanted - request.table.size();
        for (const BlockId block : request.table) {
            needed += blocks_[block].references == 0;
        }
        if (needed > free_) {
            return false;
        }
        for (const BlockId block : request.table) {
            if (blocks_[block].references++ == 0) {
                unlink(block);
            }
        }
        request.table.reserve(wanted);
        while (request.table.size() < wanted) {
            request.table.push_back(take());
        }
        return true;
    }

    void publish(Request &request) {
        for (; request.published < request.digests.size(); ++request.published) {
            const Digest &digest = request.digests[request.published];
            Block &block = blocks_[request.table[request.published]];
            if (!block.cached && index_.find(digest) == kNone) {
                block.digest = digest;
                block.cached = true;
                index_.insert(digest, request.table[request.published]);
            }
        }
    }

    bool decode(Request &request, std::span<const Token> output) {
        const std::size_t wanted = blocks_for(request.tokens + output.size());
        if (wanted - request.table.size() > free_) {
            return false;
        }
        request.tokens += output.size();
        while (request.table.size() < wanted) {
            request.table.push_back(take());
        }
        request.tail.insert(request.tail.end(), output.begin(), output.end());
        std::size_t hashed = 0;
        for (; request.tail.size() - hashed >= block_size_; hashed += block_size_) {
            append_digest(request, request.tail.data() + hashed);
        }
        if (hashed > 0) {
            request.tail.erase(request.tail.begin(),
                               request.tail.begin() + static_cast<std::ptrdiff_t>(hashed));
            publish(request);
        }
        return true;
    }

    // The end of a path is evicted before its beginning, and blocks without content before all others.
    void release(const Request &request) {
        for (std::size_t at = request.table.size(); at-- > 0;) {
            const BlockId block = request.table[at];
            if (--blocks_[block].references == 0) {
                link_before(block, blocks_[block].cached ? end_ : blocks_[end_].next);
                ++free_;
            }
        }
    }

    std::size_t free() const { return free_; }

  private:
    struct Block {
        Digest digest;
        std::int32_t references = 0;
        BlockId previous = kNone, next = kNone;
        bool cached = false;
    };

    std::size_t blocks_for(std::size_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }

    void append_digest(Request &request, const Token *tokens) {
        const Digest parent = request.digests.empty() ? Digest{} : request.digests.back();
        std::memcpy(bytes_.data(), &parent, sizeof parent);
        std::memcpy(bytes_.data() + sizeof parent, tokens, block_size_ * sizeof(Token));
        const XXH128_hash_t digest = XXH3_128bits(bytes_.data(), bytes_.size());
        request.digests.push_back({digest.low64, digest.high64});
    }

    BlockId take() {
        const BlockId taken = blocks_[end_].next;
        Block &block = blocks_[taken];
        unlink(taken);
        if (block.cached) {
            index_.remove(block.digest);
            block.cached = false;
        }
        block.references = 1;
        return taken;
    }

    void link_before(BlockId block, BlockId after) {
        const BlockId before = blocks_[after].previous;
        blocks_[block].previous = before;
        blocks_[block].next = after;
        blocks_[before].next = blocks_[after].previous = block;
    }

    void unlink(BlockId block) {
        blocks_[blocks_[block].previous].next = blocks_[block].next;
        blocks_[blocks_[block].next].previous = blocks_[block].previous;
        --free_;
    }

    std::size_t block_size_;
    std::vector<Block> blocks_;
    BlockId end_;
    std::size_t free_;
    Index index_;
    std::vector<unsigned char> bytes_;
};

bool copy_table(const Request &request, std::size_t first, BlockId *out) {
    std::memcpy(out, request.table.data() + first, (request.table.size() - first) * sizeof(BlockId));
    return true;
}

}  // namespace

// Functions for ctypes. Those that take blocks return false if there are too few; they write the blocks that
// they added to `out`, `allocate` the whole table.
extern "C" {

Pool *pool_open(std::size_t block_size, std::size_t blocks) {
    return std::make_unique<Pool>(block_size, blocks).release();
}

void pool_close(Pool *pool) {
    std::unique_ptr<Pool>{pool}.reset();
}

std::size_t pool_free_blocks(const Pool *pool) {
    return pool->free();
}

// The prompt is not copied.
Request *request_open(const Token *prompt, std::size_t tokens) {
    auto request = std::make_unique<Request>();
    request->prompt = {prompt, tokens};
    request->tokens = tokens;
    return request.release();
}

void request_hash(Pool *pool, Request *request) {
    pool->hash(*request);
}

std::size_t request_match(Pool *pool, Request *request) {
    return pool->match(*request);
}

bool request_allocate(Pool *pool, Request *request, BlockId *out) {
    return pool->allocate(*request) && copy_table(*request, 0, out);
}

void request_commit(Pool *pool, Request *request) {
    pool->publish(*request);
}

bool request_decode(Pool *pool, Request *request, const Token *output, std::size_t tokens, BlockId *out) {
    const std::size_t before = request->table.size();
    return pool->decode(*request, {output, tokens}) && copy_table(*request, before, out);
}

// One token for each request; `out` gets the last block of each.
bool step_decode(Pool *pool, Request *const *requests, const Token *tokens, std::size_t count, BlockId *out) {
    for (std::size_t at = 0; at < count; ++at) {
        if (!pool->decode(*requests[at], {tokens + at, 1})) {
            return false;
        }
        out[at] = requests[at]->table.back();
    }
    return true;
}

void request_close(Pool *pool, Request *request) {
    pool->release(*request);
    std::unique_ptr<Request>{request}.reset();
}
}
