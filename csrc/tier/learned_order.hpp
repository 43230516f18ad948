// The order by what is learned of reuse: the leaf of the lowest worth first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "tier/ghosts.hpp"
#include "tier/hints.hpp"
#include "tier/leaf_order.hpp"
#include "tier/left_paths.hpp"
#include "tier/lru_shadow.hpp"
#include "tier/reuse_tables.hpp"
#include "tier/survival.hpp"
#include "tier/trust.hpp"

namespace fdcache {

// Evicts the leaf whose place is worth the least: the expected hits per second of keeping it, by the class of
// the block (what it was in its last request) and by the age of its last use. docs/eviction.md has the
// reasoning and the measurements; this is why it has these parts:
//
// - Worth depends on age, so ranks drift while nothing happens, and a list as that of LruOrder cannot hold
//   them. LeafOrder's heap ranks a leaf again when it is about to be taken, and a share of all leaves as time
//   passes, so that an eviction costs a few ranks and not a walk over the tier.
// - ReuseTables count how often blocks of a class are used again at an age. A tier alone would count only
// what
//   it kept, and never learn that it evicts a class too early. Ghosts remember evicted blocks, so that
//   their reuse counts as well.
// - A path that goes on elsewhere leaves the rest of it behind: the answer that its next prompt spells in
//   other tokens, or what was compacted. LeftPaths knows which blocks these are, without a visit.
// - Survival makes an eviction cheaper whose block the tier below has or will get.
// - LruShadow knows what eviction by last use would have found, without a second tier. Trust compares both
// and
//   falls back to last use while less is found: traffic that has changed costs a bounded share of hits.
class LearnedOrder final : public LeafOrder {
  public:
    bool learns() const override { return true; }
    void set_demotion(Demotion demotion) override {
        demotion_ = std::move(demotion);
        set_above();
    }
    void set_above() override {
        trust_.be_one_of_several();
        hinted_.be_one_of_several();
    }
    void set_time(std::uint64_t milliseconds) override;
    void set_values(std::function<EndValue(Slot)> value_of) override {
        value_of_ = std::move(value_of);
        values_.resize(blocks_.size());
    }
    void arrive(std::span<const Slot> path, std::span<const Digest> digests) override;
    void leave(Slot slot, const Digest &digest, bool evicted) override;
    void take(std::uint32_t count, std::vector<Slot> &taken) override;
    void begin(std::span<const Slot> path) override;
    void use(std::span<const Slot> path, const RequestEnd *end) override;
    void prefetch(Slot slot, const Digest &digest) const override {
        __builtin_prefetch(&blocks_[slot], 1);
        ghosts_.prefetch(digest);
    }
    HintAnswer hint(std::span<const Slot> path, const Hint &hint) override;
    HintFate fate(Slot slot, const Digest &digest) override;
    void resize(std::uint32_t slots) override;
    void clear() override;
    std::size_t bytes() const override;

    ReuseTables *tables() override { return &tables_; }

  private:
    static constexpr std::size_t kGhosts = 4;                         // per slot
    static constexpr std::uint32_t kLearnEvery = 16'000;              // ms
    static constexpr std::uint64_t kOldest = std::uint64_t{1} << 31;  // ms, of an age that is remembered
    static constexpr double kFade = 16;  // uses per slot, and per thousand requests, until counts are halved
    static constexpr double kRankEvery = 8'000;    // ms
    static constexpr double kMostRanks = 8;        // in a millisecond, for the passing of time
    static constexpr std::size_t kFewLeaves = 64;  // that are ranked again at each time
    static constexpr double kBeside = 0.5;         // share of a tier below, into which new blocks are copied
    static constexpr double kHintBudget = 0.5;     // share of the slots whose blocks may have room for hints
    static constexpr std::size_t kSamples = 8192;  // blocks whose age is looked at to learn
    static constexpr std::size_t kAhead = 64;      // samples between a prefetch and its use
    static constexpr std::uint32_t kTailTokens = 2048;  // the end of a path, which few requests share
    static constexpr std::uint8_t kManyHits = 8;        // of a block that many requests begin with
    static constexpr std::uint8_t kMostHits = 127;      // counted
    static constexpr std::uint8_t kOfState = 1;         // lengths: tiers with states see none of requests
    static constexpr std::uint32_t kEndless = 60'000;   // ms, in which a page gets the states it came for,
    static constexpr float kUseless = 1.0F / 64;        // and its share of a page's worth without them

    struct Block {
        std::uint32_t last_ms = 0;           // the end of the last use, since `begin_ms_`
        std::uint32_t request = 0;           // that used it last, as LeftPaths counts them
        std::uint8_t kind = 0;               // class: role, output and new tokens of its last request
        std::uint8_t hits = 0;               // up to kMostHits
        bool is_tracked : 1 = false;         // used, now or when it was an entry before
        bool is_used : 1 = false;            // since it arrived
        bool is_idle : 1 = false;            // no use of it has begun since the last one ended
        bool is_counted : 1 = false;         // the use that has begun
        bool has_room : 1 = false;           // for a hint, until its next use
        mutable bool was_below : 1 = false;  // when it was ranked or taken last
    };

