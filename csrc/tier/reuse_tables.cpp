#include "tier/reuse_tables.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tier/hints.hpp"

namespace fdcache {
namespace {

constexpr double kHalfLife = 3600;     // seconds in which counts fade to a half
constexpr double kSmoothing = 0.5;     // of a mean path: weight of the coarser group, or of a hint
constexpr std::uint32_t kVersion = 2;  // of saved tables

using Widths = std::array<double, ReuseTables::kAges>;

const Widths &widths() {
    static const Widths all = [] {
        Widths found;
        for (std::size_t age = 0; age < found.size(); ++age)
            found[age] = ReuseTables::begin(age + 1) - ReuseTables::begin(age);
        return found;
    }();
    return all;
}

template <typename Row>
void add(Row &sum, const Row &row) {
    for (std::size_t age = 0; age < row.size(); ++age) sum[age] += row[age];
}

// Rates of a group from its counts, drawn to `parent` where it has few.
template <typename Row>
Row smoothed(const Row &reused, const Row &at_risk, const Row &parent, double weight) {
    double uses = 0, expected = 0;
    for (std::size_t age = 0; age < parent.size(); ++age) {
        uses += reused[age];
        expected += at_risk[age] * parent[age];
    }
    const double level = (weight + uses) / (weight + expected);
    Row rate;
    for (std::size_t age = 0; age < parent.size(); ++age)
        rate[age] = (reused[age] + weight * level) / (at_risk[age] + weight / parent[age]);
    return rate;
}

// Numbers that counting can give.
bool are_counts(std::span<const std::uint8_t> bytes) {
    for (; !bytes.empty(); bytes = bytes.subspan(sizeof(double))) {
        double value;
        std::memcpy(&value, bytes.data(), sizeof value);
        if (!std::isfinite(value) || value < 0) return false;
    }
    return true;
}

}  // namespace

ReuseTables::ReuseTables() {
    compute();
}

double ReuseTables::begin(std::size_t bucket) {
    return std::exp2(static_cast<double>(bucket) / 1.5) - 1;
}

std::size_t ReuseTables::bucket(std::uint32_t age_ms) {
    static const std::array<double, kAges> begins = [] {
        std::array<double, kAges> found;
        for (std::size_t age = 0; age < kAges; ++age) found[age] = 1000 * begin(age);
        return found;
    }();
    return static_cast<std::size_t>(std::upper_bound(begins.begin() + 1, begins.end(), age_ms) -
                                    begins.begin()) -
           1;
}

void ReuseTables::learn(const Table<double> &present, double seconds) {
    const double kept = std::exp2(-seconds / kHalfLife);
    for (std::size_t kind = 0; kind < kClasses; ++kind) {
        double older = 0;  // blocks that reached a higher age
        for (std::size_t age = kAges; age-- > 0;) {
            reused_[kind][age] *= kept;
            left_[kind][age] *= kept;
            const double here = left_[kind][age] + present[kind][age];
            at_risk_[kind][age] = widths()[age] * (older + here / 2);
            older += here;
        }
    }
    compute();
}

// From all blocks without a hint to a role, and from a role to its classes.
void ReuseTables::compute() {
    const double weight = std::max(kSmoothing * path_, 0.5);
    Ages all_reused{}, all_risk{}, base;
    for (std::size_t kind = 0; kind < kFirstHint; ++kind) {
        add(all_reused, reused_[kind]);
        add(all_risk, at_risk_[kind]);
    }
    for (std::size_t age = 0; age < kAges; ++age) {
        const double middle = begin(age) + widths()[age] / 2;
        const double prior = 0.3 / (middle + 60);
        base[age] = (all_reused[age] + weight) / (all_risk[age] + weight / prior);
    }
    for (std::size_t role = 0; role < kRoles; ++role) {
        Ages reused{}, risk{};
        for (std::size_t each = 0; each < kFeatures; ++each) {
            add(reused, reused_[role * kFeatures + each]);
            add(risk, at_risk_[role * kFeatures + each]);
        }
        const Ages of_role = smoothed(reused, risk, base, weight);
        for (std::size_t each = 0; each < kFeatures; ++each) {
            const std::size_t kind = role * kFeatures + each;
            rate_[kind] = smoothed(reused_[kind], at_risk_[kind], of_role, weight);
            worth_[kind] = gittins(rate_[kind]);
        }
    }
    compute_hints(base, weight);
}

// What a hint says is where the rate of its class begins; what comes of such hints draws it away.
void ReuseTables::compute_hints(const Ages &base, double weight) {
    for (std::size_t hint = 0; hint < kHints; ++hint) {
        const std::size_t kind = kFirstHint + hint;
        Ages said;
        for (std::size_t age = 0; age < kAges; ++age)
            said[age] = HintClasses::expected_rate(hint, begin(age) + widths()[age] / 2, base[age]);
        rate_[kind] = smoothed(reused_[kind], at_risk_[kind], said, weight);
        worth_[kind] = gittins(rate_[kind]);
    }
}

std::array<double, ReuseTables::kAges + 1> ReuseTables::gittins(const Ages &rate) {
    std::array<double, kAges + 1> found;
    Ages chance;
    for (std::size_t age = 0; age < kAges; ++age) chance[age] = -std::expm1(-rate[age] * widths()[age]);
    for (std::size_t age = 0; age < kAges; ++age) {
        double alive = 1, hits = 0, seconds = 0, best = 0;
        for (std::size_t until = age; until < kAges; ++until) {
            hits += alive * chance[until];
            seconds += alive * chance[until] / rate[until];
            best = std::max(best, hits / seconds);
            alive *= 1 - chance[until];
        }
        found[age] = best;
    }
    found[kAges] = found[kAges - 1];
    return found;
}

double ReuseTables::place(std::uint32_t age_ms) {
    return std::min(1.5 * std::log2(1 + age_ms / 1000.0), kAges - 0.5);
}

std::vector<std::uint8_t> ReuseTables::save() const {
    std::vector<std::uint8_t> bytes(sizeof kVersion + sizeof path_ + sizeof reused_ + sizeof left_ +
                                    sizeof at_risk_);
    std::uint8_t *out = bytes.data();
    const auto put = [&out](const auto &value) {
        std::memcpy(out, &value, sizeof value);
        out += sizeof value;
    };
    put(kVersion);
    put(path_);
    put(reused_);
    put(left_);
    put(at_risk_);
    return bytes;
}

bool ReuseTables::load(std::span<const std::uint8_t> bytes) {
    std::uint32_t version = 0;
    if (bytes.size() != save().size()) return false;
    std::memcpy(&version, bytes.data(), sizeof version);
    if (version != kVersion) return false;
    if (!are_counts(bytes.subspan(sizeof version))) return false;
    const std::uint8_t *in = bytes.data() + sizeof version;
    const auto get = [&in](auto &value) {
        std::memcpy(&value, in, sizeof value);
        in += sizeof value;
    };
    get(path_);
    get(reused_);
    get(left_);
    get(at_risk_);
    compute();
    return true;
}

}  // namespace fdcache
