#include "native/checks.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace fdcache::tests {
namespace {

// In a process of its own: a failure ends only this case, and leaks are looked for at its end.
bool passes_in_a_child(const std::function<void()> &run) {
    const pid_t child = fork();
    expect(child >= 0, "no process for a case");
    if (child == 0) {
        run();
        std::exit(EXIT_SUCCESS);
    }
    int status = 0;
    expect(waitpid(child, &status, 0) == child, "a case was lost");
    return WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS;
}

}  // namespace

void fail(const char *message) {
    std::fprintf(stderr, "%s\n", message);
    std::abort();
}

int run_cases(const Cases &cases, int count, char **arguments) {
    if (count > 1) {
        for (int i = 1; i < count; ++i) {
            const auto found = cases.find(arguments[i]);
            expect(found != cases.end(), std::string("there is no case ") + arguments[i]);
            found->second();
        }
        return EXIT_SUCCESS;
    }
    int failed = 0;
    for (const auto &[name, run] : cases) {
        const bool passed = passes_in_a_child(run);
        failed += !passed;
        std::fprintf(stderr, "%s %s\n", passed ? "passed" : "FAILED", name.c_str());
    }
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

}  // namespace fdcache::tests
