// Which requests' paths have gone on elsewhere since.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>

namespace fdcache {

// A block names the request that used it last. Once a later request has taken over a part of that one's path
// and gone on differently, the blocks that still name it are what was left behind: one bit a request says so
// of all of them. The bits of the last 65,536 requests are kept; older blocks count as not left.
class LeftPaths {
  public:
    // The number of another request; 0 is none.
    std::uint32_t next() {
        if (++last_ == 0) ++last_;
        left_.reset(last_ % kRequests);
        return last_;
    }
    // Blocks that still have this number have been left behind.
    void leave(std::uint32_t request) {
        if (is_recent(request)) left_.set(request % kRequests);
    }
    bool holds(std::uint32_t request) const { return is_recent(request) && left_.test(request % kRequests); }

  private:
    static constexpr std::size_t kRequests = std::size_t{1} << 16;

    bool is_recent(std::uint32_t request) const { return request && last_ - request < kRequests; }

    std::bitset<kRequests> left_;
    std::uint32_t last_ = 0;
};

}  // namespace fdcache
