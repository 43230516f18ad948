// Bytes of a fuzzer as choices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fdcache::tests {

// After the last byte every choice is the first one.
class Bytes {
  public:
    explicit Bytes(std::span<const std::uint8_t> left) : left_(left) {}

    bool empty() const { return left_.empty(); }
    std::uint8_t next() {
        if (left_.empty()) return 0;
        const std::uint8_t byte = left_.front();
        left_ = left_.subspan(1);
        return byte;
    }
    // One of `count` choices.
    std::uint32_t below(std::size_t count) {
        return count > 1 ? next() % static_cast<std::uint32_t>(count) : 0;
    }
    bool one_in(std::size_t count) { return below(count) == count - 1; }
    template <typename Values>
    auto pick(const Values &values) {
        return *(std::begin(values) + below(std::size(values)));
    }

  private:
    std::span<const std::uint8_t> left_;
};

}  // namespace fdcache::tests
