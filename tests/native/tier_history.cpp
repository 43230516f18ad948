#include "native/tier_history.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "native/bytes.hpp"
#include "native/tier_pair.hpp"
#include "tier/hints.hpp"

namespace fdcache::tests {
namespace {

constexpr std::size_t kMostLeases = 8;
constexpr int kMostSteps = 150;

// The first bytes are the tier's parameters.
struct Parameters {
    explicit Parameters(Bytes &bytes)
        : slots(2 + bytes.below(11)),
          spare(bytes.pick(std::array{0.0, 0.2, 0.5})),
          extent(bytes.pick(std::array{0u, 1u, 3u})) {}

    std::uint32_t slots;
    double spare;
    std::uint32_t extent;
};

class TierHistory : TierPair {
  public:
    TierHistory(Bytes bytes, std::string_view eviction) : TierHistory{Parameters(bytes), bytes, eviction} {}

    void run() {
        for (int i = 0; i < kMostSteps && !bytes_.empty(); ++i) {
            step();
            compare();
        }
    }

  private:
    TierHistory(const Parameters &drawn, Bytes left, std::string_view eviction)
        : TierPair(drawn.slots, drawn.extent, drawn.spare, eviction), bytes_(left) {
        const std::size_t events = bytes_.pick(std::array{0u, 1u, 5u, 1000u});
        tier_.record_events(events);
        model_.record_events(events);
        if (bytes_.below(2)) mirror();
        if (is_lru_ && bytes_.below(3) == 2)
            for (const Tenant tenant : {0u, 1u, 2u}) set_tenant_limit(tenant, 1 + bytes_.below(6));
        open_lease();
    }

    // Arguments are drawn in statements of their own: the order in which a call evaluates them is not
    // defined.
    void step() {
        static constexpr std::array<void (TierHistory::*)(), 29> kActs{
            &TierHistory::open_lease,
            &TierHistory::release_some,
            &TierHistory::match_path,
            &TierHistory::match_anything,
            &TierHistory::reserve,
            &TierHistory::commit_own,
            &TierHistory::commit_anything,
            &TierHistory::publish_own,
            &TierHistory::publish_anything,
            &TierHistory::compute,
            &TierHistory::copy_path_in,
            &TierHistory::copy_anything_in,
            &TierHistory::complete_some,
            &TierHistory::complete_anything,
            &TierHistory::hold,
            &TierHistory::unhold,
            &TierHistory::drop,
            &TierHistory::discard,
            &TierHistory::quarantine,
            &TierHistory::withhold,
            &TierHistory::give_back,
            &TierHistory::reset,
            &TierHistory::resize,
            &TierHistory::restore,
            &TierHistory::take_events,
            &TierHistory::mirror,
            &TierHistory::limit_tenant,
            &TierHistory::look_up,
            &TierHistory::evict_copied,
        };
        (this->*bytes_.pick(kActs))();
    }

    // --- choices

    std::uint32_t block() {
        const std::uint32_t number = bytes_.below(kBlocks);
        return is_block(number) ? number : number + 1;
    }

    Digests path(std::uint32_t number) {
        Digests up;
        for (; is_block(number); number = parent_of(number)) up.push_back(digests()[number]);
        return {up.rbegin(), up.rend()};
    }

    static Digests above(const Digests &path) {
        Digests parents(path.size());
        std::copy(path.begin(), path.end() - 1, parents.begin() + 1);
        return parents;
    }

    // Rarely the hash that stands for the root.
    Digest some_hash() { return digests()[bytes_.one_in(16) ? 0 : block()]; }

    Digests some_hashes() {
        Digests chosen(bytes_.below(5));
        for (Digest &each : chosen) each = some_hash();
        return chosen;
    }

    Slots some_of(const Slots &from, std::size_t most) {
        Slots chosen(from.empty() ? 0 : bytes_.below(most + 1));
        for (Slot &slot : chosen) slot = bytes_.pick(from);
        return chosen;
    }

