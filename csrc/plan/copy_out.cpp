#include "plan/copy_out.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace fdcache {
namespace {

// Blocks being backed up: one that is given away meanwhile makes its next owner wait.
constexpr std::size_t kMostInFlight = 1024;
constexpr std::size_t kSharesOfTier = 4;

// A patient plan leaves fewer queued blocks than kFew to a later one, at most kMostWaits times in a row.
constexpr std::size_t kFew = 32;
constexpr std::uint32_t kMostWaits = 16;

// Seconds that blocks wait for slots of a service, which grants them in the background.
constexpr double kPatience = 1.0;

std::size_t less(std::size_t most, std::size_t taken) {
    return most > taken ? most - taken : 0;
}

}  // namespace

void CopyOut::offered(const std::shared_ptr<const DevicePath> &path, std::size_t start, std::size_t counted) {
    if (!path->parent) start = std::max<std::size_t>(start, 1);
    if (start < path->ids.size()) offers_.push_back({path, start, path->ids.size(), counted});
}

// Enters what was offered, and queues what the policy wants on the host now.
void CopyOut::take_offers(const HostIndex &target) {
    if (offers_.empty()) return;
    Ids ids = contents_.add(std::exchange(offers_, {}));
    if (writes_back_) return;
    std::erase_if(ids, [this](DeviceBlock id) { return contents_[id].is_queued; });
    keep_wanted(ids, target);
    if (ids.empty()) return;
    set_queued(ids, true);
    queue_.push_back(std::move(ids));
}

PlannedCopies CopyOut::given_away(std::span<const DeviceBlock> ids, HostIndex &target, BlockCopies &copies,
                                  const std::function<bool(std::uint64_t)> &is_in_flight) {
    take_offers(target);
    PlannedCopies out;
    std::erase_if(reading_, [&](std::uint64_t plan) { return !is_in_flight(plan); });
    if (!reading_.empty()) {
        for (const DeviceBlock id : ids) {
            if (!contents_.has_seen(id)) continue;
            const std::uint64_t plan = contents_[id].read_by;
            if (plan && std::ranges::find(reading_, plan) != reading_.end() &&
                std::ranges::find(out.after, plan) == out.after.end())
                out.after.push_back(plan);
        }
        std::ranges::sort(out.after);
    }
    const Ids known = contents_.known_of(ids);
    if (known.empty()) return out;
    Ids wanted = known;
    keep_wanted(wanted, target);
    if (!wanted.empty()) {
        Call call{target, copies, out, std::nullopt};
        copy(with_ancestors(std::move(wanted), target, kMostAncestors), call);
    }
    contents_.forget(known);
    return out;
}

void CopyOut::forget_blocks(std::span<const DeviceBlock> ids, const HostIndex &target) {
    take_offers(target);
    contents_.forget(ids);
}

void CopyOut::forget() {
    offers_.clear();
    contents_.forget_all();
    queue_.clear();
    waiting_.clear();
    coldest_.clear();
}

void CopyOut::next_evicted(std::span<const DeviceBlock> ids) {
    if (writes_back_) coldest_.assign(ids.begin(), ids.end());
}

std::size_t CopyOut::queued(const HostIndex &target) {
    take_offers(target);
    std::size_t count = 0;
    for (const std::deque<Ids> *lists : {&queue_, &waiting_})
        for (const Ids &ids : *lists)
            for (const DeviceBlock id : ids) count += contents_[id].is_queued;
    return count;
}

bool CopyOut::has_work(const HostIndex &target) {
    take_offers(target);
    return !queue_.empty() || (may_retry_ && !waiting_.empty());
}

PlannedCopies CopyOut::plan(HostIndex &target, std::size_t in_flight, bool is_patient, double now,
                            BlockCopies &copies) {
    take_offers(target);
    if (may_retry_) {
        queue_.insert(queue_.begin(), std::make_move_iterator(waiting_.begin()),
                      std::make_move_iterator(waiting_.end()));
        waiting_.clear();
        may_retry_ = false;
    }
    PlannedCopies out;
    if ((queue_.empty() && coldest_.empty()) || waits_for_more(is_patient)) return out;
    const std::size_t share = std::max<std::size_t>(target.capacity() / kSharesOfTier, 1);
    const std::size_t most = less(std::min(kMostInFlight, share), in_flight);
    Call call{target, copies, out, now};
    if (!queue_.empty() && most) back_up(most, call);
    if (!coldest_.empty()) clean(std::min(most, less(clean_reserve_, in_flight)), call);
    return out;
}

