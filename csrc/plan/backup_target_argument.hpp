// The host tier of a backup as an argument: a tier of this process, copies to that of a service, or None.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include <optional>
#include <variant>

#include "bindings.hpp"
#include "plan/backup_target.hpp"

namespace fdcache {

using BackupTargetArgument = std::optional<std::variant<Tier *, OutgoingCopies *>>;

inline BackupTarget target_of(const BackupTargetArgument &target) {
    if (!target) return {};
    return std::visit([](auto *tier) { return BackupTarget(*tier); }, *target);
}

}  // namespace fdcache
