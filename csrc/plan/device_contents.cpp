#include "plan/device_contents.hpp"

#include <algorithm>

namespace fdcache {
namespace {

void forget_block(DeviceContents::Block &block) {
    block.is_known = block.is_queued = block.is_dropped = false;
    block.path.reset();
}

}  // namespace

void DevicePath::extend(std::span<const Digest> more_hashes, std::span<const DeviceBlock> more_ids) {
    hashes.reserve(hashes.size() + more_hashes.size());
    ids.insert(ids.end(), more_ids.begin(), more_ids.end());
    hashes.insert(hashes.end(), more_hashes.begin(), more_hashes.end());
}

std::optional<Digest> DevicePath::parent_of(std::size_t i) const {
    return i ? std::optional(hashes[i - 1]) : parent;
}

std::size_t DeviceContents::num_known() const {
    std::size_t known = 0;
    for (const std::unique_ptr<Part> &part : parts_)
        if (part) known += static_cast<std::size_t>(std::ranges::count_if(*part, &Block::is_known));
    return known;
}

std::vector<DeviceBlock> DeviceContents::add(std::span<const Offer> offers) {
    std::vector<DeviceBlock> entered;
    ++round_;
    for (const Offer &offer : offers) enter(offer, entered);
    return entered;
}

// Offers may share blocks: each is a hit.
void DeviceContents::enter(const Offer &offer, std::vector<DeviceBlock> &entered) {
    for (std::size_t i = offer.start; i < offer.stop; ++i) {
        const DeviceBlock id = offer.path->ids[i];
        if (id == kNoBlock) continue;
        Block &block = seen(id);
        const Digest &hash = offer.path->hashes[i];
        const bool is_new = !block.is_known || block.hash != hash;
        num_blocks_ += !block.hits;
        const std::uint32_t hits = is_new ? 0 : block.hits;
        block.hits = std::max(hits + (i >= offer.counted), std::uint32_t{1});
        block.is_dropped &= !is_new;
        block.hash = hash;
        block.parent = offer.path->parent_of(i).value_or(Digest{});
        block.path = offer.path;
        block.depth = static_cast<std::uint32_t>(i);
        block.is_known = true;
        if (is_first(block)) entered.push_back(id);
    }
}

std::vector<DeviceBlock> DeviceContents::known_of(std::span<const DeviceBlock> ids) {
    std::vector<DeviceBlock> known;
    ++round_;
    for (const DeviceBlock id : ids)
        if (has_seen(id) && (*this)[id].is_known && is_first((*this)[id])) known.push_back(id);
    return known;
}

void DeviceContents::forget(std::span<const DeviceBlock> ids) {
    for (const DeviceBlock id : ids)
        if (has_seen(id)) forget_block((*this)[id]);
}

void DeviceContents::forget_all() {
    for (const std::unique_ptr<Part> &part : parts_)
        if (part) std::ranges::for_each(*part, forget_block);
}

std::vector<DeviceBlock> DeviceContents::ancestors(DeviceBlock id) const {
    std::vector<DeviceBlock> above;
    const Block &block = (*this)[id];
    if (!block.path) return above;
    const DevicePath &path = *block.path;
    for (std::size_t i = block.depth; i--;) {
        const DeviceBlock next = path.ids[i];
        if (next == kNoBlock || !(*this)[next].is_known || (*this)[next].hash != path.hashes[i]) break;
        above.push_back(next);
    }
    std::ranges::reverse(above);
    return above;
}

// The block of a device block that may not have been seen before.
DeviceContents::Block &DeviceContents::seen(DeviceBlock id) {
    const std::size_t part = static_cast<std::size_t>(id) / kPart;
    if (part >= parts_.size()) parts_.resize(part + 1);
    if (!parts_[part]) parts_[part] = std::make_unique<Part>();
    return (*this)[id];
}

}  // namespace fdcache