    // What the blocks of one request have in common.
    struct Features {
        bool is_fresh = true;
        std::uint8_t lengths = 0;
        std::uint32_t request = 0;
    };

    // The use of a block, against last use: what the tier found more, and what it would by the tables.
    struct Comparison {
        double gain, forecast;
        bool weighs() const { return gain != 0 || forecast != 0; }
    };

    // What a block is by now: a hint about it holds until its next use.
    std::uint8_t kind_of(const Block &block) const {
        const bool is_left = !ReuseTables::is_hint(block.kind) && left_.holds(block.request);
        return is_left ? std::uint8_t{ReuseTables::kLeft} : block.kind;
    }
    bool is_by_last_use() const { return !trust_.is_given(); }
    // A bit for each of these entries that the tier below holds.
    std::uint64_t below(std::span<const Slot> slots) const {
        return demotion_.below && !slots.empty() ? demotion_.below(slots) : 0;
    }
    bool is_below(Slot slot) const { return below({&slot, 1}) != 0; }
    // How many entries of a path the tier below holds, from its beginning on: mostly none or all.
    std::size_t held_below(const auto &path) const {
        if (!demotion_.below || path.empty()) return 0;
        const std::uint64_t ends = below(std::array{path.front(), path.back()});
        if (ends & 2) return path.size();
        std::size_t low = ends & 1, high = ends & 1 ? path.size() - 1 : 0;
        while (low < high) {
            const std::size_t middle = low + (high - low) / 2;
            if (is_below(path[middle]))
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
    // The share of an entry's worth that its eviction loses.
    double loss(const Block &block, bool is_below) const {
        if (!demotion_.below) return 1;
        block.was_below = is_below;
        return survival_.loss(is_below, block.hits > 0);
    }
    void rank(std::span<const Slot> slots, std::span<double> ranks) const override;
    void rank_path(std::span<const Slot> path, std::span<double> ranks) const override;
    double rank_of(Slot slot, bool is_below) const;
    double worth(const Block &block) const;
    double density(Slot slot) const;
    double saved(Slot slot) const { return values_.empty() ? 1 : values_[slot].saved; }
    bool is_state(Slot slot) const { return !values_.empty() && values_[slot].saved != 0; }
    void value(Slot slot) {
        if (!values_.empty()) values_[slot] = value_of_(slot);
    }
    // The states, or what was above them, have gone that were below an entry.
    void lost_end(Slot slot) const {
        if (!values_.empty()) values_[slot] = {0, kUseless};
    }
    void before_add(Slot slot) override;
    void before_take(Slot slot) override {
        if (is_state(slot)) value(slot);
    }
    Features features_of(std::span<const Slot> path, const RequestEnd *end) const;
    double score(const Block &block, bool is_found, bool is_below) const;
    double share_to_rank(double passed) const;
    void move_begin(std::uint64_t milliseconds);
    std::uint32_t next_request(std::span<const Slot> path);
    void touch(Slot slot, const Features &features, bool is_last);
    void begin_use(Slot slot, bool is_below);
    void count(Slot slot, bool is_found, bool is_below);
    void judge();
    void leave_shadows(std::uint32_t last_ms);
    void trim_shadows();
    Comparison compare(const Block &block, bool is_found) const;
    void learn();

    ReuseTables tables_;
    LruShadow shadow_;
    LruShadow both_;  // and what it and the tier below would hold together
    Trust trust_;     // false: blocks without a hint are ranked by their last use
    Trust hinted_;    // by what was found of hinted blocks; false as well: those, too
    Demotion demotion_;
    Survival survival_;
    LeftPaths left_;
    Ghosts ghosts_;
    LargeVector<Block> blocks_;
    std::function<EndValue(Slot)> value_of_;
    mutable LargeVector<EndValue> values_;  // empty where prefixes end at any block
    mutable std::uint32_t placed_ms_ = 0;   // the last use whose age was looked up
    mutable double place_ = 0;              // on the scale of ages
    std::uint32_t tail_ = 1;                // blocks of a path's end
    std::size_t idle_ = 0;                  // entries that were used and are not
    std::size_t beside_ = 0;                // blocks that the tier below would hold beside these
    std::size_t kept_ = 0;                  // entries that have room for hints
    std::uint64_t begin_ms_ = 0;            // times are counted from here
    std::uint32_t now_ = 0;
    std::uint32_t learned_ = 0;  // when the tables were computed
    double uses_ = 0;            // of blocks, since then
    bool is_timed_ = false;
    bool is_forecast_ = false;  // since trust was lost
};

}  // namespace fdcache
