// A libamdhip64 without a GPU, for tests/hip: memory is the host's, everything runs at once, every kernel there may
// be adds one to the number that its argument points to. The environment says what is wrong with it:
//
//   FAKE_HIP_VERSION       what hipRuntimeGetVersion gives
//   FAKE_HIP_ARCH          gcnArchName
//   FAKE_HIP_REFUSE        the code that hipModuleLoadData fails with
//   FAKE_HIP_INVALIDATE    how many captures are invalidated, in their second launch
//   FAKE_HIP_DROP          which kernel of a capture its graph lacks, counted from 1
//   FAKE_HIP_DEVICES       how many there are: one without it
//   FAKE_HIP_LINK          the type and the hops of their links, which without it are not known
//
// With R0600 defined it has the device properties of ROCm 6 and 7, else only those of ROCm 5. MULTIPROCESSORS tells one
// library from another.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, ILLEGAL_STATE = 401, NOT_FOUND = 500, INVALIDATED = 901 };
enum { MOST_NODES = 64 };
#ifndef MULTIPROCESSORS
#define MULTIPROCESSORS 104
#endif

typedef struct {
    int nodes;
    int *adds_to[MOST_NODES];
} Graph;

typedef struct {
    Graph *captured; // NULL: not captured
    int launches;    // since the capture began
    int invalidated; // takes no more work, as ROCm's streams
} Stream;

static long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value ? atol(value) : otherwise;
}

static int begun; // captures so far

int hipRuntimeGetVersion(int *version) {
    *version = (int)setting("FAKE_HIP_VERSION", 60200000);
    return SUCCESS;
}

int hipGetDeviceCount(int *count) {
    *count = (int)setting("FAKE_HIP_DEVICES", 1);
    return SUCCESS;
}

static int is_device(int device) {
    int count;
    return hipGetDeviceCount(&count) == SUCCESS && device >= 0 && device < count;
}

static int properties(char *at, int bytes, int total, int multiprocessors, int arch, int device) {
    if (!is_device(device)) return 101;
    const char *name = getenv("FAKE_HIP_ARCH");
    memset(at, 0xee, bytes);
    strcpy(at, "Fake Instinct");
    *(size_t *)(at + total) = (size_t)64 << 30;
    *(int *)(at + multiprocessors) = MULTIPROCESSORS;
    strcpy(at + arch, name ? name : "gfx90a:sramecc+:xnack-");
    return SUCCESS;
}

// The offsets are those of hip_runtime_api.h in ROCm 5.7 and 6.2.
int hipGetDeviceProperties(void *at, int device) { return properties(at, 792, 256, 336, 396, device); }
#ifdef R0600
int hipGetDevicePropertiesR0600(void *at, int device) { return properties(at, 1472, 288, 388, 1160, device); }
#endif

int hipGetDevice(int *device) {
    *device = 0;
    return SUCCESS;
}
int hipSetDevice(int device) { return is_device(device) ? SUCCESS : 101; }
int hipDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return is_device(device) && is_device(peer) ? SUCCESS : 101;
}
int hipExtGetLinkTypeAndHopCount(int device, int peer, unsigned *kind, unsigned *hops) {
    const char *link = getenv("FAKE_HIP_LINK");
    return device != peer && link && sscanf(link, "%u %u", kind, hops) == 2 ? SUCCESS : INVALID_VALUE;
}
int hipDeviceEnablePeerAccess(int peer, unsigned flags) { return peer == 0 && flags == 0 ? SUCCESS : 101; }

int hipMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = *total = (size_t)64 << 30;
    return SUCCESS;
}
int hipMalloc(void **at, size_t bytes) { return (*at = malloc(bytes)) ? SUCCESS : 2; }
int hipFree(void *at) {
    free(at);
    return SUCCESS;
}
int hipHostMalloc(void **at, size_t bytes, unsigned flags) { return flags == 3 ? hipMalloc(at, bytes) : INVALID_VALUE; }
int hipHostFree(void *at) { return hipFree(at); }
int hipHostGetDevicePointer(void **device, void *host, unsigned flags) {
    *device = host;
    return flags == 0 ? SUCCESS : INVALID_VALUE;
}

