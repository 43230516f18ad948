// A history of requests on one tier, from any bytes, whose blocks hold tokens instead of KV.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "native/bytes.hpp"
#include "scheduler/block_manager.hpp"
#include "tier/tier.hpp"

namespace fdcache::tests {

// Ends the process if a match finds a block that holds other tokens than the request's, or a block is given
// to a request while another one has it. Several histories with different tenants may share a tier, each in
// its thread.
class RequestHistory {
  public:
    RequestHistory(Bytes bytes, Tier &tier, std::string tenant);
    // Acts until there are no bytes left, then ends all requests.
    void run();

  private:
    struct Job {
        std::unique_ptr<RequestState> state;
        std::size_t computed = 0;  // tokens that have their KV
    };
    using Tokens = std::vector<std::int32_t>;

    void step();
    void arrive();
    void allocate();
    void back_up();
    void load();
    void compute();
    void commit();
    void advance();
    void finish();
    void forget();

    Job *some_job();
    void end(Job &job);
    Tokens tokens_of(const Job &job, std::size_t count) const;
    void append(Job &job, std::size_t count);
    void compute_to(Job &job, std::size_t tokens);
    void check_match(Job &job);
    void end_loads(bool copied);
    void check_given(const Job &job, std::size_t first) const;

    Bytes bytes_;
    Tier &tier_;
    Tier host_{6};
    std::string tenant_;
    BlockManager manager_;
    MatchTerms terms_;
    BlockCopies loads_;      // of the present step
    BlockCopies in_flight_;  // of the plan before it
    std::uint64_t plan_ = 0;
    std::vector<Job> jobs_;
    std::map<std::int32_t, Tokens> held_;  // by slot: the tokens up to the last one in it
    int arrived_ = 0;
};

}  // namespace fdcache::tests
