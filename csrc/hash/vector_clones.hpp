// A loop compiled for several sets of vector instructions, of which the machine's best is taken at load time.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FDCACHE_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FDCACHE_VECTOR_CLONES
#endif
