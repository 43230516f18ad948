// Nanoseconds a block of a tier's eviction policies on a trace: match, reservation, commit and release of
// each request, one request at a time, by itself or above another tier.
//
//   trace_blocks TRACE SLOTS BELOW ROUNDS
//
// TRACE: 32-bit words of each request: time in ms, tokens of prompt and output, number of ids, ids of 512
// tokens. After each request the blocks that were used twice are copied to the tier below, without a clock.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hash/digest.hpp"
#include "tier/outgoing.hpp"
#include "tier/session.hpp"
#include "tier/shared_host.hpp"
#include "tier/shared_runs.hpp"

namespace {

using namespace fdcache;
using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kTokens = 64;    // of a block
constexpr std::uint32_t kParts = 8;      // blocks of an id
constexpr std::uint32_t kWorthCopy = 2;  // uses

std::uint64_t mixed(std::uint64_t value) {
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

Digest digest_of(std::uint64_t content) {
    Digest digest;
    for (std::uint64_t word = 0; word < 4; ++word) {
        const std::uint64_t value = mixed(content * 4 + word + 1);
        std::memcpy(digest.bytes.data() + 8 * word, &value, sizeof value);
    }
    return digest;
}

struct Request {
    std::uint32_t time, prompt, output;
    std::span<const std::uint32_t> ids;
};

std::vector<std::uint32_t> words_of(const char *path) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    std::vector<std::uint32_t> words(bytes.size() / sizeof(std::uint32_t));
    std::memcpy(words.data(), bytes.data(), words.size() * sizeof(std::uint32_t));
    return words;
}

std::vector<Request> requests_of(std::span<const std::uint32_t> words) {
    std::vector<Request> requests;
    for (std::size_t at = 0; at + 4 <= words.size(); at += 4 + words[at + 3])
        requests.push_back({words[at], words[at + 1], words[at + 2], words.subspan(at + 4, words[at + 3])});
    return requests;
}

enum Phase { kMatch, kReserve, kCommit, kRelease, kPhases };
constexpr std::array<const char *, kPhases> kNames{"match", "reserve", "commit", "release"};

struct Costs {
    std::array<double, kPhases> ns{};
    double blocks = 0, found = 0;
    std::uint64_t order = 0;  // of the evicted blocks

    double total() const { return ns[kMatch] + ns[kReserve] + ns[kCommit] + ns[kRelease]; }
};

// What is below: nothing, a tier of which the one above does not know, a tier of the same process, or one
// that a service shares.
enum class Lower { kNone, kUnknown, kTier, kService };

class World {
  public:
    World(const char *policy, std::uint32_t slots, Lower lower, std::uint32_t below)
        : tier_(slots, policy), shared_(lower == Lower::kService ? 4 * std::size_t{below} + 16 : 0) {
        if (lower != Lower::kNone) below_ = std::make_unique<Tier>(below, policy);
        if (lower == Lower::kTier) tier_.set_below(*below_, false);
        if (lower != Lower::kService) return;
        const PresenceTable table(shared_.data(), shared_.size() / 16 * 16 * sizeof(std::uint64_t));
        below_->mirror(table);
        host_.begin_session(std::make_shared<SharedRuns>(table, RunRing(ring_.data(), sizeof ring_)),
                            std::make_shared<OutgoingCopies>(table));
        tier_.set_below(host_, false);
    }

    Costs run(std::span<const Request> requests) {
        Costs costs;
        for (const Request &request : requests) serve(request, costs);
        return costs;
    }

  private:
    template <typename Call>
    void timed(Costs &costs, Phase phase, Call call) {
        const auto started = Clock::now();
        call();
        costs.ns[phase] += std::chrono::duration<double, std::nano>(Clock::now() - started).count();
    }

    void lay_out(const Request &request) {
        const std::size_t prompt =
            std::min<std::size_t>(request.prompt / kTokens, kParts * request.ids.size());
        const std::size_t whole = prompt + request.output / kTokens;
        path_.resize(whole);
        for (std::size_t i = 0; i < prompt; ++i)
            path_[i] = digest_of(std::uint64_t{request.ids[i / kParts]} * kParts + i % kParts);
        for (std::size_t i = prompt; i < whole; ++i)
            path_[i] = digest_of((std::uint64_t{1} << 40) + ++outputs_);
    }

