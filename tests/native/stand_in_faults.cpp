#include "native/stand_in_faults.hpp"

#include <atomic>
#include <mutex>
#include <optional>
#include <utility>

#include "cuda/driver.hpp"

namespace fdcache::stand_in {
namespace {

std::mutex mutex;
std::optional<Fault> pending;
int came = 0;
std::atomic<int> lost{cuda::kSuccess};

bool ends_context(int code) {
    return code >= 700 && code < 720;
}

// The error of this call, if it shall fail.
int due(const char *call) {
    const std::lock_guard lock(mutex);
    if (!pending || pending->call != call || pending->after-- > 0) return cuda::kSuccess;
    const int code = pending->code;
    ++came;
    pending->after = pending->every - 1;
    if (pending->every == 0) pending.reset();
    return code;
}

}  // namespace

void fail(Fault fault) {
    const std::lock_guard lock(mutex);
    pending = std::move(fault);
    came = 0;
}

int recover() {
    const std::lock_guard lock(mutex);
    pending.reset();
    lost = cuda::kSuccess;
    return came;
}

int trouble(const char *call) {
    if (is_lost()) return lost;
    const int code = due(call);
    if (ends_context(code)) lose(code);
    return code;
}

void lose(int code) {
    // No caller may see the loss, and free memory, before all streams have stopped touching memory.
    const std::unique_lock exclusive(memory_in_use());
    lost = code;
}

bool is_lost() {
    return lost != cuda::kSuccess;
}

std::shared_mutex &memory_in_use() {
    static auto &shared = *new std::shared_mutex;
    return shared;
}

const char *text_of(int code) {
    return ends_context(code) ? "the stand-in is lost" : "the stand-in was told to fail";
}

}  // namespace fdcache::stand_in
