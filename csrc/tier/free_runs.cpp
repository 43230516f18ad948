#include "tier/free_runs.hpp"

#include <algorithm>
#include <bit>

namespace fdcache {

std::uint32_t FreeRuns::bin_of(std::uint32_t length) {
    if (length < kSplits) return length;
    const auto log = static_cast<std::uint32_t>(std::bit_width(length)) - 1;
    const std::uint32_t step = log - static_cast<std::uint32_t>(std::countr_zero(kSplits));
    return step * kSplits + (length >> step);
}

// The first bin at or after `bin` that has runs.
std::uint32_t FreeRuns::bin_from(std::uint32_t bin) const {
    if (bin >= kBins) return kNoBin;
    std::uint64_t word = filled_[bin / 64] & (~std::uint64_t{0} << bin % 64);
    for (std::uint32_t i = bin / 64;; word = filled_[i]) {
        if (word) return i * 64 + static_cast<std::uint32_t>(std::countr_zero(word));
        if (++i == kWords) return kNoBin;
    }
}

std::uint32_t FreeRuns::last_bin() const {
    for (std::uint32_t i = kWords; i-- > 0;)
        if (filled_[i]) return i * 64 + 63 - static_cast<std::uint32_t>(std::countl_zero(filled_[i]));
    return kNoBin;
}

// True if the slot and the one before it may be in one run.
bool FreeRuns::joined(Slot slot) const {
    return slot > 0 && slot < nodes_.size() && (!extent_ || slot % extent_);
}

void FreeRuns::insert(Slot first, std::uint32_t count) {
    const std::uint32_t bin = bin_of(count);
    const Slot head = heads_[bin];
    nodes_[first + count - 1].length = count;
    nodes_[first] = {count, kNoSlot, head};
    if (head != kNoSlot) nodes_[head].previous = first;
    heads_[bin] = first;
    filled_[bin / 64] |= std::uint64_t{1} << bin % 64;
    size_ += count;
    ++count_;
}

void FreeRuns::erase(Slot first) {
    Node &node = nodes_[first];
    const std::uint32_t count = node.length, bin = bin_of(count);
    if (node.next != kNoSlot) nodes_[node.next].previous = node.previous;
    if (node.previous != kNoSlot)
        nodes_[node.previous].next = node.next;
    else if ((heads_[bin] = node.next) == kNoSlot)
        filled_[bin / 64] &= ~(std::uint64_t{1} << bin % 64);
    nodes_[first + count - 1].length = 0;
    node.length = 0;
    size_ -= count;
    --count_;
}

void FreeRuns::add(Slot first, std::uint32_t count) {
    Slot end = first + count;
    if (joined(first) && nodes_[first - 1].length) {
        first -= nodes_[first - 1].length;
        erase(first);
    }
    if (joined(end) && nodes_[end].length) {
        const Slot next = end;
        end += nodes_[next].length;
        erase(next);
    }
    // From the last extent, because the newest of equally long runs is taken first.
    while (extent_ && (end - 1) / extent_ != first / extent_) {
        const Slot start = (end - 1) / extent_ * extent_;
        insert(start, end - start);
        end = start;
    }
    insert(first, end - first);
}

// The smallest run of the bin with `count` slots; of equal ones the lowest, because a tier shrinks from its
// end.
Slot FreeRuns::tightest(std::uint32_t bin, std::uint32_t count) const {
    Slot best = kNoSlot;
    Slot slot = heads_[bin];
    for (int compared = 0; slot != kNoSlot && compared < kMostCompared;
         slot = nodes_[slot].next, ++compared) {
        const std::uint32_t length = nodes_[slot].length;
        if (length < count) continue;
        if (best == kNoSlot || length < nodes_[best].length || (length == nodes_[best].length && slot < best))
            best = slot;
    }
    return best;
}

// The smallest run with `count` slots, else the longest run.
Slot FreeRuns::find(std::uint32_t count) const {
    const std::uint32_t bin = bin_of(count);
    if (const Slot slot = tightest(bin, count); slot != kNoSlot) return slot;
    const std::uint32_t larger = bin_from(bin + 1);
    return larger == kNoBin ? heads_[last_bin()] : tightest(larger, count);
}

void FreeRuns::take(std::uint32_t count, std::vector<Run> &runs) {
    const auto begin = static_cast<std::ptrdiff_t>(runs.size());
    while (count) {
        const Slot first = find(count);
        const std::uint32_t length = nodes_[first].length, taken = std::min(length, count);
        erase(first);
        if (taken < length) insert(first + taken, length - taken);
        runs.push_back({first, taken});
        count -= taken;
    }
    std::sort(runs.begin() + begin, runs.end());
}

void FreeRuns::take_all(std::vector<Run> &runs) {
    while (size_) {
        const Slot first = heads_[last_bin()];
        runs.push_back({first, nodes_[first].length});
        erase(first);
    }
}

void FreeRuns::clear() {
    std::fill(nodes_.begin(), nodes_.end(), Node{});
    heads_.fill(kNoSlot);
    filled_.fill(0);
    size_ = 0;
    count_ = 0;
}

void FreeRuns::resize(std::uint32_t slots) {
    for (std::size_t end = nodes_.size(); end > slots;) {
        const std::uint32_t count = nodes_[end - 1].length;
        if (!count) {
            --end;
            continue;
        }
        const auto first = static_cast<Slot>(end - count);
        erase(first);
        if (first < slots) insert(first, slots - first);
        end = first;
    }
    nodes_.resize(slots);
}

std::vector<FreeRuns::Run> FreeRuns::runs() const {
    std::vector<Run> found;
    for (Slot slot = 0; slot < nodes_.size(); slot += std::max(nodes_[slot].length, 1u))
        if (nodes_[slot].length) found.push_back({slot, nodes_[slot].length});
    return found;
}

std::vector<std::string> FreeRuns::check_integrity() const {
    std::vector<std::string> broken;
    const auto expect = [&broken](bool holds, Slot slot, const std::string &what) {
        if (!holds) broken.push_back("free run at slot " + std::to_string(slot) + ": " + what);
    };
    std::uint32_t free = 0, ends = 0, marks = 0;
    std::size_t found = 0;
    Slot after = kNoSlot;
    for (const Run &run : runs()) {
        const Slot last = run.first + run.count - 1;
        free += run.count;
        ends += run.count > 1 ? 2 : 1;
        ++found;
        if (last >= nodes_.size()) {
            expect(false, run.first, "ends beyond the tier");
            break;
        }
        expect(nodes_[last].length == run.count, run.first, "its ends differ");
        expect(!extent_ || run.first / extent_ == last / extent_, run.first, "crosses an extent");
        expect(run.first != after || !joined(run.first), run.first, "follows another one");
        after = last + 1;
    }
    for (const Node &node : nodes_) marks += node.length > 0;
    std::size_t listed = 0;
    for (std::uint32_t bin = 0; bin < kBins; ++bin) {
        expect((filled_[bin / 64] >> bin % 64 & 1) == (heads_[bin] != kNoSlot), heads_[bin],
               "its bin's bit is wrong");
        Slot previous = kNoSlot;
        for (Slot slot = heads_[bin]; slot != kNoSlot && listed <= nodes_.size();
             slot = nodes_[slot].next, ++listed) {
            expect(bin_of(nodes_[slot].length) == bin, slot, "in a bin of another length");
            expect(nodes_[slot].previous == previous, slot, "its bin's links disagree");
            previous = slot;
        }
    }
    if (free != size_) broken.push_back("free slots are miscounted");
    if (ends != marks) broken.push_back("there is a length where no free run starts or ends");
    if (found != count_) broken.push_back("free runs are miscounted");
    if (listed != found) broken.push_back("the bins have lost or gained free runs");
    return broken;
}

}  // namespace fdcache
