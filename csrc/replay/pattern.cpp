#include "replay/pattern.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_set>

namespace fdcache {
namespace {

constexpr std::uint64_t kStep = 0xD1B54A32D192ED03ULL;
constexpr std::uint64_t kMultiplier = 0xAEF17502108EF2D9ULL;
constexpr std::uint64_t kGarbage = 0x5BD1E9955BD1E995ULL;
constexpr std::int32_t kNone = -1;  // in a block table: a block that the engine has given up

std::uint64_t scramble(std::uint64_t value) {
    value = (value ^ (value >> 32)) * kMultiplier;
    value = (value ^ (value >> 29)) * kStep;
    return value ^ (value >> 32);
}

std::uint64_t word(std::uint64_t seed, std::size_t index) {
    const std::uint64_t value = seed + index * kStep;
    return (value ^ (value >> 31)) * kMultiplier;
}

// The bytes of one token in a plane: equal shares, and the remainder for the last token.
struct Share {
    std::size_t offset, bytes;
};

Share share_of(const PatternPlane &plane, std::int32_t token, std::int32_t block_size) {
    const std::size_t share = plane.bytes / static_cast<std::size_t>(block_size);
    const std::size_t offset = share * static_cast<std::size_t>(token);
    return {offset, token + 1 == block_size ? plane.bytes - offset : share};
}

void write_share(std::uint8_t *target, std::size_t bytes, std::uint64_t seed) {
    std::size_t done = 0;
    for (; done + 8 <= bytes; done += 8) {
        const std::uint64_t value = word(seed, done);
        std::memcpy(target + done, &value, 8);
    }
    const std::uint64_t value = word(seed, done);
    std::memcpy(target + done, &value, bytes - done);
}

bool share_differs(const std::uint8_t *source, std::size_t bytes, std::uint64_t seed) {
    std::uint64_t difference = 0;
    std::size_t done = 0;
    for (; done + 8 <= bytes; done += 8) {
        std::uint64_t value;
        std::memcpy(&value, source + done, 8);
        difference |= value ^ word(seed, done);
    }
    const std::uint64_t value = word(seed, done);
    return difference != 0 || std::memcmp(source + done, &value, bytes - done) != 0;
}

}  // namespace

PatternModel::PatternModel(std::vector<PatternPlane> planes, std::int32_t block_size, std::int32_t layers)
    : layers_(static_cast<std::size_t>(std::max(layers, 0))),
      block_size_(block_size),
      slots_(std::numeric_limits<std::int32_t>::max()) {
    if (block_size < 1 || layers < 1 || planes.empty()) {
        throw std::invalid_argument("a pattern model needs planes, layers and a positive block size");
    }
    for (PatternPlane &plane : planes) {
        plane.salt = scramble(plane.salt + kStep);
        slots_ = std::min(slots_, plane.blocks);
        layers_.at(static_cast<std::size_t>(plane.layer)).push_back(plane);
    }
}

void PatternModel::begin(std::int32_t sequence, std::span<const std::int32_t> tokens) {
    Sequence fresh;
    fresh.states.reserve(tokens.size());
    std::uint64_t state = kGarbage;
    for (const std::int32_t token : tokens) {
        state = (state ^ static_cast<std::uint32_t>(token)) * kMultiplier + kStep;
        state ^= state >> 32;
        fresh.states.push_back(state);
    }
    sequences_[sequence] = std::move(fresh);
    segments_.clear();
}

void PatternModel::end(std::int32_t sequence) {
    sequences_.erase(sequence);
    segments_.clear();
}

PatternModel::Sequence &PatternModel::find(std::int32_t sequence) {
    const auto found = sequences_.find(sequence);
    if (found == sequences_.end()) {
        throw std::invalid_argument("sequence " + std::to_string(sequence) +
                                    " has no tokens; call begin first");
    }
    return found->second;
}

void PatternModel::check(const PatternStep &step) {
    const std::size_t count = step.sequences.size();
    for (const auto &span : {step.starts, step.ends, step.keep, step.grow, step.verify}) {
        if (span.size() != count) throw std::invalid_argument("the arrays of a step differ in length");
    }
    std::unordered_set<std::int32_t> seen;
    std::size_t total = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const Sequence &sequence = find(step.sequences[i]);
        const std::string where = " of sequence " + std::to_string(step.sequences[i]);
        if (!seen.insert(step.sequences[i]).second) throw std::invalid_argument("two segments" + where);
        if (step.starts[i] < 0 || step.ends[i] < step.starts[i] ||
            static_cast<std::size_t>(step.ends[i]) > sequence.states.size()) {
            throw std::invalid_argument("tokens out of range" + where);
        }
        if (step.keep[i] < 0 || step.grow[i] < 0 ||
            static_cast<std::size_t>(step.keep[i]) > sequence.table.size()) {
            throw std::invalid_argument("block table out of range" + where);
        }
        check_written(step, i, sequence, total, where);
        total += static_cast<std::size_t>(step.grow[i]);
        const std::int64_t covered = (std::int64_t{step.keep[i]} + step.grow[i]) * block_size_;
        if (covered < step.ends[i] || step.verify[i] < 0 ||
            std::int64_t{step.verify[i]} * block_size_ > covered ||
            static_cast<std::size_t>(step.verify[i]) * static_cast<std::size_t>(block_size_) >
                sequence.states.size()) {
            throw std::invalid_argument("the block table does not cover the tokens" + where);
        }
    }
    if (total != step.blocks.size()) throw std::invalid_argument("grow does not add up to the blocks given");
    for (const std::int32_t block : step.blocks) {
        if (block < kNone || block >= slots_) {
            throw std::invalid_argument("device slot " + std::to_string(block) + " is not in [0, " +
                                        std::to_string(slots_) + ")");
        }
    }
}

