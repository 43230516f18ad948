#include "native/tier_pair.hpp"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

namespace fdcache::tests {
namespace {

// All hashes of the second tree share the word that places them in a table.
Digest digest(std::uint32_t number) {
    Digest made;
    std::uint64_t word = number * 0x9E3779B97F4A7C15u;
    for (std::size_t i = 0; i < made.bytes.size(); ++i) {
        word ^= word >> 29;
        word *= 0xBF58476D1CE4E5B9u;
        made.bytes[i] = static_cast<std::uint8_t>(word >> 56);
        if (number > kTree && i < 8) made.bytes[i] = 7;
    }
    return made;
}

}  // namespace

const Digests &digests() {
    static const Digests all = [] {
        Digests made(kBlocks);
        for (std::uint32_t number = 0; number < kBlocks; ++number)
            if (is_block(number)) made[number] = digest(number);
        return made;
    }();
    return all;
}

TierPair::TierPair(std::uint32_t slots, std::uint32_t extent, double spare, std::string_view eviction)
    : is_lru_(eviction == "lru"),
      tier_(slots, eviction, extent, spare),
      model_(slots, spare, is_lru_),
      table_(64 * PresenceTable::kBucketTags),
      presence_(table_.data(), table_.size() * sizeof table_[0]) {
    if (!is_lru_) tier_.set_below(below_, slots % 2);
}

void TierPair::release(LeaseId lease) {
    expect(tier_.release(lease) == model_.release(lease), "release");
}

std::size_t TierPair::match_no_path(LeaseId lease, const Digests &hashes, std::size_t start,
                                    std::size_t known) {
    try {
        const MatchRun run = tier_.match(lease, hashes, start, known);
        for (std::size_t i = 0; i < run.slots.size(); ++i)
            expect(model_.find_ready(hashes[start + i]) == run.slots[i], "a match has another hash");
        model_.adopt_match(lease, run.slots, start, known);
        check_run(run, hashes, start);
        return run.slots.size();
    } catch (const StaleLease &) {
    } catch (const std::invalid_argument &) {
    }
    return 0;
}

bool TierPair::check_run(const MatchRun &run, const Digests &hashes, std::size_t start) const {
    for (std::size_t i = 0; i < run.slots.size(); ++i) {
        const TierModel::Block &block = model_.used().at(run.slots[i]);
        expect(run.generations[i] == block.generation && run.hits[i] == block.hits, "a match's figures");
    }
    const std::size_t end = start + run.slots.size();
    const bool pending = end < hashes.size() && model_.presence(hashes[end]) == Presence::kPending;
    return run.pending == pending;
}

void TierPair::check_list(const BlockList &list, const Slots &slots) const {
    expect(list.slots == slots, "another listing than the model's");
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const TierModel::Block &block = model_.used().at(slots[i]);
        expect(list.generations[i] == block.generation && list.hashes[i] == block.hash &&
                   list.parents[i] == block.parent_hash && list.hits[i] == block.hits,
               "a listing is wrong");
    }
}

void TierPair::reserve_for(LeaseId lease, std::uint32_t count) {
    both([&] { return tier_.reserve(lease, count); },
         [&](const Reservation &taken) { return taken.missing == model_.reserve(lease, count, taken); });
}

void TierPair::commit(LeaseId lease, const Digest &parent, Digests hashes, Slots slots) {
    const std::size_t count = std::min(hashes.size(), slots.size());
    hashes.resize(count);
    slots.resize(count);
    both([&] { return tier_.commit(lease, parent, hashes, slots); },
         [&](const std::vector<CommitStatus> &status) {
             return status == model_.commit(lease, parent, hashes, slots);
         });
}

void TierPair::copy_in(LeaseId lease, const Digests &parents, const Digests &hashes) {
    both([&] { return tier_.reserve_copies(lease, parents, hashes); },
         [&](const CopyReservation &taken) {
             std::vector<ReserveStatus> status;
             const std::uint32_t missing = model_.reserve_copies(lease, parents, hashes, taken, status);
             return taken.missing == missing && taken.status == status;
         });
}

void TierPair::reset() {
    tier_.reset();
    model_.reset();
}

void TierPair::mirror() {
    tier_.mirror(presence_);
    mirrored_ = true;
}

void TierPair::set_tenant_limit(Tenant tenant, std::uint32_t most) {
    both_do([&] { tier_.set_tenant_limit(tenant, most); }, [&] { model_.set_tenant_limit(tenant, most); });
}

