// Preloaded into a process, fails reads and writes of bytes of files named *.slab with EIO, as bad sectors do.
// The file FAILING_DISK names them, a line each: "r FIRST LAST" or "w FIRST LAST"; it is read at each request.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(char way, int fd, const struct iovec *v, int n, off64_t at) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 5 || memcmp(path + length - 5, ".slab", 5)) return 0;
    off64_t end = at;
    for (int i = 0; i < n; ++i) end += (off64_t)v[i].iov_len;
    FILE *list = fopen(getenv("FAILING_DISK"), "r");
    if (!list) return 0;
    char each;
    long long first, last;
    int found = 0;
    while (!found && fscanf(list, " %c %lld %lld", &each, &first, &last) == 3)
        found = each == way && at <= last && first < end;
    fclose(list);
    return found;
}

typedef ssize_t (*move_t)(int, const struct iovec *, int, off64_t);

#define FAILING(name, way)                                             \
    ssize_t name(int fd, const struct iovec *v, int n, off64_t at) {   \
        static move_t real;                                            \
        if (!real) real = (move_t)dlsym(RTLD_NEXT, #name);             \
        if (fails(way, fd, v, n, at)) {                                \
            errno = EIO;                                               \
            return -1;                                                 \
        }                                                              \
        return real(fd, v, n, at);                                     \
    }

FAILING(preadv, 'r')
FAILING(pwritev, 'w')
FAILING(preadv64, 'r')
FAILING(pwritev64, 'w')
