// Loads as Python has them.
#pragma once

#include <cstddef>

#include "bindings.hpp"
#include "scheduler/loads.hpp"

namespace fdcache {

// How Python is told of the end of a load: its class and members. A page of `block_size` tokens is a block of
// each of `groups` groups of layers.
struct LoadForms {
    nb::object outcome, confirmed, failed, overdue;
    std::size_t block_size, groups;

    nb::object outcome_of(const Load &load, nb::handle request_id, nb::handle unplanned) const;
};

void bind_loads(nb::module_ &module);

}  // namespace fdcache
