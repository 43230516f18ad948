// The extension module fdcache._core.
#include "bindings.hpp"

NB_MODULE(_core, module) {
    module.doc() = "The native core: block hashes, tiers, block copies on the CPU and on GPUs, slab files.";
    fdcache::bind_hashing(module);
    fdcache::bind_tier_results(module);
    fdcache::bind_presence(module);
    fdcache::bind_shared_host(module);
    fdcache::bind_tier(module);
    fdcache::bind_plans(module);
    fdcache::bind_scheduler(module);
    fdcache::bind_records(module);
    fdcache::bind_transfers(module);
    fdcache::bind_copies(module);
    fdcache::bind_plane_copies(module);
    fdcache::bind_slab(module);
    fdcache::bind_swap_plan(module);
    fdcache::bind_cuda(module);
    fdcache::bind_pattern(module);
#ifdef NDEBUG
    // Frames of an exception or of a daemon thread keep objects until the process ends. Nothing is lost.
    nanobind::set_leak_warnings(false);
#endif
    module.def(
        "set_leak_warnings", [](bool on) { nanobind::set_leak_warnings(on); }, nanobind::arg("on"),
        "Report on stderr the native objects that are left at exit, or not. Off in release builds.");
}