    // Rarely slots out of range.
    Slots some_slots() {
        Slots chosen(bytes_.below(5));
        for (Slot &slot : chosen) slot = bytes_.one_in(32) ? kNoSlot : bytes_.below(14);
        return chosen;
    }

    Slots used_slots() {
        Slots used;
        for (const auto &[slot, block] : model_.used()) used.push_back(slot);
        return some_of(used, 3);
    }

    // Slots of copies, one for each, parents first.
    Slots copies() const {
        Slots copied;
        for (const auto &[slot, block] : model_.used()) copied.insert(copied.end(), block.copies, slot);
        std::ranges::stable_sort(copied, {}, [this](Slot slot) { return model_.path(slot).size(); });
        return copied;
    }

    Slots anonymous(LeaseId lease) const {
        Slots own;
        for (const auto &[slot, block] : model_.used())
            if (block.owner == lease && !block.findable()) own.push_back(slot);
        return own;
    }

    // An open lease, rarely one that is unknown.
    LeaseId lease() {
        const std::vector<LeaseId> open = model_.leases();
        return open.empty() || bytes_.one_in(32) ? 1 : bytes_.pick(open);
    }

    // --- operations

    void open_lease() {
        if (model_.leases().size() >= kMostLeases) release(model_.leases().front());
        expect(tier_.open_lease() == model_.open_lease(), "another lease");
    }

    void release_some() {
        const LeaseId own = lease();
        if (is_lru_) return release(own);
        pass_time();
        const RequestEnd end{bytes_.next() + 1u, bytes_.next(), 4};
        expect(tier_.finish(own, &end) == model_.release(own), "finish");
    }

    // Rarely a clock that goes back, and weeks without a request.
    void pass_time() {
        const std::uint32_t gap = bytes_.next();
        if (gap == 254) return tier_.set_clock(time_ / 2);
        time_ += gap == 255 ? std::uint64_t{3} << 30 : 1 + 50 * gap;
        tier_.set_clock(time_);
    }

    void match_path() {
        const LeaseId own = lease();
        const Digests wanted = path(block());
        match(own, wanted, bytes_.pick(std::array{0, 0, 0, 1, 2, 9}));
    }
    void match_anything() {
        const LeaseId own = lease();
        const Digests wanted = some_hashes();
        match(own, wanted, bytes_.below(3));
    }

    std::size_t match(LeaseId lease, const Digests &hashes, std::size_t start) {
        const std::size_t known = bytes_.below(3);
        const bool exact = model_.is_exact(hashes, start);
        if (!exact) return match_no_path(lease, hashes, start, known);
        const auto run = both([&] { return tier_.match(lease, hashes, start, known); },
                              [&](const MatchRun &run) {
                                  return run.slots == model_.match(lease, hashes, start, known) &&
                                         check_run(run, hashes, start);
                              });
        return run ? run->slots.size() : 0;
    }

    void reserve() {
        const LeaseId own = lease();
        reserve_for(own, bytes_.below(5));
    }

    void evict_copied() {
        const std::uint32_t count = bytes_.below(4);
        BlockList gone;
        const bool are_enough = count <= model_.above_copies();
        expect(tier_.evict_copied(count, &gone) == are_enough, "entries above copies are miscounted");
        expect(model_.evict_copied(count, gone), "other entries are evicted for those above copies");
    }

    void commit_anything() {
        const LeaseId own = lease();
        const Digest parent = some_hash();
        const Digests hashes = some_hashes();
        commit(own, parent, hashes, some_slots());
    }

    void commit_own() {
        const LeaseId owner = lease();
        Digests wanted = path(block());
        const std::size_t depth = bytes_.below(wanted.size());
        const Digest parent = depth ? wanted[depth - 1] : Digest{};
        wanted.erase(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(depth));
        commit(owner, parent, wanted, anonymous(owner));
    }

