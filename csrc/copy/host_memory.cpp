#include "copy/host_memory.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <thread>
#include <vector>

namespace fdcache {
namespace {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

constexpr std::size_t kPopulateStep = std::size_t{32} << 20;

bool touch(std::uint8_t *data, std::size_t nbytes) {
    if (madvise(data, nbytes, MADV_POPULATE_WRITE) == 0) return true;
    if (errno != EINVAL) return false;
    // Kernels before 5.14 do not have this advice.
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    for (std::size_t at = 0; at < nbytes; at += page) *const_cast<volatile std::uint8_t *>(data + at) = 0;
    return true;
}

}  // namespace

HostMemory::HostMemory(std::size_t nbytes) : data_(nullptr), size_(nbytes) {
    void *mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::uint8_t *>(mapped);
    madvise(data_, size_, MADV_HUGEPAGE);
}

HostMemory::~HostMemory() {
    munmap(data_, size_);
}

void HostMemory::prefer_node(unsigned node) {
    constexpr int kPreferred = 1;
    constexpr unsigned kBits = 8 * sizeof(unsigned long);
    std::vector<unsigned long> mask(node / kBits + 1, 0);
    mask[node / kBits] = 1UL << (node % kBits);
    // Binds this memory only, no thread. A refusal costs speed, nothing else.
    syscall(SYS_mbind, data_, size_, kPreferred, mask.data(), mask.size() * kBits + 1, 0);
}

void HostMemory::populate(unsigned threads) {
    std::atomic<std::size_t> next{0};
    std::atomic<bool> failed{false};
    auto work = [&] {
        for (std::size_t at; !failed && (at = next.fetch_add(kPopulateStep)) < size_;) {
            if (!touch(data_ + at, std::min(kPopulateStep, size_ - at))) failed = true;
        }
    };
    std::vector<std::jthread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(work);
    work();
    others.clear();
    if (failed) throw std::bad_alloc();
}

void map_pages(std::uint8_t *data, std::size_t nbytes) {
    // In steps, since the kernel keeps others from mapping memory meanwhile.
    constexpr std::size_t kStep = std::size_t{4} << 20;
    for (std::size_t at = 0; at < nbytes; at += kStep) {
        if (madvise(data + at, std::min(kStep, nbytes - at), MADV_POPULATE_WRITE) != 0) return;
    }
}

}  // namespace fdcache
