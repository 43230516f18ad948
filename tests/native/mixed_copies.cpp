#include "native/mixed_copies.hpp"

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "native/copy_world.hpp"

namespace fdcache::stand_in {
namespace {

using cuda::Submitter;

class MixedCopies {
  public:
    explicit MixedCopies(cuda::SwapChoice way) : world_(way) {}

    void run() {
        for (int round = 0; round < kRounds; ++round) {
            load("load " + std::to_string(round), round % 3 == 0 ? kBlocks : pick(1, 4));
            // A host slot is written only once until its batch is finished, as in an engine.
            if (round % 6 == 1) back_up("backup " + std::to_string(round), pick(1, 4));
            if (round % 6 == 5) finish_all();
        }
        finish_all();
        expect(misread_ == 0,
               std::to_string(misread_) + " times the engine read other bytes than were loaded");
        check("device block ", at_, [this](int slot, int host) { return world_.has_bytes(slot, host); });
        check("host slot ", saved_,
              [this](int slot, int host) { return world_.are_same_records(slot, host); });
    }

  private:
    static constexpr int kRounds = 24;

    int pick(int least, int most) { return std::uniform_int_distribution(least, most)(random_); }

    std::vector<int> some_slots(int count) {
        std::vector<int> slots(kBlocks);
        for (int slot = 0; slot < kBlocks; ++slot) slots[slot] = slot;
        std::ranges::shuffle(slots, random_);
        slots.resize(count);
        return slots;
    }

    void load(const std::string &name, int count) {
        const EventPtr computed = world_.event();
        computed->record(&engine_);
        loads_.wait(computed);
        const std::vector<int> from = some_slots(count);
        const std::vector<int> to = some_slots(count);
        std::vector<SlotPair> pairs;
        for (int i = 0; i < count; ++i) {
            pairs.push_back({from[i], to[i]});
            at_[to[i]] = from[i];
        }
        const auto &ranges = pick(0, 2) == 0 ? kWhole : kGroups;
        batches_.push_back(world_.load(name, pairs));
        submit(loads_, load_lane_, batches_.back(), ranges);
        if (pick(0, 1) == 0) read(batches_.back(), ranges);
    }

    void read(const Batch &batch, const std::vector<PlaneRange> &ranges) {
        for (std::size_t i = 0; i < ranges.size(); ++i) {
            batch.events[i]->hold(&engine_);
            engine_.copy([this, pairs = batch.pairs, range = ranges[i]] {
                for (const SlotPair &pair : pairs) {
                    if (!world_.has_bytes(pair.device, pair.host, range)) ++misread_;
                }
            });
        }
    }

    void back_up(const std::string &name, int count) {
        std::vector<SlotPair> pairs;
        for (const int slot : some_slots(kBlocks)) {
            if (!at_.contains(slot) || pairs.size() == static_cast<std::size_t>(count)) continue;
            pairs.push_back({kBlocks + slot, slot});
            saved_[kBlocks + slot] = at_[slot];
        }
        const EventPtr loaded = world_.event();
        loads_.record(loaded);
        backups_.wait(loaded);
        batches_.push_back(world_.backup(name, pairs));
        submit(backups_, backup_lane_, batches_.back(), kWhole);
        loads_.wait(batches_.back().swap->done());
    }

    void finish_all() {
        for (Batch &batch : batches_) batch.expect_copied();
        batches_.clear();
    }

    void check(const std::string &what, const std::map<int, int> &wanted,
               const std::function<bool(int, int)> &is_right) const {
        expect(!wanted.empty(), "nothing was copied to any " + what);
        for (const auto &[slot, host] : wanted) {
            expect(is_right(slot, host), what + std::to_string(slot) +
                                             " has other bytes than its last writer brought from host slot " +
                                             std::to_string(host));
        }
    }

    World world_;
    std::mt19937 random_{1};
    std::atomic<int> misread_{0};
    Stream engine_;
    LaneWorld load_lane_{world_.context}, backup_lane_{world_.context};
    Submitter loads_{world_.context, load_lane_.main(), false};
    Submitter backups_{world_.context, backup_lane_.main(), true};
    std::deque<Batch> batches_;
    std::map<int, int> at_;     // the host slot that each block was loaded from last
    std::map<int, int> saved_;  // the source of each host slot after the records
};

}  // namespace

void run_mixed_copies(cuda::SwapChoice way, Delays delays) {
    set_delays(delays);
    MixedCopies(way).run();
}

}  // namespace fdcache::stand_in
