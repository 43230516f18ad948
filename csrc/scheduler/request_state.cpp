#include "scheduler/request_state.hpp"

namespace fdcache {

std::unique_ptr<TokenBlocks> RequestState::make_blocks(const BlockKeys &keys) const {
    std::optional<std::string_view> tenant;
    if (tenant_) tenant = *tenant_;
    return std::make_unique<TokenBlocks>(keys.block_size, root_hash(keys.fingerprint, tenant), extra_keys_,
                                         keys.lookahead);
}

}  // namespace fdcache
