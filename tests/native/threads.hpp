// Threads that start together.
#pragma once

#include <barrier>
#include <thread>
#include <vector>

namespace fdcache::tests {

// Runs `work(0)` to `work(count - 1)`, each in a thread, and waits for all.
template <typename Work>
void run_threads(int count, Work work) {
    std::barrier start(count);
    std::vector<std::jthread> threads;
    for (int i = 0; i < count; ++i) {
        threads.emplace_back([&start, &work, i] {
            start.arrive_and_wait();
            work(i);
        });
    }
}

}  // namespace fdcache::tests
