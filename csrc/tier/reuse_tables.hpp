// How often blocks are used again, by class and age, and what a block is worth that follows from it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fdcache {

// Counts of uses and of blocks at risk, in classes of blocks and buckets of age. From them: the rate of
// reuse, smoothed towards that of coarser groups, and the Gittins index of a block, which is the highest
// number of hits per second that keeping it for any time gives.
class ReuseTables {
  public:
    static constexpr std::size_t kRoles = 9;
    static constexpr std::size_t kOutputs = 5;  // lengths of the request's output
    static constexpr std::size_t kNews = 5;     // lengths of its prompt that were not known
    static constexpr std::size_t kFeatures = kOutputs * kNews;
    static constexpr std::size_t kHints = 30;  // classes of blocks that a client has told about
    static constexpr std::size_t kFirstHint = kRoles * kFeatures;
    static constexpr std::size_t kLeft = kFirstHint + kHints;  // blocks that their path left behind
    static constexpr std::size_t kClasses = kLeft + 1;
    static constexpr std::size_t kAges = 23;

    static bool is_hint(std::uint8_t kind) { return kind >= kFirstHint && kind != kLeft; }

    // Counts by class and age; `present` are blocks that have this age now.
    template <typename T>
    using Table = std::array<std::array<T, kAges>, kClasses>;

    ReuseTables();

    static std::size_t bucket(std::uint32_t age_ms);
    // Seconds at which a bucket begins.
    static double begin(std::size_t bucket);

    void reuse(std::uint8_t kind, std::uint32_t age_ms) {
        const std::size_t age = bucket(age_ms);
        ++reused_[kind][age];
        ++left_[kind][age];
    }
    void forget(std::uint8_t kind, std::uint32_t age_ms) { ++left_[kind][bucket(age_ms)]; }
    // A request's path had this many blocks.
    void path(std::size_t blocks) { path_ += 0.002 * (static_cast<double>(blocks) - path_); }

    double mean_path() const { return path_; }
    // Reuses per second of which nothing is known at an age in seconds: last use first.
    static double unknown_rate(double age) { return 0.3 / (age + 60); }

    // Lets old counts fade, to a half in each half-life, and computes rates and worth anew.
    void learn(const Table<double> &present, double half_lives);

    // Prepares `keeps` for a tier of `blocks` blocks among those `present` that are remembered.
    void forecast(const Table<double> &present, double blocks);
    // True if such a tier, if it evicted by worth, would keep a block up to this age.
    bool keeps(std::uint8_t kind, std::uint32_t age_ms) const {
        return least_worth_[kind][bucket(age_ms)] >= kept_worth_;
    }

    // Expected hits per second of keeping a block.
    double worth(std::uint8_t kind, double place) const {
        const auto age = static_cast<std::size_t>(place);
        const auto &row = worth_[kind];
        return row[age] + (place - static_cast<double>(age)) * (row[age + 1] - row[age]);
    }
    // Where an age lies on the scale of the buckets.
    static double place(std::uint32_t age_ms);

    const Table<double> &reused() const { return reused_; }
    const Table<double> &at_risk() const { return at_risk_; }
    const Table<double> &rate() const { return rate_; }
    double index(std::size_t kind, std::size_t age) const { return worth_[kind][age]; }

    // Everything that was learned, to go on with in another process. `load` returns false, and changes
    // nothing, for bytes of another version or impossible counts.
    std::vector<std::uint8_t> save() const;
    bool load(std::span<const std::uint8_t> bytes);

  private:
    using Ages = std::array<double, kAges>;

    void compute();
    void compute_hints(const Ages &base, double weight);
    void compute_from(std::size_t kind, const Ages &guess, double weight);
    static std::array<double, kAges + 1> gittins(const Ages &rate);

    Table<double> reused_{};
    Table<double> left_{};     // reused or forgotten
    Table<double> at_risk_{};  // block-seconds
    Table<double> rate_{};
    std::array<std::array<double, kAges + 1>, kClasses> worth_{};  // the last age twice
    Table<double> least_worth_{};                                  // up to an age
    double kept_worth_ = 0;                                        // of the blocks that a tier would keep
    double path_ = 16;                                             // mean blocks of a path
};

}  // namespace fdcache
