// A tier and its model: the same operations on both, and everything that can be read of them compared.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "native/checks.hpp"
#include "native/tier_model.hpp"

namespace fdcache::tests {

using Digests = std::vector<Digest>;
using Slots = std::vector<Slot>;

// Blocks are numbered: two binary trees of four levels.
inline constexpr std::uint32_t kTree = 16;
inline constexpr std::uint32_t kBlocks = 2 * kTree;

inline bool is_block(std::uint32_t number) {
    return number % kTree != 0;
}

inline std::uint32_t parent_of(std::uint32_t number) {
    return number / kTree * kTree + number % kTree / 2;
}

// By number; zero, the root, for those that are no block.
const Digests &digests();

// A tier below that holds every other block, and after some look-ups those that it did not hold.
class ChangingTier : public Tier {
  public:
    ChangingTier() : Tier(1) {}
    std::uint64_t holds(std::span<const Digest *const> digests) const override {
        std::uint64_t held = 0;
        for (std::size_t i = 0; i < digests.size(); ++i)
            held |= std::uint64_t{(digests[i]->bytes[20] + ++asked_ / 64) % 2} << i;
        return held;
    }
    std::size_t blocks() const override { return 20; }

  private:
    mutable std::uint32_t asked_ = 0;
};

class TierPair {
  protected:
    TierPair(std::uint32_t slots, std::uint32_t extent, double spare, std::string_view eviction);

    // --- the same on both

    // Returns the tier's answer, or nothing if it refused. Then the model has to refuse, too.
    template <typename Act, typename Expect>
    auto both(Act act, Expect expected) -> std::optional<decltype(act())> {
        std::optional<decltype(act())> answer;
        try {
            answer = act();
        } catch (const StaleLease &) {
        } catch (const std::out_of_range &) {
        } catch (const std::invalid_argument &) {
        }
        bool refused = false;
        try {
            if (answer) {
                expect(expected(*answer), "another answer than the model's");
            } else {
                decltype(act()) none{};
                expected(none);
            }
        } catch (const Refused &) {
            refused = true;
        }
        expect(refused == !answer, refused ? "the tier does not refuse it" : "the tier refuses it");
        return answer;
    }

    template <typename Act, typename Expect>
    void both_do(Act act, Expect expected) {
        both(
            [&] {
                act();
                return 0;
            },
            [&](int) {
                expected();
                return true;
            });
    }

    void release(LeaseId lease);
    // Returns the length of the match. The tier may refuse hashes that are no path, and may not return a
    // block with another hash.
    std::size_t match_no_path(LeaseId lease, const Digests &hashes, std::size_t start, std::size_t known);
    bool check_run(const MatchRun &run, const Digests &hashes, std::size_t start) const;
    // The slots, generations, hashes, parents and hits of a listing.
    void check_list(const BlockList &list, const Slots &slots) const;
    void reserve_for(LeaseId lease, std::uint32_t count);
    void commit(LeaseId lease, const Digest &parent, Digests hashes, Slots slots);
    void copy_in(LeaseId lease, const Digests &parents, const Digests &hashes);
    void reset();
    void mirror();
    void set_tenant_limit(Tenant tenant, std::uint32_t most);
    void take_events();
    // Ends the process unless everything that can be read of them is the same, and the tier is sound.
    void compare() const;

    const bool is_lru_;
    ChangingTier below_;
    Tier tier_;
    TierModel model_;

  private:
    void compare_figures() const;
    void compare_slot(Slot slot) const;

    std::vector<std::uint64_t> table_;
    PresenceTable presence_;
    bool mirrored_ = false;
};

}  // namespace fdcache::tests
