#include "core/bindings.hpp"

namespace fdcache {

void bind_pattern(nanobind::module_ &) {}

}  // namespace fdcache
