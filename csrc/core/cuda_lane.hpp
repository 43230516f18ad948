// The streams of one direction and purpose on a GPU, with the ring through which they stage.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/cuda_context.hpp"

namespace fdcache::cuda {

// Kernels run on `main`, the copy engine on `copy`, so that one ring slot is filled while another is emptied.
// `main` stands for both towards other streams. The streams and the ring belong to the caller.
class Lane : public std::enable_shared_from_this<Lane> {
  public:
    Lane(std::shared_ptr<Context> context, StreamHandle main, StreamHandle copy, Address staging,
         std::size_t slot_bytes, unsigned slots);
    Lane(const Lane &) = delete;
    Lane &operator=(const Lane &) = delete;

    StreamHandle main() const { return main_; }
    StreamHandle copy() const { return copy_; }
    std::size_t slot_bytes() const { return slot_bytes_; }

    // The next slot of the ring; `user` waits until it is free.
    Address take_slot(StreamHandle user);
    // The slot taken last is free once `user` has done what it has been given so far.
    void free_slot(StreamHandle user);
    // Lets `to` wait for what `from` has been given so far.
    void hand_over(StreamHandle from, StreamHandle to);
    // Lets `main` wait for what `copy` has been given so far; where the driver refuses that, the thread
    // waits.
    void join_copies();

  private:
    struct Slot {
        std::unique_ptr<PooledEvent> freed;
        bool used = false;
    };

    std::shared_ptr<Context> context_;
    StreamHandle main_;
    StreamHandle copy_;
    Address staging_;
    std::size_t slot_bytes_;
    std::vector<Slot> slots_;
    std::size_t next_ = 0;
    PooledEvent handed_over_;
};

}  // namespace fdcache::cuda
