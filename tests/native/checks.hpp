// Checks of test programs, and programs of named cases.
#pragma once

#include <functional>
#include <map>
#include <string>

namespace fdcache::tests {

// Ends the process with a message: a hanging thread cannot be stopped otherwise, and a fuzzer takes it for a
// crash.
[[noreturn]] void fail(const char *message);

// Fails unless the condition holds.
inline void expect(bool holds, const char *otherwise) {
    if (!holds) fail(otherwise);
}
inline void expect(bool holds, const std::string &otherwise) {
    if (!holds) fail(otherwise.c_str());
}

using Cases = std::map<std::string, std::function<void()>>;

// Runs the cases that the arguments name, in this process; without arguments all, each in a process of its
// own. Returns the exit status.
int run_cases(const Cases &cases, int count, char **arguments);

}  // namespace fdcache::tests