    // A request from its match to its commit, and perhaps to its end.
    void compute() {
        open_lease();
        const LeaseId own = model_.leases().back();
        const Digests wanted = path(block());
        const std::size_t found = bytes_.one_in(4) ? 0 : match(own, wanted, 0);
        reserve_for(own, static_cast<std::uint32_t>(wanted.size() - found) + bytes_.below(2));
        const auto first = wanted.begin() + static_cast<std::ptrdiff_t>(found);
        commit(own, found ? wanted[found - 1] : Digest{}, {first, wanted.end()}, anonymous(own));
        if (!bytes_.one_in(3)) release(own);
    }

    void publish(LeaseId lease, Digests parents, Digests hashes, Slots slots) {
        const std::size_t count = std::min(hashes.size(), slots.size());
        parents.resize(count);
        hashes.resize(count);
        slots.resize(count);
        std::vector<std::uint8_t> copied(count);
        std::vector<std::uint64_t> checksums(count);
        std::vector<Tenant> tenants(model_.limits().empty() && !bytes_.one_in(16) ? 0 : count);
        for (std::size_t i = 0; i < count; ++i) {
            copied[i] = !bytes_.one_in(4);
            checksums[i] = bytes_.next();
        }
        const Tenant tenant = bytes_.below(4);
        std::ranges::fill(tenants, tenant);
        both([&] { return tier_.publish(lease, parents, hashes, slots, copied, checksums, tenants); },
             [&](const std::vector<PublishStatus> &status) {
                 return status == model_.publish(lease, parents, hashes, slots, copied, checksums, tenants);
             });
    }

    void publish_own() {
        const LeaseId owner = lease();
        const Digests wanted = path(block());
        publish(owner, above(wanted), wanted, anonymous(owner));
    }

    void publish_anything() {
        const LeaseId own = lease();
        const Digests hashes = some_hashes();
        Digests parents(hashes.size());
        for (Digest &each : parents) each = some_hash();
        publish(own, parents, hashes, some_slots());
    }

    // Lease 0 is none.
    LeaseId lease_or_none() { return bytes_.one_in(4) ? 0 : lease(); }

    void copy_path_in() {
        const Digests wanted = path(block());
        copy_in(lease_or_none(), above(wanted), wanted);
    }

    void copy_anything_in() {
        const Digests hashes = some_hashes();
        Digests parents(hashes.size());
        for (Digest &each : parents) each = some_hash();
        copy_in(lease_or_none(), parents, hashes);
    }

    void complete_some() {
        Slots held = copies();
        held.resize(std::min<std::size_t>(held.size(), bytes_.below(6)));
        complete(held);
    }

    void complete_anything() { complete(some_slots()); }

    void complete(const Slots &slots) {
        std::vector<std::uint8_t> copied(slots.size());
        std::vector<std::uint64_t> checksums(bytes_.below(2) ? slots.size() : 0);
        for (auto &each : copied) each = !bytes_.one_in(4);
        for (auto &each : checksums) each = bytes_.next();
        both([&] { return tier_.complete(slots, copied, checksums); },
             [&](const std::vector<std::uint8_t> &ready) {
                 return ready == model_.complete(slots, copied, checksums);
             });
    }

    void hold() {
        const Slots slots = bytes_.below(2) ? used_slots() : some_slots();
        both_do([&] { tier_.hold(slots); }, [&] { model_.hold(slots); });
    }
    void unhold() {
        const Slots slots = bytes_.below(2) ? some_of(copies(), 3) : some_slots();
        both_do([&] { tier_.unhold(slots); }, [&] { model_.unhold(slots); });
    }
    void quarantine() {
        const Slots slots = used_slots();
        both_do([&] { tier_.quarantine(slots); }, [&] { model_.quarantine(slots); });
    }
    void withhold() {
        const Slots slots = used_slots();
        both_do([&] { tier_.withhold(slots); }, [&] { model_.withhold(slots); });
    }
    void give_back() {
        const Slots slots = some_slots();
        both_do([&] { tier_.give_back(slots); }, [&] { model_.give_back(slots); });
    }

    void drop() {
        const Digests hashes = some_hashes();
        const std::uint32_t ready = tier_.stats().ready;
        tier_.drop(hashes);
        expect(ready - tier_.stats().ready == model_.drop(hashes), "another number of blocks is dropped");
    }

