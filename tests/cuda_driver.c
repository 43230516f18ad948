// A driver of one GPU whose memory is the host's: every call is carried out before it returns. It counts what is
// taken and given back, and fails when told to, for good if the error is one of those that end a context.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Address;

enum { kSuccess = 0, kInvalidValue = 1, kNotFound = 500, kNotReady = 600, kMost = 4096 };

// --- faults ---------------------------------------------------------------------------------------------

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char failing[64];
static int skipped, again, failure, lost, came;

static int ends_context(int code) { return code >= 700 && code < 720; }

// What the call has to answer instead of doing anything; 0 to go on.
static int trouble(const char *call) {
    pthread_mutex_lock(&mutex);
    if (lost == 0 && failure != 0 && strcmp(call, failing) == 0 && skipped-- <= 0) {
        int code = failure;
        ++came;
        skipped = again - 1;
        if (again == 0) failure = 0;
        if (ends_context(code)) lost = code;
        pthread_mutex_unlock(&mutex);
        return code;
    }
    int code = lost;
    pthread_mutex_unlock(&mutex);
    return code;
}

// The next call of that name but `after` fails with `code`, and so does every `every`th after it unless that is 0.
void stand_in_fail(const char *call, int after, int code, int every) {
    snprintf(failing, sizeof failing, "%s", call);
    skipped = after;
    again = every;
    failure = code;
    came = 0;
}

// Ends all trouble; how often there was any.
int stand_in_recover(void) {
    failure = lost = 0;
    return came;
}

// --- what is taken and given back -----------------------------------------------------------------------

struct Held {
    const void *each[kMost];
    int count, unknown;
};
static struct Held events, registered;
static int contexts, pushed;

static void take(struct Held *held, const void *what) {
    pthread_mutex_lock(&mutex);
    if (held->count == kMost) abort();
    held->each[held->count++] = what;
    pthread_mutex_unlock(&mutex);
}

static int give(struct Held *held, const void *what) {
    pthread_mutex_lock(&mutex);
    int found = 0;
    for (int i = 0; i < held->count && !found; ++i) {
        if (held->each[i] != what) continue;
        held->each[i] = held->each[--held->count];
        found = 1;
    }
    held->unknown += !found;
    pthread_mutex_unlock(&mutex);
    return found;
}

// Held now, and given back without being held.
int stand_in_events(void) { return events.count; }
int stand_in_registered(void) { return registered.count; }
int stand_in_contexts(void) { return contexts; }
int stand_in_pushed(void) { return pushed; }
int stand_in_unknown(void) { return events.unknown + registered.unknown; }

// --- the driver -----------------------------------------------------------------------------------------

int cuInit(unsigned flags) { return flags; }

int cuGetErrorName(int code, const char **name) {
    static _Thread_local char text[32];
    snprintf(text, sizeof text, "CUDA_ERROR_%d", code);
    *name = text;
    return kSuccess;
}

int cuGetErrorString(int code, const char **text) {
    *text = ends_context(code) ? "the stand-in is lost" : "the stand-in was told to fail";
    return kSuccess;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? kSuccess : kInvalidValue;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0xAB, 16);
    return device;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &contexts;
    ++contexts;
    return device;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    --contexts;
    return device;
}

int cuCtxPushCurrent_v2(void *context) {
    __atomic_add_fetch(&pushed, 1, __ATOMIC_SEQ_CST);
    return context == &contexts ? kSuccess : kInvalidValue;
}

int cuCtxPopCurrent_v2(void **context) {
    *context = &contexts;
    __atomic_sub_fetch(&pushed, 1, __ATOMIC_SEQ_CST);
    return kSuccess;
}

int cuMemHostRegister_v2(void *data, size_t nbytes, unsigned flags) {
    (void)nbytes, (void)flags;
    int code = trouble("cuMemHostRegister");
    if (code == kSuccess) take(&registered, data);
    return code;
}

int cuMemHostUnregister(void *data) {
    int found = give(&registered, data);
    return lost != 0 ? lost : found ? kSuccess : kInvalidValue;
}

int cuMemHostGetDevicePointer_v2(Address *address, void *data, unsigned flags) {
    *address = (Address)data;
    return (int)flags;
}

int cuMemcpyAsync(Address to, Address from, size_t nbytes, void *stream) {
    (void)stream;
    int code = trouble("cuMemcpyAsync");
    if (code == kSuccess) memcpy((void *)to, (const void *)from, nbytes);
    return code;
}

static int copy_batch(const Address *to, const Address *from, const size_t *sizes, size_t count, void *attributes,
                      size_t *first, size_t num_attributes, void *stream) {
    (void)attributes, (void)first, (void)num_attributes, (void)stream;
    int code = trouble("cuMemcpyBatchAsync");
    for (size_t i = 0; code == kSuccess && i < count; ++i) {
        memcpy((void *)to[i], (const void *)from[i], sizes[i]);
    }
    return code;
}

int cuGetProcAddress_v2(const char *name, void **entry, int version, unsigned long long flags, int *status) {
    (void)version, (void)flags, (void)status;
    if (strcmp(name, "cuMemcpyBatchAsync") != 0) return kNotFound;
    *entry = (void *)copy_batch;
    return kSuccess;
}

struct Side {
    size_t x, y;
    unsigned type;
    void *host;
    Address device;
    void *array;
    size_t pitch;
};

