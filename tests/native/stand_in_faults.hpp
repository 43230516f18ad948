// Faults that tests inject into the stand-in driver.
#pragma once

#include <shared_mutex>
#include <string>

namespace fdcache::stand_in {

inline constexpr int kRefused = 1;
inline constexpr int kLost = 719;

// The text of the error of a refused call.
inline constexpr auto kRefusal = "CUDA_ERROR_1 (the stand-in was told to fail)";

struct Fault {
    std::string call;
    int after = 0;  // calls that succeed first
    int code = kRefused;
    int every = 0;  // fails again after this many calls; 0: never
};

// Errors from 700 on lose the context: every later call has that error.
void fail(Fault fault);
// Removes all faults; returns how often the call failed.
int recover();

// The error that the call returns without doing anything, or success.
int trouble(const char *call);
// Makes all calls fail from now on. Once it returns, no stream touches memory.
void lose(int code);
bool is_lost();
// Locked in shared mode while memory is touched.
std::shared_mutex &memory_in_use();

const char *text_of(int code);

}  // namespace fdcache::stand_in
