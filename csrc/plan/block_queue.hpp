// Block hashes that wait to be written.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <unordered_set>
#include <vector>

#include "hash/digest.hpp"

namespace fdcache {

// A first-in, first-out queue of block hashes, added in parts. A full queue drops its oldest parts.
class BlockQueue {
  public:
    explicit BlockQueue(std::size_t most) : most_(most) {}

    // Returns the number of blocks dropped.
    std::size_t add(std::vector<Digest> &&hashes) {
        if (hashes.empty()) return 0;
        parts_.push_back({std::move(hashes)});
        size_ += parts_.back().size();
        std::size_t dropped = 0;
        for (; size_ > most_; parts_.pop_front()) {
            dropped += parts_.front().size();
            size_ -= parts_.front().size();
        }
        return dropped;
    }

    // Removes and returns the first `count` blocks, or as many as there are.
    std::vector<Digest> take(std::size_t count) {
        std::vector<Digest> taken;
        taken.reserve(std::min(count, size_));
        while (!parts_.empty() && taken.size() < count) {
            Part &part = parts_.front();
            const auto first = part.hashes.begin() + static_cast<std::ptrdiff_t>(part.taken);
            const std::size_t some = std::min(count - taken.size(), part.size());
            taken.insert(taken.end(), first, first + static_cast<std::ptrdiff_t>(some));
            part.taken += some;
            if (part.size() == 0) parts_.pop_front();
        }
        size_ -= taken.size();
        return taken;
    }

    // For each block 1 if it is queued, else 0. Walks the whole queue.
    std::vector<std::uint8_t> holds(std::span<const Digest> hashes) const {
        std::unordered_set<Digest, DigestHash> queued;
        for (const Part &part : parts_) {
            queued.insert(part.hashes.begin() + static_cast<std::ptrdiff_t>(part.taken), part.hashes.end());
        }
        std::vector<std::uint8_t> held;
        held.reserve(hashes.size());
        for (const Digest &hash : hashes) held.push_back(queued.contains(hash));
        return held;
    }

    void clear() {
        parts_.clear();
        size_ = 0;
    }

    std::size_t size() const { return size_; }

  private:
    struct Part {
        std::vector<Digest> hashes;
        std::size_t taken = 0;  // the first ones, which are not queued any more

        std::size_t size() const { return hashes.size() - taken; }
    };

    std::size_t most_;
    std::size_t size_ = 0;
    std::deque<Part> parts_;
};

}  // namespace fdcache