// Tokens are written into blocks that are there. `before`: entries of `blocks` for earlier segments.
void PatternModel::check_written(const PatternStep &step, std::size_t segment, const Sequence &sequence,
                                 std::size_t before, const std::string &where) const {
    const std::int32_t keep = step.keep[segment];
    for (std::int32_t block = step.starts[segment] / block_size_;
         std::int64_t{block} * block_size_ < step.ends[segment]; ++block) {
        const std::size_t given = before + static_cast<std::size_t>(std::max(block - keep, 0));
        if (block >= keep && (block - keep >= step.grow[segment] || given >= step.blocks.size())) return;
        const std::int32_t slot =
            block < keep ? sequence.table[static_cast<std::size_t>(block)] : step.blocks[given];
        if (slot == kNone) throw std::invalid_argument("tokens without a block" + where);
    }
}

std::int64_t PatternModel::prepare(const PatternStep &step, std::int32_t every) {
    check(step);
    every_ = every;
    segments_.clear();
    std::int64_t comparisons = 0;
    auto blocks = step.blocks.begin();
    for (std::size_t i = 0; i < step.sequences.size(); ++i) {
        Sequence &sequence = find(step.sequences[i]);
        sequence.table.resize(static_cast<std::size_t>(step.keep[i]));
        sequence.table.insert(sequence.table.end(), blocks, blocks + step.grow[i]);
        blocks += step.grow[i];
        const std::int32_t verify = every > 0 ? step.verify[i] : 0;
        if (verify > 0 || step.starts[i] == 0) sequence.poison = 0;
        for (std::int32_t block = 0; block < verify; ++block) {
            comparisons += compared(sequence, block, verify) ? 1 : 0;
        }
        segments_.push_back({&sequence, step.starts[i], step.ends[i], verify});
    }
    return comparisons;
}

bool PatternModel::compared(const Sequence &sequence, std::int32_t block, std::int32_t count) const {
    if (sequence.table[static_cast<std::size_t>(block)] == kNone) return false;
    return block % every_ == 0 || block + 1 == count;
}

bool PatternModel::block_differs(const Sequence &sequence, std::int32_t block, std::int32_t layer) const {
    const std::size_t first = static_cast<std::size_t>(block) * static_cast<std::size_t>(block_size_);
    const auto slot = static_cast<std::size_t>(sequence.table[static_cast<std::size_t>(block)]);
    for (const PatternPlane &plane : layers_[static_cast<std::size_t>(layer)]) {
        const std::uint8_t *source = plane.base + slot * plane.stride;
        for (std::int32_t token = 0; token < block_size_; ++token) {
            const std::uint64_t seed =
                scramble(sequence.states[first + static_cast<std::size_t>(token)] ^ plane.salt);
            const Share share = share_of(plane, token, block_size_);
            if (share_differs(source + share.offset, share.bytes, seed)) return true;
        }
    }
    return false;
}

void PatternModel::write_layer(const Segment &segment, std::int32_t layer) const {
    const Sequence &sequence = *segment.sequence;
    for (const PatternPlane &plane : layers_[static_cast<std::size_t>(layer)]) {
        const std::uint64_t salt = plane.salt ^ sequence.poison;
        for (std::int32_t token = segment.start; token < segment.end; ++token) {
            const auto slot =
                static_cast<std::size_t>(sequence.table[static_cast<std::size_t>(token / block_size_)]);
            const Share share = share_of(plane, token % block_size_, block_size_);
            const std::uint64_t seed = scramble(sequence.states[static_cast<std::size_t>(token)] ^ salt);
            write_share(plane.base + slot * plane.stride + share.offset, share.bytes, seed);
        }
    }
}

std::vector<std::pair<std::int32_t, std::int32_t>> PatternModel::run_layer(std::int32_t layer) {
    if (layer < 0 || static_cast<std::size_t>(layer) >= layers_.size()) {
        throw std::invalid_argument("layer " + std::to_string(layer) + " does not exist");
    }
    std::vector<std::pair<std::int32_t, std::int32_t>> differing;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        const Segment &segment = segments_[i];
        for (std::int32_t block = 0; block < segment.verify; ++block) {
            if (!compared(*segment.sequence, block, segment.verify)) continue;
            if (!block_differs(*segment.sequence, block, layer)) continue;
            segment.sequence->poison = kGarbage;
            differing.emplace_back(static_cast<std::int32_t>(i), block);
        }
    }
    for (const Segment &segment : segments_) write_layer(segment, layer);
    return differing;
}

}  // namespace fdcache
