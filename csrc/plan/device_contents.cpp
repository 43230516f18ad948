#include "plan/device_contents.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace fdcache {
namespace {

using Paths = std::unordered_map<const DevicePath *, std::size_t>;

// Shortens each path to its blocks before the first that is gone, or below one. The blocks behind it are
// gone, too. A path may begin below a block of another one.
void cut_where_gone(Paths &paths, std::unordered_set<Digest, DigestHash> gone) {
    for (bool goes_on = true; goes_on;) {
        goes_on = false;
        for (auto &[path, end] : paths) {
            const auto stop = path->hashes.begin() + static_cast<std::ptrdiff_t>(end);
            const bool is_below = path->parent && gone.contains(*path->parent);
            const auto first = is_below ? path->hashes.begin()
                                        : std::find_if(path->hashes.begin(), stop, [&](const Digest &hash) {
                                              return gone.contains(hash);
                                          });
            if (first == stop) continue;
            gone.insert(first, stop);
            end = static_cast<std::size_t>(first - path->hashes.begin());
            goes_on = true;
        }
    }
}

}  // namespace

void DevicePath::extend(std::span<const Digest> more_hashes, std::span<const Slot> more_slots) {
    hashes.reserve(hashes.size() + more_hashes.size());
    slots.insert(slots.end(), more_slots.begin(), more_slots.end());
    hashes.insert(hashes.end(), more_hashes.begin(), more_hashes.end());
}

std::optional<Digest> DevicePath::parent_of(std::size_t i) const {
    return i ? std::optional(hashes[i - 1]) : parent;
}

std::size_t DeviceContents::num_known() const {
    return static_cast<std::size_t>(std::ranges::count(is_known_, std::uint8_t{1}));
}

void DeviceContents::offered(const std::shared_ptr<const DevicePath> &path, std::size_t start,
                             std::size_t counted) {
    if (!path->parent) start = std::max<std::size_t>(start, 1);
    if (start < path->slots.size()) offers_.push_back({path, start, path->slots.size(), counted});
}

void DeviceContents::enter_offers() {
    for (const Offer &offer : std::exchange(offers_, {})) enter(offer);
}

// Offers may share blocks: each is a hit.
void DeviceContents::enter(const Offer &offer) {
    for (std::size_t i = offer.start; i < offer.stop; ++i) {
        const Slot slot = offer.path->slots[i];
        if (slot == kNoSlot) continue;
        Block &block = made(slot);
        const Digest &hash = offer.path->hashes[i];
        const bool is_new = !block.path || block.hash != hash;
        num_slots_ += !block.generation;
        block.generation += is_new;
        const std::uint32_t hits = is_new ? 0 : block.hits;
        block.hits = std::max(hits + (i >= offer.counted), std::uint32_t{1});
        entered_.push_back(slot);
        const Digest parent = offer.path->parent_of(i).value_or(Digest{});
        if (!is_new && parent.is_unknown()) continue;  // another path has told it
        block.hash = hash;
        block.parent = parent;
        block.path = offer.path;
        is_known_[slot] = 1;
        block.depth = static_cast<std::uint32_t>(i);
    }
}

std::vector<Slot> DeviceContents::take_offered() {
    enter_offers();
    return std::exchange(entered_, {});
}

void DeviceContents::forget(std::span<const Slot> slots) {
    enter_offers();
    for (const Slot slot : slots) {
        if (!is_known(slot)) continue;
        find(slot)->path.reset();
        is_known_[slot] = 0;
    }
}

void DeviceContents::drop(std::span<const Digest> hashes) {
    enter_offers();
    Paths paths;
    std::vector<Slot> gone;
    for (Slot slot = 0; slot < is_known_.size(); ++slot)
        if (const Block *const block = known(slot))
            paths.emplace(block->path.get(), block->path->hashes.size());
    cut_where_gone(paths, {hashes.begin(), hashes.end()});
    for (Slot slot = 0; slot < is_known_.size(); ++slot)
        if (const Block *const block = known(slot); block && block->depth >= paths.at(block->path.get()))
            gone.push_back(slot);
    forget(gone);
}

