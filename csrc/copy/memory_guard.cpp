#include "copy/memory_guard.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <mutex>
#include <stdexcept>
#include <system_error>

namespace fdcache {

// A node of a list that only grows, so that the handler can walk it at any time. `nbytes` is 0 while no guard
// uses it.
struct MemoryGuard::Range {
    std::atomic<std::uintptr_t> begin{0};
    std::atomic<std::size_t> nbytes{0};
    std::atomic<bool> has_lost{false};
    Range *next = nullptr;
};

namespace {

std::mutex mutex;  // of everything but the handler's walk
std::atomic<MemoryGuard::Range *> ranges{nullptr};
struct sigaction former{};
bool is_installed = false;

std::size_t page_bytes() {
    static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

bool replace_page(std::uintptr_t address) {
    for (auto *range = ranges.load(std::memory_order_acquire); range; range = range->next) {
        const std::size_t nbytes = range->nbytes.load(std::memory_order_acquire);
        const std::uintptr_t begin = range->begin.load(std::memory_order_relaxed);
        if (address - begin >= nbytes) continue;
        // A mapping of huge pages refuses anything smaller.
        for (const std::size_t page : {page_bytes(), std::size_t{2} << 20, std::size_t{1} << 30}) {
            const std::uintptr_t start = address & ~(page - 1);
            if (start < begin ||
                start + page > begin + (nbytes + page_bytes() - 1) / page_bytes() * page_bytes())
                return false;
            if (mmap(reinterpret_cast<void *>(start), page, PROT_READ | PROT_WRITE,
                     MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
                continue;
            range->has_lost.store(true, std::memory_order_release);
            return true;
        }
    }
    return false;
}

void on_bus_error(int number, siginfo_t *info, void *context) {
    const int saved = errno;
    const bool is_replaced =
        info->si_code == BUS_ADRERR && replace_page(reinterpret_cast<std::uintptr_t>(info->si_addr));
    errno = saved;
    if (is_replaced) return;
    if (former.sa_flags & SA_SIGINFO) {
        former.sa_sigaction(number, info, context);
    } else if (former.sa_handler == SIG_DFL || former.sa_handler == SIG_IGN) {
        std::signal(number, SIG_DFL);  // the access is repeated, and ends the process
    } else {
        former.sa_handler(number);
    }
}

void install() {
    if (is_installed) return;
    struct sigaction action{};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &former) != 0)
        throw std::system_error(errno, std::generic_category(), "a handler of SIGBUS cannot be installed");
    is_installed = true;
}

MemoryGuard::Range *unused_range() {
    for (auto *range = ranges.load(std::memory_order_relaxed); range; range = range->next)
        if (range->nbytes.load(std::memory_order_relaxed) == 0) return range;
    auto *range = new MemoryGuard::Range;
    range->next = ranges.load(std::memory_order_relaxed);
    ranges.store(range, std::memory_order_release);
    return range;
}

}  // namespace

MemoryGuard::MemoryGuard(void *memory, std::size_t nbytes) {
    if (!memory || !nbytes || reinterpret_cast<std::uintptr_t>(memory) % page_bytes())
        throw std::invalid_argument("a guard takes a mapping, which begins at a page");
    std::lock_guard lock(mutex);
    install();
    range_ = unused_range();
    range_->begin.store(reinterpret_cast<std::uintptr_t>(memory), std::memory_order_relaxed);
    range_->has_lost.store(false, std::memory_order_relaxed);
    range_->nbytes.store(nbytes, std::memory_order_release);
}

MemoryGuard::~MemoryGuard() {
    std::lock_guard lock(mutex);
    range_->nbytes.store(0, std::memory_order_release);
}

bool MemoryGuard::has_lost() const {
    return range_->has_lost.load(std::memory_order_acquire);
}

}  // namespace fdcache
