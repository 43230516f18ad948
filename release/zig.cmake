# Toolchain of the wheels: clang, libc++ and the symbols of glibc 2.28 in Zig's package, for the machine of FDCACHE_COMPILER.
set(CMAKE_CXX_COMPILER $ENV{FDCACHE_COMPILER})
set(CMAKE_AR $ENV{FDCACHE_ZIG} CACHE FILEPATH "")
# The same translation units with and without a compiler cache.
set(CMAKE_UNITY_BUILD ON)
# Nothing of where it was built is left in the modules. nanobind's headers use stderr without its header.
set(CMAKE_CXX_FLAGS_INIT "-include stdio.h -ffile-prefix-map=$ENV{FDCACHE_SOURCE}=. -ffile-prefix-map=$ENV{FDCACHE_BUILD}=.")
set(CMAKE_CXX_ARCHIVE_CREATE "<CMAKE_AR> ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_APPEND "<CMAKE_AR> ar q <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "")