void DeviceContents::forget_told() {
    offers_.clear();
    for (const std::unique_ptr<Part> &part : parts_)
        if (part)
            for (Block &block : *part) block.path.reset();
    std::ranges::fill(is_known_, std::uint8_t{0});
}

void DeviceContents::next_evicted(std::span<const Slot> slots) {
    enter_offers();
    coldest_.clear();
    for (const Slot slot : slots)
        if (const Block *const block = known(slot)) coldest_.emplace_back(slot, block->generation);
}

void DeviceContents::sent(std::uint64_t plan, std::span<const Slot> slots) {
    for (const Slot slot : slots)
        if (Block *const block = find(slot)) block->read_by = plan;
    if (!slots.empty() && (reading_.empty() || reading_.back() != plan)) reading_.push_back(plan);
}

std::vector<std::uint64_t> DeviceContents::readers(std::span<const Slot> slots,
                                                   const std::function<bool(std::uint64_t)> &is_in_flight) {
    std::vector<std::uint64_t> found;
    std::erase_if(reading_, [&](std::uint64_t plan) { return !is_in_flight(plan); });
    if (reading_.empty()) return found;
    for (const Slot slot : slots) {
        const Block *const block = find(slot);
        if (block && block->read_by && std::ranges::find(reading_, block->read_by) != reading_.end())
            found.push_back(block->read_by);
    }
    std::ranges::sort(found);
    found.erase(std::ranges::unique(found).begin(), found.end());
    return found;
}

BlockList DeviceContents::entries_in(std::span<const Slot> slots) const {
    BlockList list;
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const Block *const block = known(slots[i]);
        if (!block) continue;  // as most are that are given away: nothing is allocated for them
        if (list.slots.empty()) list.make_room(slots.size() - i);
        append(list, slots[i], *block);
    }
    return list;
}

BlockList DeviceContents::coldest(std::uint32_t count) const {
    BlockList list;
    for (const auto &[slot, generation] : coldest_) {
        if (list.slots.size() >= count) break;
        if (const Block *const block = known(slot); block && block->generation == generation)
            append(list, slot, *block);
    }
    return list;
}

// A walk up ends below the first block that has left the device. Each block knows its parent by the last path
// that it was offered in: an ancestor may have come back elsewhere since the path of its descendant.
BlockList DeviceContents::above(const BlockList &blocks, std::span<const std::size_t> which,
                                std::uint32_t levels) const {
    BlockList list;
    std::unordered_set<Slot> listed;
    std::vector<Slot> up;
    for (const std::size_t i : which) {
        up.clear();
        const Block *block = known(blocks.slots[i]);
        while (block && block->depth && up.size() <= levels) {
            const Slot slot = block->path->slots[block->depth - 1];
            const Block *const parent = known(slot);
            if (!parent || parent->hash != block->parent || !listed.insert(slot).second) break;
            up.push_back(slot);
            block = parent;
        }
        for (auto slot = up.rbegin(); slot != up.rend(); ++slot) append(list, *slot, *find(*slot));
    }
    return list;
}

DeviceContents::Block &DeviceContents::made(Slot slot) {
    const std::size_t part = slot / kPart;
    if (part >= parts_.size()) parts_.resize(part + 1);
    if (!parts_[part]) {
        is_known_.resize(std::max(is_known_.size(), (part + 1) * kPart));
        parts_[part] = std::make_unique<Part>();
    }
    return (*parts_[part])[slot % kPart];
}

DeviceContents::Block *DeviceContents::find(Slot slot) const {
    const std::size_t part = slot / kPart;
    return part < parts_.size() && parts_[part] ? &(*parts_[part])[slot % kPart] : nullptr;
}

void DeviceContents::append(BlockList &list, Slot slot, const Block &block) {
    list.slots.push_back(slot);
    list.generations.push_back(block.generation);
    list.hashes.push_back(block.hash);
    list.parents.push_back(block.parent);
    list.hits.push_back(block.hits);
}

}  // namespace fdcache
