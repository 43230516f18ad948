# Toolchain of the wheels: clang, libc++ and the symbols of glibc 2.28 in Zig's package, for MACHINE of the environment.
set(CMAKE_CXX_COMPILER $ENV{FDCACHE_ZIG} c++ -target $ENV{FDCACHE_MACHINE}-linux-gnu.2.28)
set(CMAKE_AR $ENV{FDCACHE_ZIG} CACHE FILEPATH "")
# Nothing of where it was built is left in the modules. nanobind's headers use stderr without its header.
set(CMAKE_CXX_FLAGS_INIT "-include stdio.h -ffile-prefix-map=$ENV{FDCACHE_SOURCE}=. -ffile-prefix-map=$ENV{FDCACHE_BUILD}=.")
set(CMAKE_CXX_ARCHIVE_CREATE "<CMAKE_AR> ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_APPEND "<CMAKE_AR> ar q <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "")
