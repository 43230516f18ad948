#include "tier/trust.hpp"

#include <algorithm>

namespace fdcache {

void Trust::judge(double path, double slots) {
    const double most_lost = share_ * (kShare * uses_ + kPaths * path);
    if (is_given_) {
        best_ = std::max(best_, gain_);
        if (gain_ >= -most_lost) least_ = kNever;  // no trial, or it has succeeded
        if (gain_ > 0) proof_ = kProof;
        const bool has_lost = gain_ < -most_lost && gain_ < least_;
        const bool has_dropped = gain_ < best_ - share_ * kDrop * path;
        if (!has_lost && !has_dropped) return fade(path, slots);
        if (least_ < kNever) proof_ *= 2;
        is_given_ = false;
        expected_ = 0;
        rests_until_ = has_lost ? uses_ : uses_ + kRest * slots;
    } else {
        const bool has_recovered = gain_ >= -kBack * most_lost;
        if (has_recovered ? uses_ < rests_until_ : expected_ <= proof_ * path) return fade(path, slots);
        is_given_ = true;
        best_ = gain_;
        least_ = gain_ - share_ * kTrial * path;
    }
    fade(path, slots);
}

// Halves what is long ago, so that it does not count for ever.
void Trust::fade(double path, double slots) {
    if (uses_ < kMemory * (slots + 1000 * path)) return;
    for (double *each : {&uses_, &gain_, &best_}) *each /= 2;
    if (least_ < kNever) least_ /= 2;
    rests_until_ = std::min(rests_until_, uses_ + kRest * slots);
}

}  // namespace fdcache
