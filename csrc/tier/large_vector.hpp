// Vectors with an element per slot of a tier.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <limits>
#include <new>
#include <vector>

namespace fdcache {

// Aligns to cache lines. Asks for huge pages where an array fills several: a large tier is read at random
// places, and would miss the TLB at nearly each of them.
template <typename T>
struct LargeAllocator {
    using value_type = T;

    LargeAllocator() = default;
    template <typename Other>
    LargeAllocator(const LargeAllocator<Other> &) {}

    T *allocate(std::size_t count) {
        if (count > std::numeric_limits<std::size_t>::max() / sizeof(T)) throw std::bad_array_new_length();
        const std::size_t bytes = count * sizeof(T);
        void *const memory = ::operator new(bytes, alignment(count));
#ifdef MADV_HUGEPAGE
        // Advice: where it is refused, the pages are small ones.
        if (is_large(count)) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
        return static_cast<T *>(memory);
    }

    void deallocate(T *memory, std::size_t count) { ::operator delete(memory, alignment(count)); }

    friend bool operator==(const LargeAllocator &, const LargeAllocator &) { return true; }

  private:
    static constexpr std::size_t kCacheLine = 64;
    static constexpr std::size_t kHugePage = std::size_t{2} << 20;

    static bool is_large(std::size_t count) { return count * sizeof(T) >= 2 * kHugePage; }
    static std::align_val_t alignment(std::size_t count) {
        return std::align_val_t{is_large(count) ? kHugePage : kCacheLine};
    }
};

template <typename T>
using LargeVector = std::vector<T, LargeAllocator<T>>;

}  // namespace fdcache
