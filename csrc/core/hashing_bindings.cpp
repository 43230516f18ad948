#include "core/bindings.hpp"

namespace fdcache {

void bind_hashing(nanobind::module_ &) {}

}  // namespace fdcache
