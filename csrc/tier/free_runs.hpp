// The free slots of a tier, as runs of neighbours.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "tier/eviction.hpp"
#include "tier/large_vector.hpp"

namespace fdcache {

// Runs are maximal and cross no extent. A run's length is stored at its first and last slot, so that a freed
// slot finds its neighbours at once. Runs of similar length share a bin: below 32 slots a bin has one length,
// above that its lengths differ by less than a sixteenth. So finding a fit needs no search.
//
// Adding and taking a run cost O(1). Only `resize` and `reserve` allocate.
class FreeRuns {
  public:
    struct Run {
        Slot first;
        std::uint32_t count;

        friend auto operator<=>(const Run &, const Run &) = default;
    };

    // `extent`: slots of an extent; 0: there is one extent.
    explicit FreeRuns(std::uint32_t extent = 0) : extent_(extent) { heads_.fill(kNoSlot); }

    // Number of free slots, and of their runs.
    std::uint32_t size() const { return size_; }
    std::uint32_t count() const { return count_; }
    std::uint32_t slots() const { return static_cast<std::uint32_t>(nodes_.size()); }

    // Frees a run, none of which is free.
    void add(Slot first, std::uint32_t count = 1);
    // Appends `count` free slots to `runs`, ascending: from the smallest run that has them all, else from as
    // few runs as possible. The caller checks that there are as many, and reserves room in `runs`.
    void take(std::uint32_t count, std::vector<Run> &runs);
    // Appends all free slots to `runs`, in any order, and makes no slot free.
    void take_all(std::vector<Run> &runs);
    // Makes no slot free.
    void clear();
    // Changes the number of slots. New slots are not free.
    void resize(std::uint32_t slots);
    void reserve(std::uint32_t slots) { nodes_.reserve(slots); }

    // All runs, ascending.
    std::vector<Run> runs() const;
    std::size_t bytes() const { return nodes_.capacity() * sizeof(Node); }
    // The invariants that do not hold, in words.
    std::vector<std::string> check_integrity() const;

  private:
    static constexpr std::uint32_t kSplits = 16;  // bins of each power of two
    static constexpr std::uint32_t kWords = 7;
    static constexpr std::uint32_t kBins = 64 * kWords;
    static constexpr std::uint32_t kNoBin = kBins;
    static constexpr int kMostCompared = 8;  // runs of a bin

    struct Node {
        std::uint32_t length = 0;  // of the run that starts or ends here; 0: none
        Slot previous = kNoSlot;   // in its bin; set at a run's first slot only
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

    LargeVector<Node> nodes_;
    std::array<Slot, kBins> heads_;
    std::array<std::uint64_t, kWords> filled_{};  // a bit per bin that has runs
    std::uint32_t extent_;
    std::uint32_t size_ = 0;
    std::uint32_t count_ = 0;
};

}  // namespace fdcache
