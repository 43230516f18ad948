// The streams of one direction and purpose on a GPU, with their staging ring.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "cuda/context.hpp"

namespace fdcache::cuda {

// Kernels run on `main` and the copy engine on `copy`, so that one ring slot fills while another drains.
// Other streams synchronise with `main` only. The caller owns the streams and the ring.
class Lane : public std::enable_shared_from_this<Lane> {
  public:
    Lane(std::shared_ptr<Context> context, StreamHandle main, StreamHandle copy, Address staging,
         std::size_t slot_bytes, unsigned slots);
    Lane(const Lane &) = delete;
    Lane &operator=(const Lane &) = delete;

    StreamHandle main() const { return main_; }
    StreamHandle copy() const { return copy_; }
    std::size_t slot_bytes() const { return slot_bytes_; }

    // Returns the next slot of the ring and makes `user` wait until it is free.
    Address take_slot(StreamHandle user);
    // Frees the slot taken last, once `user` has finished its work so far.
    void free_slot(StreamHandle user);
    // Makes `to` wait for the work given to `from` so far.
    void hand_over(StreamHandle from, StreamHandle to);
    // Makes `main` wait for the work given to `copy` so far. If the driver refuses, the thread waits.
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
