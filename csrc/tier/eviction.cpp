#include "tier/eviction.hpp"

#include <stdexcept>
#include <string>

#include "tier/learned_order.hpp"
#include "tier/lru_order.hpp"

namespace fdcache {

std::unique_ptr<EvictionOrder> make_eviction_order(std::string_view name) {
    if (name == "lru") return std::make_unique<LruOrder>();
    if (name == "learned") return std::make_unique<LearnedOrder>();
    throw std::invalid_argument("unknown eviction order '" + std::string(name) + "'; use 'lru' or 'learned'");
}

}  // namespace fdcache
