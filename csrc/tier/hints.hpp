// What a client says of the blocks of a request, and what is to be expected of them therefore.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "tier/eviction.hpp"
#include "tier/reuse_tables.hpp"

namespace fdcache {

// `kOnce` and `kRelease` say that the blocks are not needed again; the others that they are: within `value`
// seconds of now (`kRetain`), after about that time (`kReturn`), or as often as a priority of 1 to 100 says.
enum class HintKind : std::uint8_t { kOnce, kRelease, kRetain, kReturn, kPriority };

struct Hint {
    HintKind kind;
    double value = 0;

    // True if blocks are worth more for it, at some time.
    bool keeps() const { return kind != HintKind::kOnce && kind != HintKind::kRelease; }
    // True if it asks for room, whatever comes of it. When blocks return tells as well when they do not.
    bool takes_room() const { return keeps() && kind != HintKind::kReturn; }
};

// A hint about the blocks `start` to `stop` of a path; `own`: about those that no other path goes through.
struct HintRange {
    Hint hint;
    std::size_t start, stop;
    bool own;
};

// `blocks` were hinted, from the one at `first` on, some between them perhaps by later hints of the call.
struct HintTaken {
    HintAnswer answer;
    std::uint32_t first = 0, blocks = 0;
};

// The classes of hints: what they say, and how often the block was used before.
class HintClasses {
  public:
    static constexpr std::size_t kTimes = 6;  // each 6 times as long as the one before
    static constexpr std::size_t kPriorities = 3;
    static constexpr std::size_t kUses = 3;  // never, up to three times, more often
    static constexpr std::size_t kNotAgain = 0, kWithin = 1, kPriority = kWithin + kTimes;
    static_assert((kPriority + kPriorities) * kUses == ReuseTables::kHints);

    static std::size_t of(const Hint &hint, std::uint8_t hits) {
        return said(hint) * kUses + (hits ? hits < 4 ? 1 : 2 : 0);
    }

    // Reuses per second at an age if hints of this class were true; `base` without a hint.
    static double expected_rate(std::size_t hint, double age, double base) {
        constexpr double kSeldom = 0.05;  // of the usual rate
        constexpr double kKept = 4;       // of the usual rate
        constexpr double kSurely = 2.3;   // nine of ten come back in time
        const std::size_t said = hint / kUses;
        if (said == kNotAgain) return base * kSeldom;
        if (said >= kPriority) return base * std::exp2(static_cast<double>(said - kPriority) + 1);
        const double until = std::exp2(static_cast<double>(said - kWithin + 1) * kDoublings);
        return age < until ? std::max(base * kKept, kSurely / until) : base * kSeldom;
    }

  private:
    static constexpr double kDoublings = 2.6;

    static std::size_t said(const Hint &hint) {
        if (!hint.keeps()) return kNotAgain;
        if (hint.kind == HintKind::kPriority) {
            const double step = (std::clamp(hint.value, 1.0, 100.0) - 1) / 34;
            return kPriority + std::min(static_cast<std::size_t>(step), kPriorities - 1);
        }
        // One that returns after about a time is likely to within twice the time.
        const double seconds = hint.kind == HintKind::kReturn ? 2 * hint.value : hint.value;
        const double place = std::log2(std::max(seconds, 1.0)) / kDoublings;
        return kWithin + std::min(static_cast<std::size_t>(place), kTimes - 1);
    }
};

}  // namespace fdcache
