#include "tier/reuse_tables.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "tier/hints.hpp"

namespace fdcache {
namespace {

constexpr double kSmoothing = 0.5;     // of a mean path: weight of the coarser group, or of a hint
constexpr double kLeftRate = 0.2;      // of blocks that were left behind, beside others: a guess
constexpr std::uint32_t kVersion = 3;  // of saved tables

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

template <typename Row>
bool is_empty(const Row &row) {
    return std::all_of(row.begin(), row.end(), [](double count) { return count == 0; });
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

// At most two buckets begin between two powers of two.
std::size_t ReuseTables::bucket(std::uint32_t age_ms) {
    struct Span {
        std::uint32_t first = 0;  // bucket of the least age with so many bits
        std::array<std::uint32_t, 2> ends{UINT32_MAX, UINT32_MAX};  // last ms of it and of the next one
    };
    static const std::array<Span, 33> spans = [] {
        std::array<Span, 33> found;
        for (std::size_t width = 0; width < found.size(); ++width) {
            const double least = width ? std::exp2(width - 1) : 0;
            Span &span = found[width];
            while (span.first + 1 < kAges && 1000 * begin(span.first + 1) <= least) ++span.first;
            for (std::size_t i = 0; i < span.ends.size() && span.first + i + 1 < kAges; ++i)
                span.ends[i] = static_cast<std::uint32_t>(std::ceil(1000 * begin(span.first + i + 1))) - 1;
        }
        return found;
    }();
    const Span &span = spans[static_cast<std::size_t>(std::bit_width(age_ms))];
    return std::size_t{span.first} + (age_ms > span.ends[0]) + (age_ms > span.ends[1]);
}

void ReuseTables::learn(const Table<double> &present, double half_lives) {
    const double kept = std::exp2(-half_lives);
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
        base[age] = (all_reused[age] + weight) / (all_risk[age] + weight / unknown_rate(middle));
    }
    for (std::size_t role = 0; role < kRoles; ++role) {
        Ages reused{}, risk{};
        for (std::size_t each = 0; each < kFeatures; ++each) {
            add(reused, reused_[role * kFeatures + each]);
            add(risk, at_risk_[role * kFeatures + each]);
        }
        const Ages of_role = smoothed(reused, risk, base, weight);
        std::optional<std::size_t> unknown;  // a class without counts: all of them are the same
        for (std::size_t each = 0; each < kFeatures; ++each) {
            const std::size_t kind = role * kFeatures + each;
            const bool is_unknown = is_empty(at_risk_[kind]) && is_empty(reused_[kind]);
            if (is_unknown && unknown) {
                rate_[kind] = rate_[*unknown];
                worth_[kind] = worth_[*unknown];
                continue;
            }
            if (is_unknown) unknown = kind;
            rate_[kind] = smoothed(reused_[kind], at_risk_[kind], of_role, weight);
            worth_[kind] = gittins(rate_[kind]);
        }
    }
    compute_hints(base, weight);
    Ages left = base;
    for (double &each : left) each *= kLeftRate;
    compute_from(kLeft, left, weight);
}

// What a hint says is where the rate of its class begins; what comes of such hints draws it away.
void ReuseTables::compute_hints(const Ages &base, double weight) {
    for (std::size_t hint = 0; hint < kHints; ++hint) {
        const std::size_t kind = kFirstHint + hint;
        Ages said;
        for (std::size_t age = 0; age < kAges; ++age)
            said[age] = HintClasses::expected_rate(hint, begin(age) + widths()[age] / 2, base[age]);
        compute_from(kind, said, weight);
    }
}

void ReuseTables::compute_from(std::size_t kind, const Ages &guess, double weight) {
    rate_[kind] = smoothed(reused_[kind], at_risk_[kind], guess, weight);
    worth_[kind] = gittins(rate_[kind]);
}

// From all ages at once, in vectors, for which single precision does.
std::array<double, ReuseTables::kAges + 1> ReuseTables::gittins(const Ages &rate) {
    std::array<float, kAges> alive, hits{}, seconds{}, best{};
    alive.fill(1);
    for (std::size_t until = 0; until < kAges; ++until) {
        const double reused = -std::expm1(-rate[until] * widths()[until]);
        const auto chance = static_cast<float>(reused), left = static_cast<float>(1 - reused);
        const auto spent = static_cast<float>(reused / rate[until]);
        for (std::size_t age = 0; age <= until; ++age) {
            hits[age] += alive[age] * chance;
            seconds[age] += alive[age] * spent;
            const float found = hits[age] / seconds[age];
            best[age] = best[age] < found ? found : best[age];
            alive[age] *= left;
        }
    }
    std::array<double, kAges + 1> worth;
    std::copy(best.begin(), best.end(), worth.begin());
    worth[kAges] = worth[kAges - 1];
    return worth;
}

void ReuseTables::forecast(const Table<double> &present, double blocks) {
    std::vector<std::pair<double, double>> groups;  // worth, number
    for (std::size_t kind = 0; kind < kClasses; ++kind) {
        double least = std::numeric_limits<double>::infinity();
        for (std::size_t age = 0; age < kAges; ++age) {
            least = std::min(least, (worth_[kind][age] + worth_[kind][age + 1]) / 2);
            least_worth_[kind][age] = least;
            if (present[kind][age] > 0) groups.emplace_back(least, present[kind][age]);
        }
    }
    std::sort(groups.begin(), groups.end(), std::greater<>());
    kept_worth_ = 0;
    for (const auto &[worth, number] : groups) {
        blocks -= number;
        if (blocks > 0) continue;
        kept_worth_ = worth;
        break;
    }
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