struct Copy2D {
    struct Side from, to;
    size_t width, height;
};

int cuMemcpy2DAsync_v2(const struct Copy2D *copy, void *stream) {
    (void)stream;
    int code = trouble("cuMemcpy2DAsync");
    const char *from = copy->from.type == 1 ? copy->from.host : (const char *)copy->from.device;
    char *to = copy->to.type == 1 ? copy->to.host : (char *)copy->to.device;
    for (size_t row = 0; code == kSuccess && row < copy->height; ++row) {
        memcpy(to + row * copy->to.pitch, from + row * copy->from.pitch, copy->width);
    }
    return code;
}

int cuEventCreate(void **event, unsigned flags) {
    int code = trouble("cuEventCreate");
    if (code != kSuccess) return code;
    *event = malloc(sizeof flags);
    take(&events, *event);
    return kSuccess;
}

int cuEventDestroy_v2(void *event) {
    if (!give(&events, event)) return kInvalidValue;
    free(event);
    return kSuccess;
}

int cuEventRecord(void *event, void *stream) {
    (void)event, (void)stream;
    return trouble("cuEventRecord");
}

int cuEventQuery(void *event) {
    (void)event;
    return trouble("cuEventQuery");
}

int cuEventElapsedTime(float *milliseconds, void *begin, void *end) {
    (void)begin, (void)end;
    *milliseconds = 1;
    return trouble("cuEventElapsedTime");
}

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    return trouble("cuStreamWaitEvent");
}

int cuStreamSynchronize(void *stream) {
    (void)stream;
    return trouble("cuStreamSynchronize");
}

// The stream that is another GPU's.
static void *foreign;
void stand_in_disown(void *stream) { foreign = stream; }

int cuStreamGetCtx(void *stream, void **context) {
    *context = stream == foreign ? NULL : &contexts;
    return trouble("cuStreamGetCtx");
}

// The stream that is being captured into a graph.
static void *captured;
void stand_in_capture(void *stream) { captured = stream; }

int cuStreamIsCapturing(void *stream, int *status) {
    *status = stream != NULL && stream == captured;
    return kSuccess;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    static _Thread_local int current;
    int former = current;
    current = *mode;
    *mode = former;
    return kSuccess;
}

// --- the kernels, as csrc/swap has them -----------------------------------------------------------------

struct Chunk {
    Address base;
    long long stride;
    Address offset;
    unsigned nbytes, padding;
};

struct Block {
    Address record, sum;
    long long slot;
};

struct Target {
    Address staging, pitch, offset;
};

struct Range {
    unsigned first_block, num_blocks, first_chunk, num_chunks;
};

static Address mix(Address word) {
    word ^= word >> 32;
    word *= 0xD6E8FEB86659FD93ULL;
    word ^= word >> 29;
    word *= 0xFF51AFD7ED558CCDULL;
    return word ^ word >> 32;
}

static Address sum_of(const unsigned char *data, unsigned nbytes, Address position) {
    Address sum = 0;
    for (unsigned at = 0; at < nbytes; at += 8, ++position) {
        Address word = 0;
        memcpy(&word, data + at, nbytes - at < 8 ? nbytes - at : 8);
        sum += mix(word + 0x9E3779B97F4A7C15ULL * (position + 1));
    }
    return sum;
}

// The functions that tests/cuda_stand_in.py hands out.
enum { kCopyIn = 1, kCopyOut, kSum, kCopyWords };

static void move(uintptr_t kernel, const struct Chunk *chunks, struct Block *blocks, struct Range range,
                 struct Target target) {
    for (unsigned row = 0; row < range.num_blocks; ++row) {
        struct Block *block = blocks + range.first_block + row;
        for (unsigned i = 0; i < range.num_chunks; ++i) {
            const struct Chunk *chunk = chunks + range.first_chunk + i;
            unsigned char *plane = (unsigned char *)(chunk->base + (Address)(chunk->stride * block->slot));
            Address start = target.staging == 0 ? block->record : target.staging + row * target.pitch;
            unsigned char *record = (unsigned char *)(start + chunk->offset - target.offset);
            if (kernel == kCopyIn) {
                memcpy(plane, record, chunk->nbytes);
                continue;
            }
            block->sum += sum_of(plane, chunk->nbytes, chunk->offset / 8);
            if (kernel == kSum) continue;
            memcpy(record, plane, chunk->nbytes);
            if (target.staging != 0) memset(record + chunk->nbytes, 0, chunk->padding);
        }
    }
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,
                   void **extra) {
    (void)grid_y, (void)grid_z, (void)block_y, (void)block_z, (void)shared, (void)stream, (void)extra;
    int code = trouble("cuLaunchKernel");
    if (code != kSuccess) return code;
    if (grid_x == 0 || block_x == 0) return kInvalidValue;
    uintptr_t kernel = (uintptr_t)function;
    if (kernel == kCopyWords) {
        memcpy(*(void **)arguments[1], *(void **)arguments[0], 8 * (size_t) * (unsigned *)arguments[2]);
    } else {
        move(kernel, *(const struct Chunk **)arguments[0], *(struct Block **)arguments[1],
             *(struct Range *)arguments[2], *(struct Target *)arguments[3]);
    }
    return kSuccess;
}
