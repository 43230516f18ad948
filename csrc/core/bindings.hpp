// What each concept adds to the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace fdcache {

void bind_hashing(nanobind::module_ &module);
void bind_presence(nanobind::module_ &module);
void bind_tier(nanobind::module_ &module);
void bind_outgoing(nanobind::module_ &module);
void bind_record(nanobind::module_ &module);
void bind_copy(nanobind::module_ &module);
void bind_slab(nanobind::module_ &module);
void bind_pattern(nanobind::module_ &module);
void bind_swap(nanobind::module_ &module);
void bind_swap_plan(nanobind::module_ &module);

}  // namespace fdcache