bool CopyOut::waits_for_more(bool is_patient) {
    std::size_t size = 0;
    for (const Ids &ids : queue_) size += ids.size();
    const bool waits = is_patient && size < kFew && coldest_.empty() && waits_ < kMostWaits;
    waits_ = waits ? waits_ + 1 : 0;
    return waits;
}

void CopyOut::sent(std::uint64_t plan, std::span<const std::span<const DeviceBlock>> read) {
    bool reads = false;
    for (const std::span<const DeviceBlock> ids : read) {
        for (const DeviceBlock id : ids)
            if (contents_.has_seen(id)) contents_[id].read_by = plan;
        reads |= !ids.empty();
    }
    if (reads) reading_.push_back(plan);
}

// Leaves the blocks that have enough hits and that the host lacks.
void CopyOut::keep_wanted(Ids &ids, const HostIndex &target) const {
    const std::vector<Presence> presence = target.contains(hashes_of(ids));
    std::size_t kept = 0;
    for (std::size_t i = 0; i < ids.size(); ++i)
        if (presence[i] == Presence::kAbsent && contents_[ids[i]].hits >= least_hits_) ids[kept++] = ids[i];
    ids.resize(kept);
}

void CopyOut::back_up(std::size_t most, Call &call) {
    Ids ids;
    for (const Ids &part : queue_)  // a device block that has changed hands may be in two parts
        std::ranges::copy_if(part, std::back_inserter(ids), [this](DeviceBlock id) {
            return std::exchange(contents_[id].is_queued, false);
        });
    queue_.clear();
    if (ids.size() > most) {
        queue_.emplace_back(ids.begin() + static_cast<std::ptrdiff_t>(most), ids.end());
        set_queued(queue_.back(), true);
        ids.resize(most);
    }
    Ids waits = copy(with_ancestors(std::move(ids), call.target), call);
    if (waits.empty()) return;
    set_queued(waits, true);
    waiting_.push_back(std::move(waits));
}

void CopyOut::clean(std::size_t most, Call &call) {
    Ids dirty = contents_.known_of(std::exchange(coldest_, {}));
    dirty.resize(std::min(dirty.size(), clean_reserve_));
    keep_wanted(dirty, call.target);
    dirty.resize(std::min(dirty.size(), most));
    if (!dirty.empty()) copy(with_ancestors(std::move(dirty), call.target), call);
}

// Blocks, each after those ancestors on the device that the host lacks. A block that would take more than
// `most` others along is left without, so that it finds no parent.
CopyOut::Ids CopyOut::with_ancestors(Ids ids, const HostIndex &target, std::size_t most) const {
    std::vector<std::size_t> heads;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        const Digest &parent = contents_[ids[i]].parent;
        if (!parent.is_zero() && (!i || parent != contents_[ids[i - 1]].hash)) heads.push_back(i);
    }
    if (heads.empty()) return ids;
    Ids first;
    for (const std::size_t i : heads) first.push_back(ids[i]);
    const std::vector<Presence> presence = target.contains(parents_of(first));
    std::vector<bool> lacks_parent(ids.size());
    for (std::size_t k = 0; k < heads.size(); ++k) lacks_parent[heads[k]] = presence[k] == Presence::kAbsent;
    if (std::ranges::find(lacks_parent, true) == lacks_parent.end()) return ids;
    const std::unordered_set<DeviceBlock> wanted(ids.begin(), ids.end());
    std::unordered_set<DeviceBlock> listed;
    Ids found;
    for (std::size_t i = 0; i < ids.size(); ++i) {
        if (lacks_parent[i] && !listed.contains(ids[i])) {
            Ids above = uncovered_ancestors(ids[i], target);
            std::erase_if(above, [&](DeviceBlock id) { return listed.contains(id); });
            const auto more = static_cast<std::size_t>(
                std::ranges::count_if(above, [&](DeviceBlock id) { return !wanted.contains(id); }));
            if (more <= most) {
                most -= more;
                found.insert(found.end(), above.begin(), above.end());
                listed.insert(above.begin(), above.end());
            }
        }
        if (listed.insert(ids[i]).second) found.push_back(ids[i]);
    }
    return found;
}

