// Blocks of which another process knows the tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <unordered_set>

#include "hash/digest.hpp"

namespace fdcache {

// Between `capacity` and half of it are remembered: the older half is forgotten at once.
class DescribedBlocks {
  public:
    explicit DescribedBlocks(std::size_t capacity) : half_(std::max<std::size_t>(capacity / 2, 1)) {}

    // Adds the blocks of a path from the first one at its end that is not here. Returns its position.
    std::size_t add(std::span<const Digest> path) {
        std::size_t first = path.size();
        while (first && !holds(path[first - 1])) --first;
        for (const Digest &digest : path.subspan(first)) {
            if (newer_.size() >= half_) {
                older_.swap(newer_);
                newer_.clear();
            }
            newer_.insert(digest);
        }
        return first;
    }

    void clear() {
        newer_.clear();
        older_.clear();
    }

  private:
    bool holds(const Digest &digest) const { return newer_.contains(digest) || older_.contains(digest); }

    std::unordered_set<Digest, DigestHash> newer_, older_;
    std::size_t half_;
};

}  // namespace fdcache
