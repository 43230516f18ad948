// The batches of one stream that have not ended, and the room behind them.
#pragma once

#include <cstddef>
#include <deque>
#include <utility>

#include "bindings.hpp"

namespace fdcache {

// At most `most` bytes, or one batch, are enqueued behind the batch being copied. Batches end in order.
class CopyWindow {
  public:
    explicit CopyWindow(std::size_t most) : most_(most) {}

    // `done`: an event of any device.
    void add(std::size_t nbytes, nb::object done) {
        total_ += nbytes;
        batches_.emplace_back(nbytes, std::move(done));
    }

    bool has_room() {
        if (ahead() >= most_) drop_ended();
        return ahead() < most_;
    }

    void drop_ended() {
        while (!batches_.empty() && nb::cast<bool>(batches_.front().second.attr("query")())) {
            total_ -= batches_.front().first;
            batches_.pop_front();
        }
    }

    // The end of the oldest batch, after which there may be room.
    nb::object next_end() const {
        if (batches_.empty()) throw nb::index_error("no batch is in flight");
        return batches_.front().second;
    }

  private:
    std::size_t ahead() const { return batches_.empty() ? 0 : total_ - batches_.front().first; }

    const std::size_t most_;
    std::size_t total_ = 0;
    std::deque<std::pair<std::size_t, nb::object>> batches_;
};

}  // namespace fdcache
