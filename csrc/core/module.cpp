// The extension module fdcache._core: one bind function per concept, each defined beside its concept.
#include <nanobind/nanobind.h>

#include "core/bindings.hpp"

NB_MODULE(_core, module) {
    fdcache::bind_hashing(module);
    fdcache::bind_presence(module);
    fdcache::bind_tier(module);
    fdcache::bind_outgoing(module);
    fdcache::bind_record(module);
    fdcache::bind_copy(module);
    fdcache::bind_slab(module);
    fdcache::bind_pattern(module);
    fdcache::bind_swap_plan(module);
    fdcache::bind_swap(module);
    module.def(
        "set_leak_warnings", [](bool on) { nanobind::set_leak_warnings(on); }, nanobind::arg("on"),
        "Whether objects of this module that are left when the process ends are listed on stderr.");
}
