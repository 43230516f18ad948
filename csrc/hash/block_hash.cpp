#include "hash/block_hash.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

namespace fdcache {
namespace {

constexpr std::string_view root_tag{"fdcache.root.v1\0", 16};
constexpr std::uint8_t root_message = 0, block_message = 1;
constexpr std::uint8_t adapter_entry = 2, text_item_entry = 3, bytes_item_entry = 4, lookahead_entry = 5;

// Number of blocks whose token chunks are hashed side by side; more is not faster.
constexpr std::size_t batch_blocks = 16;

static_assert(std::endian::native == std::endian::little, "the format's integers are little-endian");

template <typename Int>
void put(std::vector<std::uint8_t> &out, Int value) {
    const auto bytes = std::bit_cast<std::array<std::uint8_t, sizeof value>>(value);
    out.insert(out.end(), bytes.begin(), bytes.end());
}

void put_string(std::vector<std::uint8_t> &out, std::string_view text) {
    if (text.size() > std::numeric_limits<std::uint32_t>::max())
        throw HashingError("an extra key or tenant must be shorter than 4 GiB");
    put(out, static_cast<std::uint32_t>(text.size()));
    out.insert(out.end(), text.begin(), text.end());
}

void put_digest(std::vector<std::uint8_t> &out, const Digest &digest) {
    out.insert(out.end(), digest.bytes.begin(), digest.bytes.end());
}

}  // namespace

ExtraKeys::ExtraKeys(std::optional<std::string> adapter, std::vector<MultimodalItem> items)
    : items_(std::move(items)) {
    if (adapter) {
        adapter_.push_back(adapter_entry);
        put_string(adapter_, *adapter);
    }
    std::int64_t end = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
        const std::string where = "multimodal[" + std::to_string(i) + "]: ";
        if (items_[i].length < 1) throw HashingError(where + "length must be at least 1");
        if (items_[i].offset < end)
            throw HashingError(where + "offset " + std::to_string(items_[i].offset) + " must be at least " +
                               std::to_string(end) + "; give the items in order and without overlap");
        if (items_[i].length > std::numeric_limits<std::int64_t>::max() - items_[i].offset)
            throw HashingError(where + "offset + length must fit 64 bits");
        end = items_[i].end();
    }
}

std::vector<std::size_t> ExtraKeys::block_items(std::int64_t start, std::int64_t end,
                                                std::size_t &index) const {
    std::vector<std::size_t> found;
    if (items_.empty() || items_.back().end() <= start) return found;
    for (std::size_t i = index; i < items_.size(); ++i) {
        if (items_[i].end() <= start) continue;
        index = i;
        if (items_[i].offset >= end) return found;
        found.push_back(i);
        if (items_[i].end() > end) return found;
    }
    index = items_.size() - 1;
    return found;
}

void ExtraKeys::encode(std::int64_t start, std::int64_t end, std::size_t &index,
                       std::vector<std::uint8_t> &out) const {
    out.insert(out.end(), adapter_.begin(), adapter_.end());
    for (const std::size_t i : block_items(start, end, index)) {
        const MultimodalItem &item = items_[i];
        out.push_back(item.is_text ? text_item_entry : bytes_item_entry);
        put(out, item.offset - start);
        put(out, item.length);
        put_string(out, item.hash);
    }
}

Digest root_hash(const Digest &fingerprint, std::optional<std::string_view> tenant) {
    std::vector<std::uint8_t> message(root_tag.begin(), root_tag.end());
    put_digest(message, fingerprint);
    if (tenant) put_string(message, *tenant);
    message.push_back(root_message);
    return sha256::digest(sha256::best_backend(), message);
}

BlockChain::BlockChain(std::int64_t block_size, const Digest &parent, std::int64_t start,
                       ExtraKeys extra_keys, std::int64_t lookahead, const sha256::Backend &backend)
    : block_size_(static_cast<std::size_t>(block_size)),
      lookahead_(static_cast<std::size_t>(lookahead)),
      parent_(parent),
      position_(start),
      extra_keys_(std::move(extra_keys)),
      backend_(&backend) {
    if (block_size < 1 || block_size > std::numeric_limits<std::int32_t>::max())
        throw HashingError("block_size must be at least 1 and below 2**31, got " +
                           std::to_string(block_size));
    if (start < 0 || start >= std::int64_t{1} << 62 || start % block_size != 0)
        throw HashingError("start must be a multiple of block_size " + std::to_string(block_size) +
                           " and below 2**62, got " + std::to_string(start));
    if (lookahead < 0 || lookahead > std::numeric_limits<std::int32_t>::max())
        throw HashingError("lookahead must be at least 0 and below 2**31, got " + std::to_string(lookahead));
}

void BlockChain::encode_extra(const std::int32_t *following) {
    const std::int64_t end = position_ + static_cast<std::int64_t>(block_size_);
    if (!extra_keys_.empty()) {
        // The next block may overlap items that this block only looks ahead to.
        std::size_t index = item_index_;
        extra_keys_.encode(position_, end + static_cast<std::int64_t>(lookahead_), index, tail_);
        extra_keys_.block_items(position_, end, item_index_);
    }
    if (lookahead_ == 0) return;
    tail_.push_back(lookahead_entry);
    put(tail_, static_cast<std::uint32_t>(lookahead_));
    const auto *bytes = reinterpret_cast<const std::uint8_t *>(following);
    tail_.insert(tail_.end(), bytes, bytes + lookahead_ * sizeof *following);
}

void BlockChain::extend(const std::int32_t *tokens, std::span<Digest> out) {
    const std::size_t block_bytes = block_size_ * sizeof *tokens;
    const std::size_t chunks = block_bytes / sha256::chunk_bytes;
    const std::size_t chunked_bytes = chunks * sha256::chunk_bytes;
    std::array<sha256::State, batch_blocks> states;
    // The same for every block.
    std::vector<std::uint8_t> trailer;
    put(trailer, static_cast<std::uint32_t>(block_size_));
    trailer.push_back(block_message);
    for (std::size_t done = 0; done < out.size(); done += batch_blocks) {
        const std::size_t count = std::min(batch_blocks, out.size() - done);
        const auto *data = reinterpret_cast<const std::uint8_t *>(tokens + done * block_size_);
        states.fill(sha256::initial_state);
        backend_->compress_many({states.data(), count}, data, block_bytes, chunks);
        for (std::size_t i = 0; i < count; ++i, data += block_bytes) {
            tail_.assign(data + chunked_bytes, data + block_bytes);
            put_digest(tail_, parent_);
            encode_extra(tokens + (done + i + 1) * block_size_);
            tail_.insert(tail_.end(), trailer.begin(), trailer.end());
            parent_ = sha256::finish(*backend_, states[i], tail_, chunked_bytes + tail_.size());
            out[done + i] = parent_;
            position_ += static_cast<std::int64_t>(block_size_);
        }
    }
}

}  // namespace fdcache