CopyOut::Ids CopyOut::uncovered_ancestors(DeviceBlock id, const HostIndex &target) const {
    Ids above = contents_.ancestors(id);
    const std::vector<Presence> there = target.contains(hashes_of(above));
    std::size_t kept = 0;
    for (std::size_t k = 0; k < above.size(); ++k)
        if (there[k] == Presence::kAbsent) above[kept++] = above[k];
    above.resize(kept);
    return above;
}

// What is given away cannot wait for copies of its parents: it is copied below them, and dropped if one
// fails.
CopyOut::Ids CopyOut::copy(Ids ids, Call &call) {
    CopyReservation taken;
    std::size_t count = ids.size();
    while (count) {
        const std::span<const DeviceBlock> first(ids.data(), count);
        taken = call.target.reserve(parents_of(first), hashes_of(first), !call.now);
        const auto reserved = static_cast<std::uint32_t>(taken.slots.size());
        call.out.asked = std::max(call.out.asked, reserved + taken.missing);
        if (!taken.missing) break;
        count = less(count, taken.missing);
    }
    no_room(std::span(ids).subspan(count), call);
    if (!count) return {};
    starved_since_.reset();
    ids.resize(count);
    call.copies.reserve_for(call.copies.size() + taken.slots.size());
    Ids below;
    std::size_t next = 0;
    for (std::size_t i = 0; i < count; ++i) {
        DeviceContents::Block &block = contents_[ids[i]];
        if (taken.status[i] == ReserveStatus::kNoParent) below.push_back(ids[i]);
        if (taken.status[i] != ReserveStatus::kReserved) continue;
        call.copies.add(static_cast<Slot>(ids[i]), 0, block.hash, block.parent, taken.slots[next],
                        taken.generations[next]);
        block.is_queued = false;
        ++next;
    }
    call.out.planned += static_cast<std::uint32_t>(next);
    call.out.displaced.append(taken.evicted);
    return waiting_of(std::move(below), call);
}

// Drops blocks, or queues them again while a service may grant slots.
void CopyOut::no_room(std::span<const DeviceBlock> ids, Call &call) {
    if (ids.empty()) return;
    const bool may_come = call.now && call.target.capacity() > call.target.room();
    const double since = may_come ? starved_since_.value_or(*call.now) : 0;
    if (may_come && *call.now - since < kPatience) {
        starved_since_ = since;
        set_queued(ids, true);
        queue_.emplace_front(ids.begin(), ids.end());
    } else {
        drop(ids, call);
    }
}

// Counts each block once, as long as it is on the device.
void CopyOut::drop(std::span<const DeviceBlock> ids, Call &call) {
    for (const DeviceBlock id : ids) call.out.dropped += !std::exchange(contents_[id].is_dropped, true);
}

// The blocks whose parent is being copied, or waits itself; the others are dropped.
CopyOut::Ids CopyOut::waiting_of(Ids ids, Call &call) {
    if (ids.empty()) return ids;
    if (call.now) {
        const std::vector<Presence> above = call.target.contains(parents_of(ids));
        std::unordered_set<Digest, DigestHash> expected;
        std::size_t kept = 0;
        for (std::size_t i = 0; i < ids.size(); ++i) {
            const DeviceContents::Block &block = contents_[ids[i]];
            if (above[i] != Presence::kPending && !expected.contains(block.parent)) {
                drop({&ids[i], 1}, call);
                continue;
            }
            expected.insert(block.hash);
            ids[kept++] = ids[i];
        }
        ids.resize(kept);
    } else {
        drop(ids, call);
        ids.clear();
    }
    return ids;
}

void CopyOut::set_queued(std::span<const DeviceBlock> ids, bool is_queued) {
    for (const DeviceBlock id : ids) contents_[id].is_queued = is_queued;
}

std::vector<Digest> CopyOut::hashes_of(std::span<const DeviceBlock> ids) const {
    std::vector<Digest> hashes;
    hashes.reserve(ids.size());
    for (const DeviceBlock id : ids) hashes.push_back(contents_[id].hash);
    return hashes;
}

std::vector<Digest> CopyOut::parents_of(std::span<const DeviceBlock> ids) const {
    std::vector<Digest> parents;
    parents.reserve(ids.size());
    for (const DeviceBlock id : ids) parents.push_back(contents_[id].parent);
    return parents;
}

}  // namespace fdcache
