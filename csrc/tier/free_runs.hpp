// The free slots of a tier, as runs of neighbours.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tier/eviction.hpp"

namespace fdcache {

// Runs are maximal and cross no extent. A run's length stands at its first and at its last slot, so that a
// slot that is freed finds its neighbours at once. Runs of about the same length are in one bin: below 32
// slots a bin has one length, above that its lengths differ by less than a sixteenth. So a fit is found
// without a search.
//
// Adding a run, and taking one, cost O(1). Only `resize` and `reserve` allocate.
class FreeRuns {
  public:
    struct Run {
        Slot first;
        std::uint32_t count;
    };

    // `extent`: the slots of an extent; 0: there is one, without end.
    explicit FreeRuns(std::uint32_t extent = 0) : extent_(extent) { heads_.fill(kNoSlot); }

    std::uint32_t size() const { return size_; }
    std::uint32_t slots() const { return static_cast<std::uint32_t>(nodes_.size()); }

    // The run becomes free. None of it is.
    void add(Slot first, std::uint32_t count = 1);
    // Appends `count` free slots to `runs`, ascending: part of the tightest run that holds them all, else as
    // few runs as there are. The caller makes sure that there are as many, and that `runs` has room for as
    // many.
    void take(std::uint32_t count, std::vector<Run> &runs);
    // No slot is free.
    void clear();
    // The tier has `slots` slots. New ones are not free; of those that go, the free ones are forgotten.
    void resize(std::uint32_t slots);
    void reserve(std::uint32_t slots) { nodes_.reserve(slots); }

    // All runs, ascending.
    std::vector<Run> runs() const;
    std::size_t bytes() const { return nodes_.capacity() * sizeof(Node); }
    // Every invariant that does not hold, in words.
    std::vector<std::string> check_integrity() const;

  private:
    static constexpr std::uint32_t kSplits = 16;  // bins of each power of two
    static constexpr std::uint32_t kWords = 7;
    static constexpr std::uint32_t kBins = 64 * kWords;
    static constexpr std::uint32_t kNoBin = kBins;
    static constexpr int kLooks = 8;  // runs of a bin that are compared

    struct Node {
        std::uint32_t length = 0;  // of the run that begins or ends here; 0: none does
        Slot previous = kNoSlot;   // in its bin; of a run's first slot only
        Slot next = kNoSlot;
    };

    static std::uint32_t bin_of(std::uint32_t length);
    std::uint32_t bin_from(std::uint32_t bin) const;
    std::uint32_t last_bin() const;
    Slot find(std::uint32_t count) const;
    Slot tightest(std::uint32_t bin, std::uint32_t count) const;
    bool joined(Slot slot) const;
    void insert(Slot first, std::uint32_t count);
    void erase(Slot first);

    std::vector<Node> nodes_;
    std::array<Slot, kBins> heads_;
    std::array<std::uint64_t, kWords> filled_{};  // a bit for each bin that has runs
    std::uint32_t extent_;
    std::uint32_t size_ = 0;
};

}  // namespace fdcache
