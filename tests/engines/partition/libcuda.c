/* A stand-in for libcuda with the signatures of cuda.h (13.0): what comes wrongly through ctypes,
 * a pointer that was cut to 32 bits say, fails here. Handles are therefore above 4 GiB. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define BASE 0x700000000000ull
#define SMS 132u
#define GRANULE 8u

typedef struct {
    unsigned type;
    unsigned char internal[92];
    unsigned count, min_part, alignment;
    unsigned char more[36];
} Resource;

int alive = 0; /* references to the primary context, contexts and streams */
static unsigned descriptors[256], contexts[256];
static int num_descriptors = 0, num_contexts = 0, num_streams = 0;

static Resource resource(unsigned count) {
    Resource made = {count ? 1u : 0u, {0}, count, GRANULE, GRANULE, {0}};
    return made;
}

static int in(uint64_t handle, int kind, int number) {
    uint64_t first = BASE + ((uint64_t)kind << 32);
    return handle >= first && handle < first + number;
}

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7; return ordinal ? 101 : 0; }
int cuDeviceGetName(char *name, int length, int device) {
    return device == 7 && snprintf(name, length, "Compiled H200") < length ? 0 : 1;
}
int cuDeviceGetUuid_v2(unsigned char uuid[16], int device) {
    for (int i = 0; i < 16; i++) uuid[i] = i;
    return device == 7 ? 0 : 1;
}
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 16 ? SMS : which == 75 ? 9 : which == 133;
    return device == 7 ? 0 : 1;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)BASE;
    alive++;
    return device == 7 ? 0 : 1;
}
int cuDevicePrimaryCtxRelease_v2(int device) { alive--; return device == 7 ? 0 : 1; }
int cuDeviceGetDevResource(int device, Resource *got, int type) {
    *got = resource(SMS);
    return device == 7 && type == 1 ? 0 : 1;
}
int cuDevSmResourceSplitByCount(Resource *groups, unsigned *number, const Resource *whole,
                                Resource *rest, unsigned flags, unsigned least) {
    if (flags || least != GRANULE || whole->count != SMS) return 1;
    if (*number > SMS / GRANULE) *number = SMS / GRANULE;
    for (unsigned i = 0; i < *number; i++) groups[i] = resource(GRANULE);
    *rest = resource(SMS - *number * GRANULE);
    return 0;
}
int cuDevResourceGenerateDesc(void **descriptor, Resource *parts, unsigned number) {
    unsigned count = 0;
    for (unsigned i = 0; i < number; i++) count += parts[i].count;
    descriptors[num_descriptors] = count;
    *descriptor = (void *)(BASE + (1ull << 32) + num_descriptors++);
    return number && count ? 0 : 1;
}
int cuGreenCtxCreate(void **context, void *descriptor, int device, unsigned flags) {
    uint64_t handle = (uint64_t)descriptor;
    if (!in(handle, 1, num_descriptors) || device != 7 || flags != 1) return 1;
    contexts[num_contexts] = descriptors[handle & 0xff];
    *context = (void *)(BASE + (2ull << 32) + num_contexts++);
    alive++;
    return 0;
}
int cuGreenCtxGetDevResource(void *context, Resource *got, int type) {
    uint64_t handle = (uint64_t)context;
    if (!in(handle, 2, num_contexts) || type != 1) return 1;
    *got = resource(contexts[handle & 0xff]);
    return 0;
}
int cuGreenCtxStreamCreate(void **stream, void *context, unsigned flags, int priority) {
    if (!in((uint64_t)context, 2, num_contexts) || flags != 1 || priority) return 1;
    *stream = (void *)(BASE + (3ull << 32) + num_streams++);
    alive++;
    return 0;
}
int cuStreamSynchronize(void *stream) { return in((uint64_t)stream, 3, num_streams) ? 0 : 709; }
int cuStreamDestroy_v2(void *stream) {
    alive--;
    return in((uint64_t)stream, 3, num_streams) ? 0 : 709;
}
int cuGreenCtxDestroy(void *context) {
    alive--;
    return in((uint64_t)context, 2, num_contexts) ? 0 : 709;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == 101 ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_OTHER";
    return 0;
}
