#include "tier/learned_order.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <ranges>
#include <utility>

namespace fdcache {
namespace {

// The group of a number: how many of the limits it exceeds.
template <std::size_t N>
std::size_t group(std::uint64_t number, const std::array<std::uint64_t, N> &limits) {
    return static_cast<std::size_t>(std::lower_bound(limits.begin(), limits.end(), number) - limits.begin());
}

constexpr std::array<std::uint64_t, ReuseTables::kOutputs - 1> kOutputLimits{4, 32, 128, 512};
constexpr std::array<std::uint64_t, ReuseTables::kNews - 1> kNewLimits{512, 2048, 8192, 32768};

std::size_t role_of(std::uint8_t hits, bool is_fresh, bool is_last) {
    if (is_last && hits < 4) return hits ? 1 : 0;
    if (!hits) return is_fresh ? 2 : 3;
    if (hits < 4) return 3 + std::size_t{hits};
    return hits < 8 ? 7 : 8;
}

}  // namespace

void LearnedOrder::set_time(std::uint64_t milliseconds) {
    if (!is_timed_) begin_ms_ = milliseconds;
    const std::uint64_t passed = milliseconds - begin_ms_ - now_;
    if (!passed && is_timed_) return;
    is_timed_ = true;
    owe(share_to_rank(static_cast<double>(passed)));
    if (milliseconds - begin_ms_ > UINT32_MAX) move_begin(milliseconds - kOldest);
    placed_ms_ = now_ = static_cast<std::uint32_t>(milliseconds - begin_ms_);
    place_ = 0;
    if (now_ - learned_ >= kLearnEvery) learn();
}

// Counts times from here on, so that 32 bits hold them: what was before becomes as old as this.
void LearnedOrder::move_begin(std::uint64_t milliseconds) {
    const std::uint64_t by = milliseconds - begin_ms_;
    const auto move = [by](std::uint32_t &time) {
        time = time > by ? static_cast<std::uint32_t>(time - by) : 0;
    };
    for (Block &block : blocks_) move(block.last_ms);
    ghosts_.for_each_time(move);
    shadow_.move_begin(by);
    both_.move_begin(by);
    move(learned_);
    begin_ms_ = milliseconds;
}

// Of the leaves, for the time that passed: many change their order more slowly, and evictions rank them, too.
double LearnedOrder::share_to_rank(double passed) const {
    const auto count = static_cast<double>(leaves());
    return leaves() <= kFewLeaves ? 1 : passed / std::max(kRankEvery, count / kMostRanks);
}

void LearnedOrder::arrive(std::span<const Slot> path, std::span<const Digest> digests) {
    std::optional<std::size_t> held;
    for (std::size_t i = 0; i < path.size(); ++i) {
        Block &block = blocks_[path[i]];
        block = Block{};
        value(path[i]);
        const auto ghost = ghosts_.take(digests[i]);
        if (!ghost) continue;
        if (!held) held = held_below(path);
        block.last_ms = ghost->last_ms;
        block.kind = ghost->kind;
        block.hits = ghost->hits;
        block.is_tracked = true;
        if (demotion_.below) survival_.used_again(ghost->was_below, ghost->hits > 0, i < *held);
        count(path[i], false, i < *held);
        leave_shadows(block.last_ms);
    }
    judge();
}

void LearnedOrder::leave(Slot slot, const Digest &digest, bool evicted) {
    Block &block = blocks_[slot];
    if (block.is_tracked) {
        const Ghosts::Memory memory{block.last_ms, kind_of(block), block.hits, evicted && block.was_below};
        const auto forgotten = evicted ? ghosts_.add(digest, memory) : memory;
        if (forgotten) tables_.forget(forgotten->kind, now_ - forgotten->last_ms);
        kept_ -= block.has_room;
    }
    if (block.is_idle) {
        --idle_;
        if (!evicted) leave_shadows(block.last_ms);
    }
    block = Block{};
}

void LearnedOrder::take(std::uint32_t count, std::vector<Slot> &taken) {
    std::size_t first = taken.size();
    LeafOrder::take(count, taken);
    if (!demotion_.below || !is_by_last_use()) return;
    // What is taken by worth was looked up in the tier below when it was ranked.
    for (std::size_t last = first; first < taken.size(); first = last) {
        for (++last; last < taken.size() && parent(taken[last - 1]) == taken[last];) ++last;
        const std::span<const Slot> path = std::span(taken).subspan(first, last - first);
        const std::size_t gone = path.size() - held_below(std::views::reverse(path));
        for (std::size_t i = 0; i < path.size(); ++i) blocks_[path[i]].was_below = i >= gone;
    }
}

void LearnedOrder::begin(std::span<const Slot> path) {
    trim_shadows();
    const bool is_asked = demotion_.below && std::ranges::any_of(path, [this](Slot slot) {
                              const Block &block = blocks_[slot];
                              return block.is_idle && !block.is_counted && compare(block, true).weighs();
                          });
    const std::size_t held = is_asked ? held_below(path) : 0;
    for (std::size_t i = 0; i < path.size(); ++i) begin_use(path[i], i < held);
}

// Found in the tier. While a block is used it stays in any tier, and its next use is no merit of the order.
void LearnedOrder::begin_use(Slot slot, bool is_below) {
    Block &block = blocks_[slot];
    if (!block.is_idle) return;
    if (!block.is_counted) count(slot, true, is_below);
    leave_shadows(block.last_ms);
    block.is_idle = false;
    --idle_;
}

void LearnedOrder::use(std::span<const Slot> path, const RequestEnd *end) {
    if (path.empty()) return;
    value(path.front());
    Features features = features_of(path, end);
    features.request = next_request(path);
    if (end) tail_ = std::max(kTailTokens / std::max(end->block_tokens, 1u), 1u);
    for (std::size_t i = 0; i < path.size(); ++i) touch(path[i], features, i < tail_);
    tables_.path(path.size());
    trim_shadows();
    judge();
}

// Where a path has known blocks and then others, the known ones may go on in another way below. If it is one
// way, that is the path as the last request of these blocks had it, and what is left of it was left behind;
// where several go on, as below a prompt that many share, each may be somebody else's.
std::uint32_t LearnedOrder::next_request(std::span<const Slot> path) {
    const auto known =
        std::find_if(path.begin(), path.end(), [this](Slot slot) { return blocks_[slot].is_tracked; });
    if (known != path.begin() && known != path.end() && children(*known) == 1) {
        left_.leave(blocks_[*known].request);
        owe(share_to_rank(0));
    }
    return left_.next();
}

void LearnedOrder::judge() {
    const bool was_given = trust_.is_given(), was_hinted = hinted_.is_given();
    trust_.judge(tables_.mean_path(), static_cast<double>(slots()));
    hinted_.judge(tables_.mean_path(), static_cast<double>(slots()));
    if (trust_.is_given() != was_given || hinted_.is_given() != was_hinted) owe(1);
    is_forecast_ = is_forecast_ && !trust_.is_given();
}

LearnedOrder::Features LearnedOrder::features_of(std::span<const Slot> path, const RequestEnd *end) const {
    const auto known =
        std::find_if(path.begin(), path.end(), [this](Slot slot) { return blocks_[slot].is_tracked; });
    const bool is_fresh = known == path.end() || blocks_[*known].hits >= kManyHits;
    if (!end) return {is_fresh};
    const auto known_blocks = static_cast<std::uint64_t>(path.end() - known);
    const std::uint64_t known_tokens = std::min(known_blocks * end->block_tokens, end->prompt_tokens);
    const std::size_t output = group(end->output_tokens, kOutputLimits);
    const std::size_t fresh = group(end->prompt_tokens - known_tokens, kNewLimits);
    return {is_fresh, static_cast<std::uint8_t>(output * ReuseTables::kNews + fresh)};
}

void LearnedOrder::touch(Slot slot, const Features &features, bool is_last) {
    Block &block = blocks_[slot];
    if (block.is_idle) begin_use(slot, is_below(slot));
    ++uses_;
    trust_.use();
    if (ReuseTables::is_hint(block.kind)) hinted_.use();
    if (block.is_tracked && block.hits != kMostHits) ++block.hits;
    kept_ -= block.has_room;
    const std::size_t role = role_of(block.hits, features.is_fresh, is_last);
    const std::uint8_t lengths = is_state(slot) ? kOfState : features.lengths;
    block.kind = static_cast<std::uint8_t>(role * ReuseTables::kFeatures + lengths);
    block.last_ms = now_;
    block.request = features.request;
    block.is_tracked = block.is_used = true;
    block.is_counted = block.has_room = false;
}

// A tracked block is used: was it found, and would it have been by last use? A request that has to wait, and
// begins again, counts once. A block that is not found here, but below, costs a load. With states these count
// for the pages that they save, which are there whenever they are.
void LearnedOrder::count(Slot slot, bool is_found, bool is_below) {
    Block &block = blocks_[slot];
    const Comparison compared = compare(block, is_found);
    const double gain = saved(slot) * (demotion_.below ? score(block, is_found, is_below) : compared.gain);
    const bool is_hinted = ReuseTables::is_hint(block.kind);
    trust_.compare(gain);
    if (is_hinted) hinted_.compare(gain);
    if (compared.forecast != 0) {
        const double lost = is_found ? loss(block, is_below) : is_below ? Survival::kLoad : 1;
        trust_.expect(saved(slot) * lost * compared.forecast);
        if (is_hinted) hinted_.expect(saved(slot) * lost * compared.forecast);
    }
    tables_.reuse(kind_of(block), now_ - block.last_ms);
    block.is_counted = true;
}

// What the use of a block gains on two tiers that evict by last use.
double LearnedOrder::score(const Block &block, bool is_found, bool is_below) const {
    constexpr double kFoundBelow = 1 - Survival::kLoad;
    const double here = shadow_.holds(block.last_ms);
    const double below = std::max(both_.holds(block.last_ms) - here, 0.0);
    return (is_found ? 1 : is_below ? kFoundBelow : 0) - (here + kFoundBelow * below);
}

LearnedOrder::Comparison LearnedOrder::compare(const Block &block, bool is_found) const {
    const double by_last_use = shadow_.holds(block.last_ms);
    const double gain = (is_found ? 1 : 0) - by_last_use;
    if (!is_forecast_) return {gain, 0};
    return {gain, (tables_.keeps(kind_of(block), now_ - block.last_ms) ? 1 : 0) - by_last_use};
}

// Data corrects what a hint says, through the class of its blocks; the budget, and trust in hints, bound what
// it costs until then. Of a path only the deepest entry can be a leaf, which has a rank.
HintAnswer LearnedOrder::hint(std::span<const Slot> path, const Hint &hint) {
    const double room = kHintBudget * static_cast<double>(blocks_.size()) - static_cast<double>(kept_);
    if (hint.takes_room() && static_cast<double>(path.size()) > room) {
        const auto more = std::ranges::count_if(path, [this](Slot slot) { return !blocks_[slot].has_room; });
        if (static_cast<double>(more) > room) return HintAnswer::kOverBudget;
    }
    Block *const blocks = blocks_.data();
    std::size_t kept = 0;
    for (std::size_t at = 0; at < path.size();) {
        if (!blocks[path[at]].is_tracked) touch(path[at], {}, false);
        const Block first = blocks[path[at]];
        // Its age goes on from its last use.
        Hint since = hint;
        if (hint.kind == HintKind::kRetain || hint.kind == HintKind::kReturn)
            since.value += (now_ - first.last_ms) / 1000.0;
        const auto kind =
            static_cast<std::uint8_t>(ReuseTables::kFirstHint + HintClasses::of(since, first.hits));
        for (; at < path.size(); ++at) {  // mostly all, used as often at the same time
            Block &block = blocks[path[at]];
            if (block.last_ms != first.last_ms || block.hits != first.hits || !block.is_tracked) break;
            kept += block.has_room;
            block.kind = kind;
            block.has_room = hint.takes_room();
        }
    }
    kept_ += (hint.takes_room() ? path.size() : 0) - kept;
    if (!path.empty()) rank_again(path.back());
    return HintAnswer::kTaken;
}

HintFate LearnedOrder::fate(Slot slot, const Digest &digest) {
    const bool is_there = slot != kNoSlot;
    std::uint8_t kind = 0;
    if (is_there) {
        kind = blocks_[slot].kind;
    } else {
        const auto ghost = ghosts_.peek(digest);
        if (!ghost) return HintFate::kGone;
        kind = ghost->kind;
    }
    if (!ReuseTables::is_hint(kind)) return HintFate::kUsed;
    return is_there ? HintFate::kWaiting : HintFate::kEvicted;
}

// A block that was copied into the tier without a request.
void LearnedOrder::before_add(Slot slot) {
    Block &block = blocks_[slot];
    if (!block.is_used) touch(slot, {}, false);
    if (block.is_idle) return;
    block.is_idle = true;
    block.last_ms = now_;
    shadow_.use(now_);
    if (demotion_.below) both_.use(now_);
    ++idle_;
}

void LearnedOrder::rank(std::span<const Slot> slots, std::span<double> ranks) const {
    for (const Slot slot : slots) __builtin_prefetch(&blocks_[slot]);
    const std::uint64_t held = is_by_last_use() ? 0 : below(slots);
    for (std::size_t i = 0; i < slots.size(); ++i) ranks[i] = rank_of(slots[i], held >> i & 1);
}

void LearnedOrder::rank_path(std::span<const Slot> path, std::span<double> ranks) const {
    for (const Slot slot : path) __builtin_prefetch(&blocks_[slot]);
    const std::size_t held = is_by_last_use() ? 0 : held_below(std::views::reverse(path));
    const std::size_t first = path.size() - held;
    for (std::size_t i = 0; i < path.size(); ++i) {
        lost_end(path[i]);
        ranks[i] = rank_of(path[i], i >= first);
    }
}

double LearnedOrder::rank_of(Slot slot, bool is_below) const {
    const Block &block = blocks_[slot];
    if (!is_by_last_use()) return worth(block) * loss(block, is_below) * density(slot);
    const std::uint8_t kind = kind_of(block);
    if (ReuseTables::is_hint(kind) ? hinted_.is_given() : kind == ReuseTables::kLeft) return worth(block);
    return ReuseTables::unknown_rate((now_ - block.last_ms) / 1000.0);
}

// What a use of an entry saves, for each slot that is free without it, beside a block where prefixes end at
// any. A new page without states below it ends none, but they may come while its request computes.
double LearnedOrder::density(Slot slot) const {
    if (values_.empty()) return 1;
    if (values_[slot].density != 0) return values_[slot].density;
    return now_ - blocks_[slot].last_ms < kEndless ? 1 : kUseless;
}

// Without regard to the tier below.
double LearnedOrder::worth(const Block &block) const {
    if (block.last_ms != placed_ms_) {
        placed_ms_ = block.last_ms;
        place_ = ReuseTables::place(now_ - block.last_ms);
    }
    return tables_.worth(kind_of(block), place_);
}

// The ages of a sample of the blocks in the tier and of its ghosts.
void LearnedOrder::learn() {
    auto present = std::make_unique<ReuseTables::Table<double>>();
    const std::size_t step = (blocks_.size() + ghosts_.places()) / kSamples + 1;
    const auto note = [&](std::uint8_t kind, std::uint32_t last_ms) {
        (*present)[kind][ReuseTables::bucket(now_ - last_ms)] += static_cast<double>(step);
    };
    for (std::size_t slot = 0; slot < blocks_.size(); slot += step) {
        if (slot + kAhead * step < blocks_.size()) __builtin_prefetch(&blocks_[slot + kAhead * step]);
        if (blocks_[slot].is_idle) note(kind_of(blocks_[slot]), blocks_[slot].last_ms);
    }
    for (std::size_t place = 0; place < ghosts_.places(); place += step) {
        ghosts_.prefetch(place + kAhead * step);
        if (const auto ghost = ghosts_.at(place)) note(ghost->kind, ghost->last_ms);
    }
    const double half_life = kFade * (static_cast<double>(slots()) + 1000 * tables_.mean_path());
    tables_.learn(*present, std::exchange(uses_, 0) / half_life);
    is_forecast_ = !trust_.is_given();
    if (is_forecast_) tables_.forecast(*present, static_cast<double>(idle_));
    learned_ = now_;
    if (!demotion_.below) return;
    // Blocks that are copied when they are new are in both for a while, those that are evicted into it are
    // not.
    const double share = demotion_.is_always_copied ? 1 : kBeside;
    beside_ = static_cast<std::size_t>(share * static_cast<double>(demotion_.blocks()));
}

void LearnedOrder::leave_shadows(std::uint32_t last_ms) {
    shadow_.leave(last_ms);
    if (demotion_.below) both_.leave(last_ms);
}

void LearnedOrder::trim_shadows() {
    shadow_.trim(idle_);
    if (demotion_.below) both_.trim(idle_ + beside_);
}

void LearnedOrder::resize(std::uint32_t slots) {
    blocks_.reserve(slots);
    LeafOrder::resize(slots);
    blocks_.resize(slots);
    if (value_of_) values_.resize(slots);
    ghosts_.resize(kGhosts * slots);
}

void LearnedOrder::clear() {
    LeafOrder::clear();
    std::fill(blocks_.begin(), blocks_.end(), Block{});
    ghosts_.clear();
    shadow_.clear();
    both_.clear();
    idle_ = kept_ = 0;
}

std::size_t LearnedOrder::bytes() const {
    return LeafOrder::bytes() + blocks_.capacity() * sizeof(Block) + values_.capacity() * sizeof(EndValue) +
           ghosts_.bytes() + sizeof tables_;
}

}  // namespace fdcache
