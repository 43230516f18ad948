// Memory of large arrays that were freed, kept for the next ones.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace fdcache {

// The system allocator returns large arrays to the system at once. The next one then costs a page fault for
// each 4 KiB, which takes longer than to hash the tokens in it.
class SpareMemory {
  public:
    static constexpr std::size_t kLeast = std::size_t{128} << 10;  // smaller ones the system allocator keeps

    // Lives until the process ends, as any array may be freed at its very end.
    static SpareMemory &shared() {
        static SpareMemory *const memory = new SpareMemory;
        return *memory;
    }

    void *take(std::size_t bytes) {
        bytes = rounded(bytes);
        {
            std::lock_guard lock(mutex_);
            for (std::size_t i = spares_.size(); i-- > 0;)
                if (spares_[i].bytes == bytes) return remove(i);
        }
        return ::operator new(bytes);
    }

    void give(void *memory, std::size_t bytes) noexcept {
        bytes = rounded(bytes);
        std::lock_guard lock(mutex_);
        while (!spares_.empty() && (spares_.size() == kMost || total_ + bytes > kMostBytes))
            ::operator delete(remove(0));
        if (bytes > kMostBytes) return ::operator delete(memory);
        spares_.push_back({memory, bytes});  // within what is reserved
        total_ += bytes;
    }

  private:
    static constexpr std::size_t kMost = 64;
    static constexpr std::size_t kMostBytes = std::size_t{8} << 20;

    struct Spare {
        void *memory;
        std::size_t bytes;
    };

    SpareMemory() { spares_.reserve(kMost); }

    // Requests of nearly the same length get arrays of one size.
    static std::size_t rounded(std::size_t bytes) {
        const std::size_t step = std::bit_floor(bytes) / 8;
        return (bytes + step - 1) / step * step;
    }

    void *remove(std::size_t index) {
        const Spare spare = spares_[index];
        spares_.erase(spares_.begin() + static_cast<std::ptrdiff_t>(index));
        total_ -= spare.bytes;
        return spare.memory;
    }

    std::mutex mutex_;
    std::vector<Spare> spares_;  // oldest first
    std::size_t total_ = 0;
};

template <typename T>
struct SpareAllocator {
    using value_type = T;

    SpareAllocator() = default;
    template <typename Other>
    SpareAllocator(const SpareAllocator<Other> &) {}

    T *allocate(std::size_t count) {
        if (count < SpareMemory::kLeast / sizeof(T) || count > SIZE_MAX / sizeof(T) / 2)
            return std::allocator<T>().allocate(count);
        return static_cast<T *>(SpareMemory::shared().take(count * sizeof(T)));
    }

    void deallocate(T *memory, std::size_t count) {
        if (count < SpareMemory::kLeast / sizeof(T)) return std::allocator<T>().deallocate(memory, count);
        SpareMemory::shared().give(memory, count * sizeof(T));
    }

    friend bool operator==(const SpareAllocator &, const SpareAllocator &) { return true; }
};

}  // namespace fdcache
