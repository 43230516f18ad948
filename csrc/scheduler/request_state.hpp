// One request of an engine: its tokens and block hashes, and the device blocks that it holds between its
// match and its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "hash/block_hash.hpp"
#include "scheduler/loads.hpp"
#include "tier/host_index.hpp"
#include "tier/tier.hpp"

namespace fdcache {

struct RequestStateError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Everything that block hashes depend on and that all requests of one manager share.
struct BlockKeys {
    std::int64_t block_size;
    Digest fingerprint;
    std::int64_t lookahead;

    bool operator==(const BlockKeys &) const = default;
};

inline void append_slots(AppendOnly<std::int32_t> &table, std::span<const Slot> slots) {
    std::int32_t *out = table.extend(slots.size());
    for (const Slot slot : slots) *out++ = static_cast<std::int32_t>(slot);
    table.commit(slots.size());
}

class RequestState {
  public:
    RequestState(std::string id, std::size_t prompt_tokens, std::optional<std::string> tenant,
                 ExtraKeys extra_keys)
        : id_(std::move(id)),
          tenant_(std::move(tenant)),
          extra_keys_(std::move(extra_keys)),
          prompt_tokens_(prompt_tokens) {}

    const std::string &id() const { return id_; }
    const std::optional<std::string> &tenant() const { return tenant_; }

    // --- tokens and hashes -------------------------------------------------------------------------------

    // True once the prompt is hashed with the keys of some manager.
    bool is_bound() const { return blocks_ != nullptr; }
    const BlockKeys &keys() const { return keys_; }
    const TokenBlocks &blocks() const { return *blocks_; }
    TokenBlocks &blocks() { return *blocks_; }
    std::size_t prompt_tokens() const { return prompt_tokens_; }
    std::size_t num_tokens() const { return blocks_ ? blocks_->tokens().size() : prompt_tokens_; }
    std::size_t num_hashes() const { return blocks_ ? blocks_->hashes().size() : 0; }

    // Returns an empty list of tokens for these keys, to be filled and given to `bind`.
    std::unique_ptr<TokenBlocks> make_blocks(const BlockKeys &keys) const;
    void bind(const BlockKeys &keys, std::unique_ptr<TokenBlocks> blocks) {
        keys_ = keys;
        blocks_ = std::move(blocks);
    }
    // Held by the thread that hashes the prompt.
    std::mutex &binding() { return binding_; }

    // --- from match to end -------------------------------------------------------------------------------

    bool is_live() const { return owner_ != 0; }
    LeaseId lease() const { return lease_; }
    const AppendOnly<std::int32_t> &table() const { return table_; }
    // Found by the match, until their loads are planned.
    const HostRun &host_run() const { return host_run_; }
    std::uint32_t peer_blocks() const { return peer_blocks_; }
    bool is_loading() const { return load_ != nullptr; }
    const LoadPointer &load() const { return load_; }

    bool use_cache = true;  // false: finds no blocks and publishes none
    bool device_only = false;
    std::optional<std::uint64_t> max_cached_tokens;
    // Of the prefix found by the match; 0 unless the request is live.
    std::uint64_t num_cached_tokens = 0;

  private:
    friend class BlockManager;

    std::string id_;
    std::optional<std::string> tenant_;
    ExtraKeys extra_keys_;
    std::size_t prompt_tokens_;
    std::mutex binding_;
    BlockKeys keys_{};
    std::unique_ptr<TokenBlocks> blocks_;

    std::uint64_t owner_ = 0;          // number of the manager that the request is live in
    std::uint64_t publish_epoch_ = 0;  // of the manager at the match; 0: publishes nothing
    LeaseId lease_ = 0;
    AppendOnly<std::int32_t> table_;
    HostRun host_run_;
    LoadPointer load_;                   // that the request waits for
    std::uint32_t ahead_from_host_ = 0;  // blocks on the device that were loaded before the match
    std::uint32_t ahead_from_storage_ = 0;
    std::uint32_t peer_blocks_ = 0;         // that follow the run on the host, until their fetch is planned
    std::uint32_t searched_from_ = 0;       // first block that the host was asked for
    std::optional<double> deferred_since_;  // seconds by the caller's clock
    std::uint64_t committed_tokens_ = 0;
    std::uint64_t allocated_tokens_ = 0;  // that an allocation or a step asked blocks for
    std::uint32_t committed_blocks_ = 0;
    std::uint32_t returned_blocks_ = 0;
    std::uint32_t hit_blocks_ = 0;  // of any match until the end: a request counts as one hit of each block
    bool is_counted_ = false;
};

}  // namespace fdcache
