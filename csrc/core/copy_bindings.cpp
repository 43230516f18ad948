#include "core/bindings.hpp"

namespace fdcache {

void bind_copy(nanobind::module_ &) {}

}  // namespace fdcache
