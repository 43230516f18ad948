// What the bindings of presence tables and of tiers share.
#pragma once

#include <cstddef>

#include "core/presence.hpp"

namespace fdcache {

PresenceTable presence_table(const void *memory, std::size_t bytes);

}  // namespace fdcache
