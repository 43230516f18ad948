#include "native/stand_in_memory.hpp"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <shared_mutex>

namespace fdcache::stand_in {
namespace {

struct Piece {
    std::size_t nbytes;
    int gpu;
};

std::shared_mutex mutex;
std::map<std::uintptr_t, Piece> known;
bool minds = false;

// The piece that contains all these bytes.
const Piece *find(const void *data, std::size_t nbytes) {
    const auto start = reinterpret_cast<std::uintptr_t>(data);
    auto behind = known.upper_bound(start);
    if (behind == known.begin()) return nullptr;
    const auto &[first, piece] = *--behind;
    return start - first + nbytes <= piece.nbytes ? &piece : nullptr;
}

}  // namespace

void make_known(const void *data, std::size_t nbytes, int gpu) {
    const std::lock_guard lock(mutex);
    known[reinterpret_cast<std::uintptr_t>(data)] = {nbytes, gpu};
    minds = true;
}

void forget(const void *data) {
    const std::lock_guard lock(mutex);
    known.erase(reinterpret_cast<std::uintptr_t>(data));
}

int owner_of(const void *data) {
    const std::shared_lock lock(mutex);
    const Piece *piece = find(data, 0);
    return piece != nullptr ? piece->gpu : kHost;
}

Known piece_of(const void *data) {
    const std::shared_lock lock(mutex);
    const auto behind = known.upper_bound(reinterpret_cast<std::uintptr_t>(data));
    if (find(data, 0) == nullptr) return {};
    const auto &[first, piece] = *std::prev(behind);
    return {reinterpret_cast<const void *>(first), piece.nbytes, piece.gpu};
}

void expect_reached(const void *data, std::size_t nbytes) {
    const std::shared_lock lock(mutex);
    if (!minds || find(data, nbytes) != nullptr) return;
    std::fprintf(stderr, "%zu bytes at %p are neither a GPU's nor pinned, or not in one piece\n", nbytes,
                 data);
    std::abort();
}

}  // namespace fdcache::stand_in
