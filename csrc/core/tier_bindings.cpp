#include "core/bindings.hpp"

namespace fdcache {

void bind_tier(nanobind::module_ &) {}

}  // namespace fdcache
