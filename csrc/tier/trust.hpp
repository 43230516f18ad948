// How long to evict by what was learned, and when by last use.
#pragma once

#include <limits>

namespace fdcache {

// Compares what is found with what a tier that evicts by last use would find. What was learned is trusted
// until less is found: by a thousandth of all uses, or by some requests at once, as after a change of the
// traffic. It is trusted again after a rest, once the loss is a smaller share, or when the tables say that it
// would find much more.
class Trust {
  public:
    bool is_given() const { return is_given_; }
    // The tier is one of several, whose losses add up.
    void be_one_of_several() { share_ = kOfSeveral; }
    // A block was used.
    void use() { ++uses_; }
    // One that was used before: by how much more likely it was found than by last use.
    void compare(double gain) { gain_ += gain; }
    // While trust is not given: by how much more likely it would have been found.
    void expect(double gain) { expected_ += gain; }
    // After each request. `path`: what the blocks of a mean request count.
    void judge(double path, double slots);

  private:
    void fade(double path, double slots);

    static constexpr double kShare = 0.0008;    // of the uses that may be lost,
    static constexpr double kPaths = 2;         // and so many mean requests
    static constexpr double kBack = 0.8;        // of what may be lost: below it trust returns
    static constexpr double kDrop = 5;          // mean requests lost at once
    static constexpr double kRest = 0.5;        // uses per slot until trust returns after these
    static constexpr double kProof = 6;         // mean requests to be expected to return earlier; doubles
    static constexpr double kTrial = 1;         // mean requests that may be lost then
    static constexpr double kOfSeveral = 0.15;  // of all that may be lost, if there are more tiers
    static constexpr double kMemory = 8;        // uses per slot, and per thousand requests, that count
    static constexpr double kNever = std::numeric_limits<double>::infinity();

    bool is_given_ = true;
    double share_ = 1;
    double uses_ = 0;
    double gain_ = 0;
    double best_ = 0;         // gain since trust was given
    double least_ = kNever;   // gain at which a trial ends
    double rests_until_ = 0;  // uses
    double expected_ = 0;     // since trust was lost
    double proof_ = kProof;
};

}  // namespace fdcache