    void discard() {
        const Slots slots = some_slots();
        const bool quarantine = bytes_.one_in(3);
        both([&] { return tier_.discard(slots, quarantine); },
             [&](const BlockList &gone) { return gone.slots == model_.discard(slots, quarantine); });
    }

    void resize() {
        const std::uint32_t slots = bytes_.below(13);
        both([&] { return tier_.resize(slots); },
             [&](std::uint32_t standing) { return standing == model_.resize(slots); });
    }

    // A scan has each slot once; a hash may be in several.
    void restore() {
        Slots slots;
        std::vector<std::uint32_t> generations;
        Digests parents, hashes;
        std::vector<std::uint64_t> checksums, times;
        const bool with_times = bytes_.below(2);
        for (Slot slot = 0; slot < model_.slots() + 1; ++slot) {
            if (bytes_.below(2)) continue;
            const std::uint32_t number = block();
            slots.push_back(slot);
            generations.push_back(1 + bytes_.below(40));
            hashes.push_back(digests()[number]);
            parents.push_back(bytes_.one_in(16) ? some_hash() : digests()[parent_of(number)]);
            checksums.push_back(bytes_.next());
            if (with_times) times.push_back(bytes_.below(8));
        }
        const std::vector<Tenant> tenants(model_.limits().empty() ? 0 : slots.size(), bytes_.below(3));
        const FoundEntries found{slots, generations, hashes, parents, checksums, times, tenants};
        const std::uint32_t generation = bytes_.below(50);
        both([&] { return tier_.restore(found, generation); },
             [&](const std::vector<std::uint8_t> &restored) {
                 return restored == model_.restore(found, generation);
             });
    }

    void limit_tenant() {
        if (!is_lru_) return hint();
        const Tenant tenant = bytes_.below(3);
        set_tenant_limit(tenant, bytes_.below(7));
    }

    // Changes the order alone.
    void hint() {
        const Digests hashes = path(block());
        const Hint said{bytes_.pick(std::array{HintKind::kOnce, HintKind::kRelease, HintKind::kRetain,
                                               HintKind::kReturn, HintKind::kPriority}),
                        static_cast<double>(bytes_.below(3))};
        const bool own = bytes_.below(2);
        const std::size_t start = bytes_.below(3), stop = start + bytes_.below(6);
        const std::array hints{HintRange{said, 0, hashes.size(), own}, HintRange{said, start, stop, !own}};
        for (const HintTaken &taken : tier_.hint(hashes, hints))
            expect(taken.first + taken.blocks <= hashes.size(), "hinted blocks are of the path");
        expect(tier_.hint_fates(hashes).size() == hashes.size(), "a fate for each block");
    }

    void look_up() {
        const Digests hashes = some_hashes();
        Slots found;
        for (const Digest &hash : hashes)
            if (model_.find_ready(hash) != kNoSlot) found.push_back(model_.find_ready(hash));
        check_list(tier_.find(hashes), found);
        const Slots slots = bytes_.one_in(4) ? some_slots() : used_slots();
        const std::uint32_t levels = bytes_.pick(std::array{0u, 1u, 2u, 100u});
        both([&] { return tier_.ancestry(slots, levels); },
             [&](const BlockList &list) {
                 check_list(list, model_.ancestry(slots, levels));
                 return true;
             });
        Slots ready;
        for (const auto &[slot, block] : model_.used())
            if (block.ready) ready.push_back(slot);
        check_list(tier_.idle(0, nullptr), ready);
        check_list(tier_.starting_with({}), ready);
        std::uint32_t hits = UINT32_MAX;
        for (const std::uint32_t each : tier_.hottest(100).hits)
            expect(each <= std::exchange(hits, each), "hottest");
    }

    Bytes bytes_;
    std::uint64_t time_ = 0;
};

}  // namespace

void run_tier_history(std::span<const std::uint8_t> bytes, std::string_view eviction) {
    TierHistory(Bytes(bytes), eviction).run();
}

}  // namespace fdcache::tests