void TierPair::take_events() {
    std::vector<TierEvent> events = tier_.take_events(), expected = model_.take_events();
    const auto same = [](const TierEvent &one, const TierEvent &other) {
        return one.kind == other.kind && one.hash == other.hash && one.parent == other.parent;
    };
    if (!is_lru_) {
        // Which events are left after others were lost depends on the order.
        const auto has_lost = [](const TierEvent &each) { return each.kind == TierEvent::Kind::kLost; };
        if (std::ranges::any_of(events, has_lost) && std::ranges::any_of(expected, has_lost)) return;
        const auto sort = [](std::vector<TierEvent> &list) {
            std::ranges::sort(list, {},
                              [](const TierEvent &each) { return std::pair(each.kind, each.hash.bytes); });
        };
        sort(events);
        sort(expected);
    }
    expect(std::ranges::equal(events, expected, same), "other events than the model's");
}

void TierPair::compare() const {
    for (const std::string &broken : tier_.check_integrity()) fail(broken.c_str());
    compare_figures();
    const BlockList coldest = tier_.coldest(UINT32_MAX);
    const Slots order = model_.eviction_order();
    if (is_lru_) {
        check_list(coldest, order);
    } else {
        check_list(coldest, coldest.slots);
        expect(std::set(coldest.slots.begin(), coldest.slots.end()) == std::set(order.begin(), order.end()),
               "other entries are evictable than the model's");
    }
    for (Slot slot = 0; slot < model_.slots(); ++slot) compare_slot(slot);
    const std::vector<Presence> presence = tier_.contains(digests());
    for (std::uint32_t number = 0; number < kBlocks; ++number) {
        if (!is_block(number)) continue;
        const Digest &hash = digests()[number];
        expect(presence[number] == model_.presence(hash), "another presence");
        expect(!mirrored_ || presence_.holds(hash) == (presence[number] == Presence::kReady),
               "another presence in the mirror");
    }
    const std::vector<std::uint32_t> entries = tier_.tenant_entries();
    expect(entries.size() == model_.limits().size(), "number of tenants");
    for (Tenant tenant = 0; tenant < entries.size(); ++tenant)
        expect(entries[tenant] == model_.entries(tenant), "entries of a tenant");
}

void TierPair::compare_figures() const {
    const TierStats stats = tier_.stats();
    std::uint32_t ready = 0, pending = 0;
    std::uint64_t pins = 0, copies = 0;
    for (const auto &[slot, block] : model_.used()) {
        ready += block.ready;
        pending += block.findable() && !block.ready;
        pins += model_.pins(slot);
        copies += block.copies;
    }
    const auto evictable = static_cast<std::uint32_t>(model_.eviction_order().size());
    expect(stats.slots == model_.slots() && stats.free == model_.free() && stats.ready == ready &&
               stats.writing == model_.used().size() - ready && stats.pending == pending,
           "numbers of slots by state");
    expect(stats.evictable == evictable && tier_.available() == model_.free() + evictable,
           "number of evictable slots");
    expect(tier_.above_copies() == model_.above_copies(), "number of entries above copies");
    expect(stats.pins == pins && stats.holds == copies && stats.leases == model_.leases().size(),
           "number of pins, holds or leases");
    expect(stats.epoch == model_.epoch() && stats.evictions == model_.evictions(), "epoch or evictions");
}

void TierPair::compare_slot(Slot slot) const {
    const NodeView node = tier_.node(slot);
    const auto used = model_.used().find(slot);
    if (used == model_.used().end()) {
        expect(node.state == SlotState::kFree && !node.findable, "a free slot is in use");
        return;
    }
    const TierModel::Block &block = used->second;
    expect(node.state == (block.ready ? SlotState::kReady : SlotState::kWriting), "the state of a slot");
    expect(node.findable == block.findable() && node.hash == block.hash, "the hash of a slot");
    expect(node.generation == block.generation && node.pins == model_.pins(slot), "the pins of a slot");
    expect(node.holds == block.holds() && node.children == model_.children(slot), "the holds of a slot");
    expect(node.parent == (block.parent == TierModel::kRoot ? kNoSlot : block.parent), "a parent");
    if (!block.ready) return;
    expect(node.hits == block.hits && node.checksum == block.checksum, "the hits of an entry");
    expect(node.depth + 1 == model_.path(slot).size() && node.tenant == block.tenant, "a depth or tenant");
}

}  // namespace fdcache::tests
