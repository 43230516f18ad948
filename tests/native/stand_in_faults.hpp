// What goes wrong in the driver that stands in, when it is told to.
#pragma once

#include <shared_mutex>
#include <string>

namespace fdcache::stand_in {

inline constexpr int kRefused = 1;
inline constexpr int kLost = 719;

// What an error says of a call that was refused.
inline constexpr auto kRefusal = "CUDA_ERROR_1 (the stand-in was told to fail)";

struct Fault {
    std::string call;
    int after = 0;  // so often the call is made before
    int code = kRefused;
    int every = 0;  // the call fails once more whenever it was made so often again; 0: never
};

// Errors from 700 on end the context: every call has that error from then on.
void fail(Fault fault);
// Ends all trouble; how often the call had failed.
int recover();

// What the call has to answer instead of doing anything; success to go on.
int trouble(const char *call);
// All calls fail from now on, and nothing touches memory any more when this returns.
void lose(int code);
bool is_lost();
// Shared by whoever touches memory.
std::shared_mutex &memory_in_use();

const char *text_of(int code);

}  // namespace fdcache::stand_in
