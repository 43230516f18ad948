// A stand-in for a model's forward pass: "computing" a token writes bytes derived from its whole prefix into
// every plane of its block, so that every reused block can be compared byte by byte. Does not use the block
// hashes, so that it also detects their faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fdcache {

struct PatternPlane {
    std::uint8_t *base;
    std::size_t stride;  // bytes from one block to the next
    std::size_t bytes;   // bytes of one block
    std::int32_t blocks;
    std::int32_t layer;
    std::uint64_t salt;  // differs by layer, kind and rank
};

// The segments of a step; element i of each span belongs to one sequence.
struct PatternStep {
    std::span<const std::int32_t> sequences;
    std::span<const std::int32_t> starts;  // compute tokens [start, end)
    std::span<const std::int32_t> ends;
    std::span<const std::int32_t> keep;    // entries of the block table to keep
    std::span<const std::int32_t> grow;    // entries to append, from `blocks`
    std::span<const std::int32_t> verify;  // leading blocks to compare first
    std::span<const std::int32_t> blocks;  // -1: given up, neither compared nor written
};

class PatternModel {
  public:
    PatternModel(std::vector<PatternPlane> planes, std::int32_t block_size, std::int32_t layers);

    // Sets the tokens of a sequence, replacing earlier ones.
    void begin(std::int32_t sequence, std::span<const std::int32_t> tokens);
    void end(std::int32_t sequence);

    // Prepares the next step and returns how many blocks it will compare: of each segment's leading blocks
    // every `every`-th and the last; none if `every` is 0. Changes nothing if it throws.
    std::int64_t prepare(const PatternStep &step, std::int32_t every);

    // Compares, then writes, one layer of the prepared step; layers come in order. Returns (segment, block of
    // the sequence) of each block that differs. Such a sequence computes garbage, as a model would, until a
    // later comparison of its prefix succeeds or it starts again.
    std::vector<std::pair<std::int32_t, std::int32_t>> run_layer(std::int32_t layer);

  private:
    struct Sequence {
        std::vector<std::uint64_t> states;  // states[t]: tokens 0..t
        std::vector<std::int32_t> table;
        std::uint64_t poison = 0;
    };
    struct Segment {
        Sequence *sequence;
        std::int32_t start, end, verify;
    };

    Sequence &find(std::int32_t sequence);
    void check(const PatternStep &step);
    void check_written(const PatternStep &step, std::size_t segment, const Sequence &sequence,
                       std::size_t before, const std::string &where) const;
    bool compared(const Sequence &sequence, std::int32_t block, std::int32_t count) const;
    bool block_differs(const Sequence &sequence, std::int32_t block, std::int32_t layer) const;
    void write_layer(const Segment &segment, std::int32_t layer) const;

    std::vector<std::vector<PatternPlane>> layers_;
    std::int32_t block_size_;
    std::int32_t slots_;
    std::int32_t every_ = 0;
    std::unordered_map<std::int32_t, Sequence> sequences_;
    std::vector<Segment> segments_;
};

}  // namespace fdcache
