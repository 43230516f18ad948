// Memory of the stand-in driver that other processes open: allocations in a file of their own.
#pragma once

namespace fdcache::stand_in {

// The memory that starts here is a file with this descriptor, -1 to forget it.
void share(const void *data, int descriptor);

}  // namespace fdcache::stand_in
