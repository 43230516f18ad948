#include "copy/copy_stream.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <stdexcept>
#include <utility>

namespace fdcache {
namespace {

constexpr int kBackgroundNice = 10;

}  // namespace

CopyStream::CopyStream(unsigned threads, bool background)
    : threads_(threads, [background](Queue &queue) { queue.serve(background); }) {}

CopyStream::~CopyStream() {
    close();
}

void CopyStream::copy(std::shared_ptr<BlockCopy> copy, PlaneRange range) {
    threads_->push(
        {{.kind = Operation::Kind::kCopy, .event = nullptr, .copy = std::move(copy), .range = range}});
}

std::vector<std::shared_ptr<Event>> CopyStream::copy_groups(const std::shared_ptr<BlockCopy> &copy,
                                                            std::span<const PlaneRange> ranges) {
    std::vector<Operation> operations;
    std::vector<std::shared_ptr<Event>> events;
    for (const PlaneRange range : ranges) {
        operations.push_back(
            {.kind = Operation::Kind::kCopy, .event = nullptr, .copy = copy, .range = range});
        // An event recorded behind the last range would come after the end that a report waits for.
        if (range.last == copy->num_planes()) {
            events.push_back(copy->done());
            continue;
        }
        events.push_back(std::make_shared<Event>());
        operations.push_back({.kind = Operation::Kind::kRecord, .event = events.back(), .copy = nullptr});
    }
    threads_->push(std::move(operations));
    return events;
}

void CopyStream::record(std::shared_ptr<Event> event) {
    threads_->push({{.kind = Operation::Kind::kRecord, .event = std::move(event), .copy = nullptr}});
}

void CopyStream::wait(std::shared_ptr<Event> event) {
    threads_->push({{.kind = Operation::Kind::kWait, .event = event, .copy = nullptr}});
    event->watch(threads_.queue());
}

void CopyStream::close() {
    if (threads_.close()) threads_->discard();
}

void CopyStream::Queue::event_set() {
    const std::lock_guard lock(mutex);
    changed.notify_all();
}

void CopyStream::Queue::push(std::vector<Operation> more) {
    const std::lock_guard lock(mutex);
    if (closing) throw std::runtime_error("the copy stream is closed");
    // Behind another operation there is no work for a thread yet.
    const bool was_idle = operations.empty();
    for (Operation &each : more) operations.push_back(std::move(each));
    if (was_idle) changed.notify_all();
}

void CopyStream::Queue::serve(bool background) {
    if (background) setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kBackgroundNice);
    std::unique_lock lock(mutex);
    while (true) {
        changed.wait(lock, [this] { return closing || is_runnable(); });
        if (closing) return;
        step(lock);
    }
}

// True if the first operation has work for one more thread.
bool CopyStream::Queue::is_runnable() const {
    if (operations.empty()) return false;
    const Operation &first = operations.front();
    switch (first.kind) {
        case Operation::Kind::kRecord:
            return true;
        case Operation::Kind::kWait:
            return first.event->is_set();
        case Operation::Kind::kCopy:
            return !first.begun || first.next_block < first.copy->num_blocks();
    }
    return false;
}

void CopyStream::Queue::step(std::unique_lock<std::mutex> &lock) {
    Operation &first = operations.front();
    if (first.kind == Operation::Kind::kCopy) {
        copy_blocks(lock);
        return;
    }
    const Operation taken = std::move(first);
    operations.pop_front();
    changed.notify_all();
    if (taken.kind == Operation::Kind::kRecord) {
        lock.unlock();
        taken.event->set();
        lock.lock();
    }
}

void CopyStream::Queue::copy_blocks(std::unique_lock<std::mutex> &lock) {
    Operation &operation = operations.front();
    if (!operation.begun) {
        operation.begun = true;
        if (!operation.copy->begin()) {
            operations.pop_front();
            changed.notify_all();
            return;
        }
    }
    const std::shared_ptr<BlockCopy> copy = operation.copy;
    const PlaneRange range = operation.range;
    ++operation.active;
    while (operation.next_block < copy->num_blocks() && !closing) {
        const std::size_t index = operation.next_block++;
        lock.unlock();
        copy->copy_block(index, range);
        lock.lock();
    }
    --operation.active;
    if (operation.active == 0 && operation.next_block == copy->num_blocks()) {
        // End the range before it leaves the queue: later operations must not start earlier.
        lock.unlock();
        copy->end(range);
        lock.lock();
        operations.pop_front();
        changed.notify_all();
    }
}

void CopyStream::Queue::discard() {
    std::deque<Operation> left;
    {
        const std::lock_guard lock(mutex);
        left.swap(operations);
    }
    for (auto &operation : left) {
        if (operation.kind == Operation::Kind::kCopy) operation.copy->abandon();
        if (operation.kind == Operation::Kind::kRecord) operation.event->set();
    }
}

}  // namespace fdcache
