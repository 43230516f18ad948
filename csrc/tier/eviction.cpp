#include "tier/eviction.hpp"

#include <stdexcept>
#include <string>

#include "tier/learned_order.hpp"
#include "tier/lru_order.hpp"
#include "tier/slru_order.hpp"

namespace fdcache {

std::unique_ptr<EvictionOrder> make_eviction_order(std::string_view name, double depth_value) {
    if (name == "lru") return std::make_unique<LruOrder>();
    if (name == "slru") return std::make_unique<SlruOrder>();
    if (name == "learned") return std::make_unique<LearnedOrder>(depth_value);
    throw std::invalid_argument("unknown eviction order '" + std::string(name) +
                                "'; use 'lru', 'slru' or 'learned'");
}

}  // namespace fdcache
