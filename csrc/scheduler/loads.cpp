#include "scheduler/loads.hpp"

#include <algorithm>

namespace fdcache {
namespace {

const std::vector<LoadPart> kNoParts;

void cut(Load &load, const std::string &reason) {
    if (!load.is_open()) return;
    load.is_cut = true;
    load.whole = std::min(load.whole, load.planned);
    load.errors.push_back(reason);
}

}  // namespace

LoadPointer Loads::begin(std::uint32_t first, std::uint32_t stop, RequestState *waiting) {
    auto load = std::make_shared<Load>(Load{++last_number_, first, stop, first, stop});
    load->waiting = waiting;
    return load;
}

LoadPart Loads::next_part(const LoadPointer &load, std::uint32_t stop, std::uint32_t offset,
                          std::uint32_t count) {
    const std::uint32_t first = std::exchange(load->planned, stop);
    ++load->in_flight;
    if (first == load->first && load->is_open()) open_.push_back(load);
    return {load, first, stop, offset, count};
}

void Loads::send(std::uint64_t plan, bool is_ahead) {
    auto &parts = is_ahead ? ahead_ : planned_;
    if (parts.empty()) return;
    for (const LoadPart &part : parts)
        if (part.first == part.load->first) part.load->plan = plan;
    parts_.insert_or_assign(plan, std::exchange(parts, {}));
}

void Loads::end(std::uint64_t plan, std::span<const std::uint8_t> copied,
                const std::vector<std::string> &errors) {
    const auto found = parts_.extract(plan);
    if (!found) return;
    for (const LoadPart &part : found.mapped()) {
        Load &load = *part.load;
        --load.in_flight;
        const auto flags = copied.subspan(part.offset, part.count);
        const auto missing = static_cast<std::uint32_t>(std::ranges::find(flags, 0) - flags.begin());
        if (missing < part.count) {
            const bool copies_all = part.count == part.stop - part.first;
            load.whole = std::min(load.whole, copies_all ? part.first + missing : load.first);
            load.errors.insert(load.errors.end(), errors.begin(), errors.end());
            cut(load, "an earlier part was not loaded");
        }
        end_if_over(part.load);
    }
}

void Loads::give_up(std::uint64_t plan) {
    for (const LoadPart &part : parts_of(plan)) {
        Load &load = *part.load;
        if (load.status != LoadStatus::kOpen) continue;
        cut(load, "no report within the plan's deadline");
        if (load.errors.empty()) load.errors.emplace_back("no report within the plan's deadline");
        load.status = LoadStatus::kOverdue;
        ended_.push_back(part.load);
    }
}

std::optional<Loads::Withdrawn> Loads::withdraw(const LoadPointer &load) {
    for (auto *const parts : {&planned_, &ahead_}) {
        const auto found = std::ranges::find(*parts, load, &LoadPart::load);
        if (found == parts->end() || found->first != load->first) continue;
        const LoadPart part = *found;
        for (auto behind = parts->erase(found); behind != parts->end(); ++behind)
            behind->offset -= part.count;
        load->is_cut = true;
        return Withdrawn{part, parts == &ahead_};
    }
    return std::nullopt;
}

void Loads::cut_off(const LoadPointer &load, const std::string &reason) {
    cut(*load, reason);
    end_if_over(load);
}

void Loads::revoke(const std::string &reason) {
    std::vector<LoadPointer> loads(open());
    loads.insert(loads.end(), ended_.begin(), ended_.end());
    const auto add = [&](const std::vector<LoadPart> &parts) {
        for (const LoadPart &part : parts) loads.push_back(part.load);
    };
    add(planned_);
    add(ahead_);
    for (const auto &[plan, parts] : parts_) add(parts);
    const auto number = [](const LoadPointer &load) { return load->number; };
    std::ranges::sort(loads, {}, number);
    const auto repeated = std::ranges::unique(loads, {}, number);
    loads.erase(repeated.begin(), repeated.end());
    for (const LoadPointer &each : loads) {
        each->is_cut = each->is_revoked = true;
        each->whole = each->first;
        each->errors.push_back(reason);
        if (each->status == LoadStatus::kConfirmed) each->status = LoadStatus::kFailed;
        end_if_over(each);
    }
}

const std::vector<LoadPointer> &Loads::open() {
    std::erase_if(open_, [](const LoadPointer &load) { return !load->is_open(); });
    return open_;
}

const std::vector<LoadPart> &Loads::parts_of(std::uint64_t plan) const {
    const auto found = parts_.find(plan);
    return found == parts_.end() ? kNoParts : found->second;
}

void Loads::end_if_over(const LoadPointer &load) {
    if (load->status != LoadStatus::kOpen || load->is_open() || load->in_flight) return;
    load->status = load->whole == load->stop ? LoadStatus::kConfirmed : LoadStatus::kFailed;
    ended_.push_back(load);
}

std::vector<LoadPointer> Loads::take_ended(bool only_waited_for) {
    std::vector<LoadPointer> ended = std::exchange(ended_, {});
    if (only_waited_for) std::erase_if(ended, [](const LoadPointer &load) { return !load->waiting; });
    for (const LoadPointer &load : ended) {
        const bool is_short = load->is_cut && load->whole == load->planned;
        ++(load->status == LoadStatus::kConfirmed ? totals_.confirmed
           : load->status == LoadStatus::kOverdue ? totals_.overdue
           : is_short                             ? totals_.cut_short
                                                  : totals_.failed);
    }
    return ended;
}

}  // namespace fdcache
