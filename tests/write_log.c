// Preloaded into a process, writes down what it writes to files named *.slab and *.acks, and when it syncs, in order.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;

static char kind_of(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 5) return 0;
    path[length] = 0;
    if (!strcmp(path + length - 5, ".slab")) return 'w';
    if (!strcmp(path + length - 5, ".acks")) return 'a';
    return 0;
}

static void note(char kind, uint64_t offset, const struct iovec *vectors, int count) {
    if (log_fd < 0) log_fd = open(getenv("WRITE_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    uint64_t length = 0;
    for (int i = 0; i < count; ++i) length += vectors[i].iov_len;
    struct { uint64_t kind, offset, length; } head = {(uint64_t)kind, offset, length};
    if (write(log_fd, &head, sizeof head) != sizeof head) abort();
    for (int i = 0; i < count; ++i)
        if (write(log_fd, vectors[i].iov_base, vectors[i].iov_len) != (ssize_t)vectors[i].iov_len) abort();
}

#define REAL(name, type) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)

typedef ssize_t (*pwritev_t)(int, const struct iovec *, int, off64_t);
typedef ssize_t (*pwrite_t)(int, const void *, size_t, off64_t);
typedef int (*sync_t)(int);

static ssize_t log_pwritev(pwritev_t real, int fd, const struct iovec *vectors, int count, off64_t offset) {
    char kind = kind_of(fd);
    if (!kind) return real(fd, vectors, count, offset);
    pthread_mutex_lock(&lock);
    note(kind, (uint64_t)offset, vectors, count);
    ssize_t result = real(fd, vectors, count, offset);
    pthread_mutex_unlock(&lock);
    return result;
}

ssize_t pwritev(int fd, const struct iovec *v, int n, off64_t at) { REAL("pwritev", pwritev_t); return log_pwritev(real, fd, v, n, at); }
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t at) { REAL("pwritev64", pwritev_t); return log_pwritev(real, fd, v, n, at); }

static ssize_t log_pwrite(pwrite_t real, int fd, const void *data, size_t size, off64_t offset) {
    char kind = kind_of(fd);
    if (!kind) return real(fd, data, size, offset);
    struct iovec vector = {(void *)data, size};
    pthread_mutex_lock(&lock);
    note(kind, (uint64_t)offset, &vector, 1);
    ssize_t result = real(fd, data, size, offset);
    pthread_mutex_unlock(&lock);
    return result;
}

ssize_t pwrite(int fd, const void *d, size_t n, off64_t at) { REAL("pwrite", pwrite_t); return log_pwrite(real, fd, d, n, at); }
ssize_t pwrite64(int fd, const void *d, size_t n, off64_t at) { REAL("pwrite64", pwrite_t); return log_pwrite(real, fd, d, n, at); }

static int log_sync(sync_t real, int fd) {
    int result = real(fd);
    if (kind_of(fd) == 'w') {
        pthread_mutex_lock(&lock);
        note('s', 0, NULL, 0);
        pthread_mutex_unlock(&lock);
    }
    return result;
}

int fdatasync(int fd) { REAL("fdatasync", sync_t); return log_sync(real, fd); }
int fsync(int fd) { REAL("fsync", sync_t); return log_sync(real, fd); }
