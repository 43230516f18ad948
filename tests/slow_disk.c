// Preloaded into a process, makes each read and write of a file named *.slab take SLOW_DISK_MS milliseconds longer, or
// as long as the variable says so.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static void wait_for_disk(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 5 || memcmp(path + length - 5, ".slab", 5)) return;
    for (int waited = 0, left; (left = atoi(getenv("SLOW_DISK_MS")) - waited) > 0; waited += 10) {
        usleep(1000 * (left < 10 ? left : 10));
    }
}

typedef ssize_t (*move_t)(int, const struct iovec *, int, off64_t);

#define SLOW(name)                                                     \
    ssize_t name(int fd, const struct iovec *v, int n, off64_t at) {   \
        static move_t real;                                            \
        if (!real) real = (move_t)dlsym(RTLD_NEXT, #name);             \
        wait_for_disk(fd);                                             \
        return real(fd, v, n, at);                                     \
    }

SLOW(preadv)
SLOW(pwritev)
SLOW(preadv64)
SLOW(pwritev64)
