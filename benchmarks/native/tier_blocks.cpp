// Nanoseconds a block of the tier's operations, beside a plain list of blocks: one hash table, reference
// counts and one list in the order of last use. The list has no tree, leases, copies, or runs of slots.
//
//   tier_blocks SLOTS REQUESTS ROUNDS
//
// Conversations grow turn by turn; a turn is a request, which matches its path, reserves and commits the
// rest, grows by a few blocks one at a time, and is released when 32 younger ones are running.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <span>
#include <vector>

#include "hash/digest.hpp"
#include "tier/session.hpp"

namespace {

using fdcache::Digest;
using fdcache::LeaseId;
using fdcache::Slot;
using fdcache::Tier;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kRunning = 32;
constexpr std::size_t kGrown = 5;  // blocks that a request adds one at a time
constexpr std::uint32_t kNone = UINT32_MAX;

std::uint64_t mixed(std::uint64_t value) {
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

Digest digest_of(std::uint64_t path, std::uint64_t depth) {
    Digest digest;
    for (std::uint64_t word = 0; word < 4; ++word) {
        const std::uint64_t value = mixed(mixed(path * 4 + word + 1) + depth);
        std::memcpy(digest.bytes.data() + 8 * word, &value, sizeof value);
    }
    return digest;
}

// A table of blocks, of which those that no request uses are in a circular list, coldest first.
class PlainList {
  public:
    explicit PlainList(std::uint32_t slots) : blocks_(slots + std::size_t{1}), end_(slots), idle_(slots) {
        std::size_t cells = 8;
        while (cells < 2 * std::size_t{slots}) cells *= 2;
        cells_.resize(cells, kNone);
        blocks_[end_].before = blocks_[end_].after = end_;
        for (std::uint32_t each = 0; each < slots; ++each) append(each);
    }

    struct Request {
        std::vector<std::uint32_t> table;
    };

    std::size_t match(Request &request, std::span<const Digest> path) {
        for (const Digest &hash : path) {
            const std::uint32_t found = cells_[cell_of(hash)];
            if (found == kNone) break;
            if (blocks_[found].users++ == 0) {
                take_out(found);
                --idle_;
            }
            request.table.push_back(found);
        }
        return request.table.size();
    }

    void reserve(Request &request, std::size_t count) {
        if (count > idle_) std::abort();
        for (; count; --count) {
            const std::uint32_t taken = blocks_[end_].after;
            Block &block = blocks_[taken];
            take_out(taken);
            --idle_;
            if (block.findable) forget(block.hash);
            block.findable = false;
            block.users = 1;
            request.table.push_back(taken);
        }
    }

    void commit(Request &request, std::span<const Digest> path, std::size_t first) {
        for (std::size_t i = first; i < path.size(); ++i) {
            std::uint32_t &cell = cells_[cell_of(path[i])];
            if (cell != kNone) continue;
            cell = request.table[i];
            blocks_[cell].hash = path[i];
            blocks_[cell].findable = true;
        }
    }

    void release(Request &request) {
        for (auto each = request.table.rbegin(); each != request.table.rend(); ++each) {
            if (--blocks_[*each].users) continue;
            append(*each);
            ++idle_;
        }
    }

  private:
    struct Block {
        Digest hash;
        std::uint32_t users = 0, before = 0, after = 0;
        bool findable = false;
    };

    std::size_t place(const Digest &hash) const { return hash.word(0) & (cells_.size() - 1); }
    std::size_t cell_of(const Digest &hash) const {
        std::size_t cell = place(hash);
        while (cells_[cell] != kNone && !(blocks_[cells_[cell]].hash == hash))
            cell = (cell + 1) & (cells_.size() - 1);
        return cell;
    }

    void forget(const Digest &hash) {
        const std::size_t mask = cells_.size() - 1;
        std::size_t hole = cell_of(hash);
        for (std::size_t cell = (hole + 1) & mask; cells_[cell] != kNone; cell = (cell + 1) & mask) {
            const std::size_t home = place(blocks_[cells_[cell]].hash);
            if (((cell - home) & mask) < ((cell - hole) & mask)) continue;
            cells_[hole] = cells_[cell];
            hole = cell;
        }
        cells_[hole] = kNone;
    }

    void append(std::uint32_t each) {
        const std::uint32_t last = blocks_[end_].before;
        blocks_[each].before = last;
        blocks_[each].after = end_;
        blocks_[last].after = blocks_[end_].before = each;
    }

    void take_out(std::uint32_t each) {
        blocks_[blocks_[each].before].after = blocks_[each].after;
        blocks_[blocks_[each].after].before = blocks_[each].before;
    }

    std::vector<Block> blocks_;
    std::vector<std::uint32_t> cells_;
    std::uint32_t end_;
    std::size_t idle_;
};

class TierBlocks {
  public:
    explicit TierBlocks(std::uint32_t slots) : tier_(slots) {}

    struct Request {
        LeaseId lease = 0;
        std::vector<Slot> table;
    };

    std::size_t match(Request &request, std::span<const Digest> path) {
        Tier::Session tier(tier_);
        request.lease = tier.open_lease();
        tier.match(request.lease, path, 0, 0, request.table);
        return request.table.size();
    }

    void reserve(Request &request, std::size_t count) {
        if (Tier::Session(tier_).reserve(request.lease, static_cast<std::uint32_t>(count), request.table))
            std::abort();
    }

    void commit(Request &request, std::span<const Digest> path, std::size_t first) {
        const Digest parent = first ? path[first - 1] : Digest{};
        Tier::Session(tier_).commit(request.lease, parent, path.subspan(first),
                                    std::span(request.table).subspan(first));
    }

    void release(Request &request) { Tier::Session(tier_).release(request.lease); }

  private:
    Tier tier_;
};

enum Phase { kMatch, kReserve, kCommit, kGrow, kRelease, kPhases };
constexpr const char *kNames[kPhases] = {"match", "reserve", "commit", "grow", "release"};

struct Costs {
    double ns[kPhases] = {};
    double blocks[kPhases] = {};
};

// Requests of conversations whose paths together have one and a half times as many blocks as there are slots.
template <typename Blocks>
class Traffic {
  public:
    explicit Traffic(std::uint32_t slots) : blocks_(slots), talks_(std::max(slots / 100u, 40u)) {
        for (Talk &talk : talks_) start(talk, 20 + random_() % 260);
    }

    Costs run(std::size_t requests) {
        costs_ = {};
        for (; requests; --requests) serve();
        return costs_;
    }

    Blocks &blocks() { return blocks_; }

  private:
    struct Talk {
        std::uint64_t path = 0;
        std::size_t length = 0;
    };

    void start(Talk &talk, std::size_t length) { talk = {++paths_, length}; }

    template <typename Call>
    void timed(Phase phase, Call call) {
        const auto started = Clock::now();
        const std::size_t blocks = call();
        costs_.ns[phase] += std::chrono::duration<double, std::nano>(Clock::now() - started).count();
        costs_.blocks[phase] += static_cast<double>(blocks);
    }

    void serve() {
        Talk &talk = talks_[random_() % talks_.size()];
        if (talk.length > 320) start(talk, 20);
        talk.length += 16 + random_() % 48;
        const std::size_t prompt = talk.length;
        talk.length += kGrown;
        path_.resize(talk.length);
        for (std::size_t i = 0; i < path_.size(); ++i) path_[i] = digest_of(talk.path, i);
        const std::span<const Digest> path(path_);
        running_.emplace_back();
        typename Blocks::Request &request = running_.back();
        std::size_t matched = 0;
        timed(kMatch, [&] { return matched = blocks_.match(request, path.first(prompt)); });
        timed(kReserve, [&] {
            blocks_.reserve(request, prompt - matched);
            return prompt - matched;
        });
        timed(kCommit, [&] {
            blocks_.commit(request, path.first(prompt), matched);
            return prompt - matched;
        });
        for (std::size_t i = prompt; i < path.size(); ++i)
            timed(kGrow, [&] {
                blocks_.reserve(request, 1);
                blocks_.commit(request, path.first(i + 1), i);
                return std::size_t{1};
            });
        if (running_.size() <= kRunning) return;
        timed(kRelease, [&] {
            blocks_.release(running_.front());
            return running_.front().table.size();
        });
        running_.pop_front();
    }

    Blocks blocks_;
    std::mt19937_64 random_{1};
    std::vector<Talk> talks_;
    std::uint64_t paths_ = 0;
    std::vector<Digest> path_;
    std::deque<typename Blocks::Request> running_;
    Costs costs_;
};

void keep_least(Costs &best, const Costs &round) {
    for (int phase = 0; phase < kPhases; ++phase) {
        if (best.blocks[phase] &&
            best.ns[phase] / best.blocks[phase] <= round.ns[phase] / round.blocks[phase])
            continue;
        best.ns[phase] = round.ns[phase];
        best.blocks[phase] = round.blocks[phase];
    }
}

void print(const char *name, std::size_t slots, std::size_t requests, const Costs &costs) {
    std::printf("{\"name\": \"%s\", \"slots\": %zu", name, slots);
    double total = 0;
    for (int phase = 0; phase < kPhases; ++phase) {
        total += costs.ns[phase];
        std::printf(", \"%s\": %.1f", kNames[phase], costs.ns[phase] / std::max(costs.blocks[phase], 1.0));
    }
    std::printf(", \"request_us\": %.2f, \"hit_rate\": %.3f}\n", total / 1000 / static_cast<double>(requests),
                costs.blocks[kMatch] / (costs.blocks[kMatch] + costs.blocks[kReserve]));
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 4) return std::fprintf(stderr, "usage: tier_blocks SLOTS REQUESTS ROUNDS\n"), 2;
    const auto slots = static_cast<std::uint32_t>(std::strtoul(argv[1], nullptr, 10));
    const std::size_t requests = std::strtoul(argv[2], nullptr, 10),
                      rounds = std::strtoul(argv[3], nullptr, 10);
    Traffic<PlainList> plain(slots);
    Traffic<TierBlocks> tier(slots);
    const std::size_t warm = slots / 20 + 2 * kRunning;
    plain.run(warm);
    tier.run(warm);
    Costs plain_costs, tier_costs;
    for (std::size_t round = 0; round < rounds; ++round) {
        keep_least(plain_costs, plain.run(requests));
        keep_least(tier_costs, tier.run(requests));
    }
    print("list", slots, requests, plain_costs);
    print("tier", slots, requests, tier_costs);
    return 0;
}
