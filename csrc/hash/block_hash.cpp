#include "hash/block_hash.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

namespace fdcache {
namespace {

// Each followed by zero bytes up to the 32 of a BLAKE3 key. A block's tag is followed by its size and the
// part.
constexpr std::string_view root_tag = "fdcache.root.v2", block_tag = "fdcache.block.v2";
constexpr std::size_t size_word = 4, part_word = 5;
constexpr std::uint8_t text_item_entry = 3, bytes_item_entry = 4, lookahead_entry = 5;

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

std::size_t round_up(std::size_t size, std::size_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
}

void put_digest(std::vector<std::uint8_t> &out, const Digest &digest) {
    out.insert(out.end(), digest.bytes.begin(), digest.bytes.end());
}

blake3::Key tagged_key(std::string_view tag) {
    blake3::Key key{};
    std::memcpy(key.data(), tag.data(), tag.size());
    return key;
}

blake3::Key block_key(std::int64_t block_size, std::uint32_t part) {
    blake3::Key key = tagged_key(block_tag);
    key[size_word] = static_cast<std::uint32_t>(block_size);
    key[part_word] = part;
    return key;
}

}  // namespace

ExtraKeys::ExtraKeys(std::optional<std::string> adapter, std::vector<MultimodalItem> items)
    : adapter_(std::move(adapter)), items_(std::move(items)) {
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

void ExtraKeys::encode_items(std::int64_t start, std::int64_t end, std::size_t &index,
                             std::vector<std::uint8_t> &out) const {
    for (const std::size_t i : block_items(start, end, index)) {
        const MultimodalItem &item = items_[i];
        out.push_back(item.is_text ? text_item_entry : bytes_item_entry);
        put(out, item.offset - start);
        put(out, item.length);
        put_string(out, item.hash);
    }
}

Digest root_hash(const Digest &fingerprint, std::optional<std::string_view> tenant) {
    std::vector<std::uint8_t> message;
    put_digest(message, fingerprint);
    if (tenant) put_string(message, *tenant);
    return keyed_digest(best_hash_backend(), tagged_key(root_tag), message);
}

BlockChain::BlockChain(std::int64_t block_size, const Digest &parent, std::int64_t start,
                       ExtraKeys extra_keys, std::int64_t lookahead, const HashBackend &backend)
    : block_size_(static_cast<std::size_t>(block_size)),
      lookahead_(static_cast<std::size_t>(lookahead)),
      keys_{block_key(block_size, 0), block_key(block_size, 1), block_key(block_size, 2)},
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
    if (extra_keys_.adapter()) {
        std::vector<std::uint8_t> adapter;
        put_string(adapter, *extra_keys_.adapter());
        keys_[0] = std::bit_cast<blake3::Key>(keyed_digest(backend, keys_[0], adapter));
    }
}

void BlockChain::encode_extra_keys(std::int64_t position, const std::int32_t *following,
                                   std::vector<std::uint8_t> &out) {
    const std::int64_t end = position + static_cast<std::int64_t>(block_size_);
    if (!extra_keys_.items().empty()) {
        // The next block may overlap items that this block only looks ahead to.
        std::size_t index = item_index_;
        extra_keys_.encode_items(position, end + static_cast<std::int64_t>(lookahead_), index, out);
        extra_keys_.block_items(position, end, item_index_);
    }
    if (lookahead_ == 0) return;
    out.push_back(lookahead_entry);
    put(out, static_cast<std::uint32_t>(lookahead_));
    const auto *bytes = reinterpret_cast<const std::uint8_t *>(following);
    out.insert(out.end(), bytes, bytes + lookahead_ * sizeof *following);
}

// As many blocks as their halves fill the backend's lanes, or fewer.
struct BlockChain::Batch {
    const std::int32_t *tokens;
    std::size_t blocks;
    // Of the two halves of block i at 2 * i: the piece by which the block is linked to its parent.
    Digest *digests;
};

void BlockChain::digest_tokens(const Batch &batch, const sha256::Links &before) {
    const std::size_t token_bytes = block_size_ * sizeof *batch.tokens;
    const std::size_t half_bytes = (block_size_ + 1) / 2 * sizeof *batch.tokens;
    const std::size_t padded_bytes = round_up(half_bytes, blake3::piece_bytes);
    const auto *data = reinterpret_cast<const std::uint8_t *>(batch.tokens);
    std::array<std::uint8_t, blake3::max_lanes * blake3::piece_bytes> small;
    std::vector<std::uint8_t> large;
    // Halves that are no whole pieces are copied, to be followed by zeros. An odd block's second half ends in
    // one.
    if (2 * padded_bytes != token_bytes) {
        const std::size_t size = 2 * batch.blocks * padded_bytes;
        if (size > small.size()) large.resize(size);
        std::uint8_t *padded = large.empty() ? small.data() : large.data();
        if (large.empty()) std::fill_n(padded, size, std::uint8_t{0});
        for (std::size_t i = 0; i < batch.blocks; ++i, data += token_bytes) {
            std::uint8_t *half = padded + 2 * i * padded_bytes;
            std::memcpy(half, data, half_bytes);
            std::memcpy(half + padded_bytes, data + half_bytes, token_bytes - half_bytes);
        }
        data = padded;
    }
    blake3::Messages messages{2 * batch.blocks, half_bytes, {&keys_[0], &keys_[1]}, {}};
    for (std::size_t half = 0; half < messages.count; ++half)
        messages.rows[half] = data + half * padded_bytes;
    backend_->digest(messages, batch.digests, before);
}

void BlockChain::digest_extra_keys(const Batch &batch) {
    struct Text {
        std::size_t block, start, bytes;
    };
    std::array<Text, blake3::max_lanes / 2> found;
    std::size_t count = 0;
    texts_.clear();
    for (std::size_t i = 0; i < batch.blocks; ++i) {
        const std::size_t start = texts_.size();
        put_digest(texts_, batch.digests[2 * i + 1]);
        const auto position = position_ + static_cast<std::int64_t>(i * block_size_);
        encode_extra_keys(position, batch.tokens + (i + 1) * block_size_, texts_);
        const std::size_t bytes = texts_.size() - start;
        if (bytes > sizeof(Digest)) found[count++] = {i, start, bytes};
        texts_.resize(round_up(texts_.size(), blake3::piece_bytes));
    }
    // Texts of one length at a time: those of one look-ahead or image have the same length.
    const auto end = found.begin() + count;
    for (auto first = found.begin(); first != end;) {
        const std::size_t bytes = first->bytes;
        const auto next = std::partition(first, end, [&](const Text &text) { return text.bytes == bytes; });
        blake3::Messages messages{0, bytes, {&keys_[2], &keys_[2]}, {}};
        for (auto text = first; text != next; ++text)
            messages.rows[messages.count++] = texts_.data() + text->start;
        Digest digests[blake3::max_lanes];
        backend_->digest(messages, digests, {});
        for (std::size_t i = 0; i < messages.count; ++i) batch.digests[2 * first[i].block + 1] = digests[i];
        first = next;
    }
}

void BlockChain::extend(const std::int32_t *tokens, std::span<Digest> out) {
    const std::size_t most = backend_->lanes / 2;
    // While one batch's tokens are digested, the keys of the batch before are linked.
    std::array<std::uint8_t, 2 * blake3::max_lanes * sizeof(Digest)> digests;
    sha256::Links links{};
    for (std::size_t done = 0; done < out.size(); done += most) {
        Digest *fresh = reinterpret_cast<Digest *>(digests.data()) + done / most % 2 * blake3::max_lanes;
        const Batch batch{tokens + done * block_size_, std::min(most, out.size() - done), fresh};
        digest_tokens(batch, links);
        if (lookahead_ > 0 || !extra_keys_.items().empty()) digest_extra_keys(batch);
        links = {done == 0 ? &parent_ : &out[done - 1], fresh->bytes.data(), &out[done], batch.blocks};
        position_ += static_cast<std::int64_t>(batch.blocks * block_size_);
    }
    backend_->link(links);
    if (!out.empty()) parent_ = out.back();
}

}  // namespace fdcache
