// Copies of blocks from slots of one tier to slots of another, planned one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hash/digest.hpp"
#include "tier/tier.hpp"

namespace fdcache {

// Parallel arrays: element i is one copy. A zero parent digest is the root.
struct BlockCopies {
    std::vector<Slot> sources, targets;
    std::vector<std::uint32_t> source_generations, target_generations;
    std::vector<Digest> hashes, parents;
    std::vector<std::uint8_t> unverified;  // 1: the source is not verified; empty: all are

    // Source blocks as spans of parallel arrays; `unverified` may be empty. There is one parent fewer if the
    // first block is below the root.
    struct Source {
        std::span<const Slot> slots;
        std::span<const std::uint32_t> generations;
        std::span<const Digest> hashes;
        std::span<const Digest> parents;
        std::span<const std::uint8_t> unverified = {};
    };

    std::size_t size() const { return sources.size(); }

    void reserve(std::size_t count) {
        sources.reserve(count);
        targets.reserve(count);
        source_generations.reserve(count);
        target_generations.reserve(count);
        hashes.reserve(count);
        parents.reserve(count);
    }

    // All arrays have the length of `slots`; no generations are zeros. Adds all of them or, out of memory,
    // none.
    void append(const Source &source, std::span<const Slot> slots,
                std::span<const std::uint32_t> generations) {
        const std::size_t before = size(), after = before + slots.size();
        reserve_for(after);
        if (!source.unverified.empty() || !unverified.empty()) {
            unverified.reserve(after);
            unverified.resize(before);
            if (source.unverified.empty())
                unverified.resize(after);
            else
                unverified.insert(unverified.end(), source.unverified.begin(), source.unverified.end());
        }
        const auto add = [](auto &column, const auto &values) {
            column.insert(column.end(), values.begin(), values.end());
        };
        add(sources, source.slots);
        add(targets, slots);
        add(source_generations, source.generations);
        if (generations.empty())
            target_generations.resize(after);
        else
            add(target_generations, generations);
        add(hashes, source.hashes);
        if (source.parents.size() < source.hashes.size()) parents.emplace_back();
        add(parents, source.parents);
    }

    // Makes room for one more copy in each column.
    void reserve_for(std::size_t count) {
        if (count > parents.capacity()) reserve(std::max(count, 2 * parents.capacity()));
    }

    // Removes `count` copies from `first` on.
    void erase(std::size_t first, std::size_t count) {
        const auto cut = [first, count](auto &column) {
            if (column.empty()) return;
            const auto begin = column.begin() + static_cast<std::ptrdiff_t>(first);
            column.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
        };
        cut(sources);
        cut(targets);
        cut(source_generations);
        cut(target_generations);
        cut(hashes);
        cut(parents);
        cut(unverified);
    }

    void add(const BlockList &source, std::size_t i, Slot slot, std::uint32_t generation) {
        add(source.slots[i], source.generations[i], source.hashes[i], source.parents[i], slot, generation);
    }

    void add(Slot source, std::uint32_t source_generation, const Digest &hash, const Digest &parent,
             Slot slot, std::uint32_t generation) {
        reserve_for(size() + 1);
        sources.push_back(source);
        targets.push_back(slot);
        source_generations.push_back(source_generation);
        target_generations.push_back(generation);
        hashes.push_back(hash);
        parents.push_back(parent);
        if (!unverified.empty()) unverified.push_back(0);
    }
};

}  // namespace fdcache
