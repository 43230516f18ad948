// What requests load: from the plan of a load's first part to its outcome.
//
// A load is a run of blocks of one request's path. Each of its parts is in one plan: a whole load has one
// part, one that follows reads from storage has several, and what a peer sends is a part, too. Parts may end
// in any order. A load ends once none is in flight and no other follows, or when a plan of one is overdue. It
// has one end, which its owner takes and tells; what is reported later has no effect on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fdcache {

class RequestState;

enum class LoadStatus : std::uint8_t { kOpen, kConfirmed, kFailed, kOverdue };

struct Load {
    std::uint64_t number;       // names it in its outcome
    std::uint32_t first, stop;  // blocks of the path
    std::uint32_t planned;      // those before it are in plans
    std::uint32_t whole;        // those before it have arrived unless their part is in flight
    std::uint32_t in_flight = 0;
    std::uint64_t plan = 0;   // of the first part, once it is sent
    bool is_cut = false;      // no other part is planned
    bool is_revoked = false;  // what was loaded is gone, through no fault of the load
    LoadStatus status = LoadStatus::kOpen;
    std::vector<std::string> errors;
    RequestState *waiting = nullptr;  // until it is released; its manager's

    bool is_open() const { return !is_cut && planned < stop; }
    // The block after the last one that counts: none does once a plan is overdue.
    std::uint32_t arrived() const { return status == LoadStatus::kOverdue ? first : whole; }
};

using LoadPointer = std::shared_ptr<Load>;

// Blocks `first` to `stop` of a load. `count` of them are copied, from `offset` of their plan's transfer on:
// an engine does not need those that have no device block. A load of which any other block fails is then
// worth nothing.
struct LoadPart {
    LoadPointer load;
    std::uint32_t first, stop, offset, count;
};

struct LoadTotals {
    std::uint64_t confirmed = 0, failed = 0, cut_short = 0, overdue = 0;
};

class Loads {
  public:
    LoadPointer begin(std::uint32_t first, std::uint32_t stop, RequestState *waiting = nullptr);
    // The next part of a load, up to block `stop`, which counts as in flight from now on.
    LoadPart next_part(const LoadPointer &load, std::uint32_t stop, std::uint32_t offset,
                       std::uint32_t count);
    // Lets parts wait for a plan: for that of the present step, or of loads that no step waits for, or one
    // sent.
    void add(LoadPart part, bool is_ahead = false) {
        (is_ahead ? ahead_ : planned_).push_back(std::move(part));
    }
    void send(std::uint64_t plan, bool is_ahead);
    void send(std::uint64_t plan, LoadPart part) { parts_[plan].push_back(std::move(part)); }

    // Counts which blocks of a plan that every rank has reported have arrived: `copied` has a flag for each.
    void end(std::uint64_t plan, std::span<const std::uint8_t> copied,
             const std::vector<std::string> &errors);
    // Ends the loads that wait for an overdue plan.
    void give_up(std::uint64_t plan);
    // Withdraws a load of which no plan was sent: it never ends. Returns the part that is to leave the plan
    // that is open; the offsets of parts behind it are those after that. None if a plan was sent.
    struct Withdrawn {
        LoadPart part;
        bool is_ahead;
    };
    std::optional<Withdrawn> withdraw(const LoadPointer &load);
    // Plans no other part of a load; blocks that no plan has do not arrive.
    void cut_off(const LoadPointer &load, const std::string &reason);
    // Makes every load fail that has not ended, or whose end was not taken: its blocks are gone.
    void revoke(const std::string &reason);

    // The loads that have ended since the last call, which are counted now; or those whose request waits.
    std::vector<LoadPointer> take_ended(bool only_waited_for = false);
    bool has_ended() const { return !ended_.empty(); }
    // The loads of which other parts will be planned.
    const std::vector<LoadPointer> &open();
    const std::vector<LoadPart> &parts_of(std::uint64_t plan) const;
    const LoadTotals &totals() const { return totals_; }

  private:
    void end_if_over(const LoadPointer &load);

    std::uint64_t last_number_ = 0;
    std::vector<LoadPart> planned_, ahead_;
    std::unordered_map<std::uint64_t, std::vector<LoadPart>> parts_;  // by plan in flight
    std::vector<LoadPointer> open_, ended_;
    LoadTotals totals_;
};

}  // namespace fdcache
