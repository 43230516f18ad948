// What is lost by an eviction when there is a tier below.
#pragma once

#include <array>

namespace fdcache {

// A block that is found in the tier below when it is used again was not lost: it is loaded. How likely that
// is depends on whether that tier held it when it was evicted, on whether evicted blocks are copied there, as
// those are that were used more than once, and on how soon that tier has to evict it in turn. So it is
// counted, apart for blocks in each of these states.
class Survival {
  public:
    // The time of a load from the tier below, as a share of the time to compute: on a GPU the bytes of a
    // prompt over the link take about a tenth.
    static constexpr double kLoad = 0.1;

    // The share of a block's worth that its eviction loses.
    double loss(bool is_below, bool is_reused) const { return counts_[is_below][is_reused].loss; }
    // An evicted block is used again. `is_found`: in the tier below.
    void used_again(bool was_below, bool was_reused, bool is_found) {
        Count &count = counts_[was_below][was_reused];
        const Count more(count.used + 1, count.found + is_found);
        count = more.used < kMemory ? more : Count(more.used / 2, more.found / 2);
    }

  private:
    static constexpr double kPrior = 64;  // blocks that the first guess weighs
    static constexpr double kGuess = 0.9;
    static constexpr double kMemory = 4096;  // blocks; then they count half

    struct Count {
        double used, found, loss;

        constexpr Count(double used, double found)
            : used(used), found(found), loss(1 - (1 - kLoad) * found / used) {}
    };

    static std::array<Count, 2> guess(double found) {
        return {Count(kPrior, found * kPrior), Count(kPrior, found * kPrior)};
    }

    std::array<std::array<Count, 2>, 2> counts_{guess(0), guess(kGuess)};
};

}  // namespace fdcache