    void serve(const Request &request, Costs &costs) {
        lay_out(request);
        const std::span<const Digest> path(path_);
        tier_.set_clock(request.time);
        if (below_) below_->set_clock(request.time);
        table_.clear();
        evicted_.clear();
        LeaseId lease = 0;
        timed(costs, kMatch, [&] {
            Tier::Session tier(tier_);
            lease = tier.open_lease();
            tier.match(lease, path, 0, 0, table_);
        });
        const std::size_t matched = table_.size();
        const auto count = static_cast<std::uint32_t>(path.size() - matched);
        timed(costs, kReserve, [&] {
            if (Tier::Session(tier_).reserve(lease, count, table_, &evicted_)) std::abort();
        });
        timed(costs, kCommit, [&] {
            Tier::Session(tier_).commit(lease, matched ? path[matched - 1] : Digest{}, path.subspan(matched),
                                        std::span(table_).subspan(matched));
        });
        const RequestEnd end{request.prompt, request.output, kTokens};
        timed(costs, kRelease, [&] { Tier::Session(tier_).finish(lease, &end); });
        costs.blocks += static_cast<double>(path.size());
        costs.found += static_cast<double>(matched);
        for (const Digest &each : evicted_.hashes) costs.order = mixed(costs.order ^ each.word(0));
        if (below_) copy(path);
    }

    void copy(std::span<const Digest> path) {
        std::vector<Digest> hashes, parents;
        Tier::Session tier(tier_);
        for (std::size_t i = 0; i < path.size() && tier.hits(table_[i]) >= kWorthCopy; ++i) {
            hashes.push_back(path[i]);
            parents.push_back(i ? path[i - 1] : Digest{});
        }
        const CopyReservation taken = below_->reserve_copies(0, parents, hashes);
        const std::vector<std::uint8_t> copied(taken.slots.size(), 1);
        below_->complete(taken.slots, copied, {});
    }

    std::unique_ptr<Tier> below_;
    Tier tier_;
    LargeVector<std::uint64_t> shared_;
    alignas(16) std::array<std::uint64_t, 512> ring_{};
    SharedHost host_;
    std::vector<Digest> path_;
    std::vector<Slot> table_;
    BlockList evicted_;
    std::uint64_t outputs_ = 0;
};

}  // namespace

int main(int argc, char **argv) {
    if (argc != 5) return std::fprintf(stderr, "usage: trace_blocks TRACE SLOTS BELOW ROUNDS\n"), 2;
    const std::vector<std::uint32_t> words = words_of(argv[1]);
    const std::vector<Request> requests = requests_of(words);
    const auto slots = static_cast<std::uint32_t>(std::strtoul(argv[2], nullptr, 10)),
               below = static_cast<std::uint32_t>(std::strtoul(argv[3], nullptr, 10));
    const std::size_t rounds = std::strtoul(argv[4], nullptr, 10);
    struct Row {
        const char *policy, *name;
        Lower lower;
        Costs best{};
    };
    std::vector<Row> rows{{"lru", "-", Lower::kNone},
                          {"learned", "-", Lower::kNone},
                          {"learned", "beside", Lower::kUnknown},
                          {"learned", "tier", Lower::kTier},
                          {"learned", "service", Lower::kService}};
    for (std::size_t round = 0; round < rounds; ++round) {
        for (Row &row : rows) {
            const Costs costs = World(row.policy, slots, row.lower, below).run(requests);
            if (!round || costs.total() < row.best.total()) row.best = costs;
        }
    }
    for (const Row &row : rows) {
        std::printf("{\"policy\": \"%s\", \"above\": \"%s\"", row.policy, row.name);
        for (int phase = 0; phase < kPhases; ++phase)
            std::printf(", \"%s\": %.1f", kNames[phase], row.best.ns[phase] / row.best.blocks);
        std::printf(", \"all\": %.1f, \"found\": %.4f, \"order\": \"%016llx\"}\n",
                    row.best.total() / row.best.blocks, row.best.found / row.best.blocks,
                    static_cast<unsigned long long>(row.best.order));
    }
    return 0;
}