static int copy(void *to, const void *from, size_t bytes, Stream *stream) {
    if (stream->invalidated) return INVALIDATED;
    if (stream->captured) return ILLEGAL_STATE;
    memcpy(to, from, bytes);
    return SUCCESS;
}
int hipMemcpyHtoDAsync(void *to, void *from, size_t bytes, Stream *stream) { return copy(to, from, bytes, stream); }
int hipMemcpyDtoHAsync(void *to, void *from, size_t bytes, Stream *stream) { return copy(to, from, bytes, stream); }
int hipMemcpyDtoDAsync(void *to, void *from, size_t bytes, Stream *stream) { return copy(to, from, bytes, stream); }
int hipMemcpyPeerAsync(void *to, int device, const void *from, int peer, size_t bytes, Stream *stream) {
    return device == 0 && peer == 0 ? copy(to, from, bytes, stream) : 101;
}
int hipMemsetD8Async(void *to, unsigned char byte, size_t bytes, Stream *stream) {
    if (stream->invalidated) return INVALIDATED;
    memset(to, byte, bytes);
    return SUCCESS;
}

int hipStreamCreateWithFlags(Stream **stream, unsigned flags) {
    *stream = calloc(1, sizeof **stream);
    return flags == 1 ? SUCCESS : INVALID_VALUE;
}
int hipStreamDestroy(Stream *stream) { return hipFree(stream); }
int hipStreamSynchronize(Stream *stream) { return stream->captured || stream->invalidated ? INVALIDATED : SUCCESS; }
int hipStreamQuery(Stream *stream) { return hipStreamSynchronize(stream); }
int hipStreamWaitEvent(Stream *stream, void *event, unsigned flags) { return stream && event && !flags ? SUCCESS : 1; }
int hipEventCreateWithFlags(void **event, unsigned flags) { return hipMalloc(event, 1 + flags); }
int hipEventDestroy(void *event) { return hipFree(event); }
int hipEventRecord(void *event, Stream *stream) { return event && stream ? SUCCESS : INVALID_VALUE; }
int hipEventSynchronize(void *event) { return event ? SUCCESS : INVALID_VALUE; }
int hipEventElapsedTime(float *ms, void *from, void *to) {
    *ms = 0;
    return from && to ? SUCCESS : INVALID_VALUE;
}

int hipModuleLoadData(void **module, const void *image) {
    *module = (void *)image;
    return (int)setting("FAKE_HIP_REFUSE", SUCCESS);
}
int hipModuleUnload(void *module) { return module ? SUCCESS : INVALID_VALUE; }
int hipModuleGetFunction(void **function, void *module, const char *name) {
    *function = module;
    return *name ? SUCCESS : NOT_FOUND;
}

int hipModuleLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned shared_bytes, Stream *stream, void **params, void **extra) {
    if (!x || y != 1 || z != 1 || !block_x || block_y != 1 || block_z != 1) return INVALID_VALUE;
    if (!function || shared_bytes > 65536 || params) return INVALID_VALUE;
    if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != (void *)3 || *(size_t *)extra[3] != sizeof(int *))
        return INVALID_VALUE;
    int *adds_to = *(int **)extra[1];
    if (stream->invalidated) return INVALIDATED;
    if (!stream->captured) {
        ++*adds_to;
        return SUCCESS;
    }
    stream->launches++;
    if (stream->launches == 2 && begun <= setting("FAKE_HIP_INVALIDATE", 0)) {
        stream->invalidated = 1;
        return INVALIDATED;
    }
    if (stream->launches != setting("FAKE_HIP_DROP", 0)) stream->captured->adds_to[stream->captured->nodes++] = adds_to;
    return SUCCESS;
}

int hipStreamBeginCapture(Stream *stream, int mode) {
    if (stream->captured || mode != 1) return ILLEGAL_STATE;
    begun++;
    stream->captured = calloc(1, sizeof(Graph));
    stream->launches = 0;
    return SUCCESS;
}
int hipStreamEndCapture(Stream *stream, Graph **graph) {
    *graph = NULL;
    if (!stream->captured) return ILLEGAL_STATE;
    if (stream->invalidated)
        free(stream->captured);
    else
        *graph = stream->captured;
    stream->captured = NULL;
    return stream->invalidated ? INVALIDATED : SUCCESS;
}
int hipGraphGetNodes(Graph *graph, void **nodes, size_t *count) {
    if (nodes) return INVALID_VALUE;
    *count = graph->nodes;
    return SUCCESS;
}
int hipGraphDestroy(Graph *graph) { return hipFree(graph); }
int hipGraphInstantiate(Graph **exec, Graph *graph, void **node, char *log, size_t log_bytes) {
    if (node || log || log_bytes) return INVALID_VALUE;
    *exec = malloc(sizeof **exec);
    **exec = *graph;
    return SUCCESS;
}
int hipGraphLaunch(Graph *exec, Stream *stream) {
    if (stream->invalidated || stream->captured) return INVALIDATED;
    for (int i = 0; i < exec->nodes; i++) ++*exec->adds_to[i];
    return SUCCESS;
}
int hipGraphExecDestroy(Graph *exec) { return hipFree(exec); }
