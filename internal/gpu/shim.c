//go:build cgo && linux

#include "shim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

typedef int result;
typedef unsigned long long device_pointer;

/* CUmemcpyAttributes: order of the source, hints, flags. */
typedef struct {
  int order, source_type, source_id, target_type, target_id;
  unsigned flags;
} copy_attributes;

enum {
  NOT_READY = 600,
  NOT_SUPPORTED = 801,
  CAPTURE_FIRST = 900,
  CAPTURE_LAST = 908,
  NON_BLOCKING = 1,
  NO_TIMING = 2,
  PORTABLE_MAPPED = 1 | 2,
  READ_ONLY = 8,
  CAPTURE_RELAXED = 2,
  ORDER_STREAM = 1,
  THREADS = 512
};

/* Entry points by the driver's version, which decides between the forms of a name
 * (dlsym of a plain name finds the oldest). 12.0 is the first with all of these. */
#define FUNCTIONS(F)                                                                                                  \
  F(cuInit, (unsigned))                                                                                               \
  F(cuDriverGetVersion, (int *))                                                                                      \
  F(cuGetErrorName, (result, const char **))                                                                          \
  F(cuDeviceGet, (int *, int))                                                                                        \
  F(cuDeviceGetName, (char *, int, int))                                                                              \
  F(cuDeviceTotalMem, (size_t *, int))                                                                                \
  F(cuDeviceGetAttribute, (int *, int, int))                                                                          \
  F(cuDevicePrimaryCtxRetain, (void **, int))                                                                         \
  F(cuDevicePrimaryCtxRelease, (int))                                                                                 \
  F(cuCtxPushCurrent, (void *))                                                                                       \
  F(cuCtxPopCurrent, (void **))                                                                                       \
  F(cuCtxSetCurrent, (void *))                                                                                        \
  F(cuPointerGetAttribute, (void *, int, device_pointer))                                                             \
  F(cuMemHostRegister, (void *, size_t, unsigned))                                                                    \
  F(cuMemHostUnregister, (void *))                                                                                    \
  F(cuMemHostAlloc, (void **, size_t, unsigned))                                                                      \
  F(cuMemFreeHost, (void *))                                                                                          \
  F(cuMemAlloc, (device_pointer *, size_t))                                                                           \
  F(cuMemFree, (device_pointer))                                                                                      \
  F(cuMemcpyHtoDAsync, (device_pointer, const void *, size_t, void *))                                                \
  F(cuMemcpyDtoHAsync, (void *, device_pointer, size_t, void *))                                                      \
  F(cuStreamCreate, (void **, unsigned))                                                                              \
  F(cuStreamDestroy, (void *))                                                                                        \
  F(cuStreamSynchronize, (void *))                                                                                    \
  F(cuStreamQuery, (void *))                                                                                    \
  F(cuStreamIsCapturing, (void *, int *))                                                                             \
  F(cuStreamWaitEvent, (void *, void *, unsigned))                                                                    \
  F(cuEventCreate, (void **, unsigned))                                                                               \
  F(cuEventRecord, (void *, void *))                                                                                  \
  F(cuEventQuery, (void *))                                                                                           \
  F(cuEventDestroy, (void *))                                                                                         \
  F(cuModuleLoadData, (void **, const void *))                                                                        \
  F(cuModuleUnload, (void *))                                                                                         \
  F(cuModuleGetFunction, (void **, void *, const char *))                                                             \
  F(cuLaunchKernel,                                                                                                   \
    (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))         \
  F(cuThreadExchangeStreamCaptureMode, (int *))
#define DECLARE(name, arguments) static result(*name) arguments;
FUNCTIONS(DECLARE)

/* 12.8 tells which copy failed, 13.0 does not. */
static result (*batch_12)(device_pointer *, device_pointer *, size_t *, size_t, copy_attributes *, size_t *, size_t,
                          size_t *, void *);
static result (*batch_13)(device_pointer *, device_pointer *, size_t *, size_t, copy_attributes *, size_t *, size_t,
                          void *);

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static int loaded;

static mg_result fails(const char *call, int code) { return (mg_result){code, call}; }
static const mg_result fine = {0, ""};

static mg_result load_locked(char *text, size_t n) {
  void *h = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (h == NULL) {
    snprintf(text, n, "%s", dlerror());
    return fails("dlopen", MG_NO_LIBRARY);
  }
  result (*get)(const char *, void **, int, uint64_t, int *) =
      (result(*)(const char *, void **, int, uint64_t, int *))dlsym(h, "cuGetProcAddress_v2");
  if (get == NULL) {
    snprintf(text, n, "libcuda.so.1 has no cuGetProcAddress_v2, CUDA 12.0 (driver 525) is the oldest that is used");
    return fails("dlsym", MG_OLD_DRIVER);
  }
  int status = 0;
#define FIND(name, arguments)                                           \
  if (get(#name, (void **)&name, 12000, 0, &status) || name == NULL) {   \
    snprintf(text, n, "the driver has no " #name " (status %d)", status); \
    return fails(#name, MG_OLD_DRIVER);                                  \
  }
  FUNCTIONS(FIND)
  if (get("cuMemcpyBatchAsync", (void **)&batch_13, 13000, 0, &status)) batch_13 = NULL;
  if (get("cuMemcpyBatchAsync", (void **)&batch_12, 12080, 0, &status)) batch_12 = NULL;
  int code = cuInit(0);
  if (code) return fails("cuInit", code);
  loaded = 1;
  return fine;
}

mg_result mg_load(char *text, size_t n) {
  pthread_mutex_lock(&load_lock);
  mg_result r = loaded ? fine : load_locked(text, n);
  pthread_mutex_unlock(&load_lock);
  return r;
}

mg_result mg_version(int *version) {
  int code = cuDriverGetVersion(version);
  return code ? fails("cuDriverGetVersion", code) : fine;
}

const char *mg_name(int code) {
  const char *name = NULL;
  if (!loaded || cuGetErrorName(code, &name) || name == NULL) return "unknown error";
  return name;
}

struct mg_device {
  int device;
  void *context, *module, *kernels[3]; /* pack, unpack, hash */
  pthread_mutex_t lock;                /* the list of events */
  void **events;
  int event_count, event_room;
};

/* Pushes the context and lets the thread make calls while somebody captures a graph. */
typedef struct {
  int mode;
} guard;
static mg_result enter(mg_device *d, guard *g) {
  int code = cuCtxPushCurrent(d->context);
  if (code) return fails("cuCtxPushCurrent", code);
  g->mode = CAPTURE_RELAXED;
  code = cuThreadExchangeStreamCaptureMode(&g->mode);
  if (code) {
    void *old;
    cuCtxPopCurrent(&old);
    return fails("cuThreadExchangeStreamCaptureMode", code);
  }
  return fine;
}
static void leave(guard *g) {
  void *old;
  cuThreadExchangeStreamCaptureMode(&g->mode);
  cuCtxPopCurrent(&old);
}

#define TRY(call, ...)                             \
  do {                                             \
    int code_ = call(__VA_ARGS__);                 \
    if (code_) {                                   \
      r = fails(#call, code_);                     \
      goto out;                                    \
    }                                              \
  } while (0)

mg_result mg_open(int ordinal, const char *ptx, int mps_pipe, mg_device **out, mg_info *info) {
  static const char *names[3] = {"maru_pack", "maru_unpack", "maru_hash"};
  mg_result r = fine;
  guard g;
  int entered = 0;
  size_t total = 0;
  mg_device *d = calloc(1, sizeof *d);
  if (d == NULL) return fails("calloc", MG_NO_MEMORY);
  pthread_mutex_init(&d->lock, NULL);
  memset(info, 0, sizeof *info);
  TRY(cuDriverGetVersion, &info->driver_version);
  TRY(cuDeviceGet, &d->device, ordinal);
  TRY(cuDeviceGetName, info->name, (int)sizeof info->name, d->device);
  TRY(cuDeviceTotalMem, &total, d->device);
  info->memory_bytes = total;
  info->batch_copy = batch_12 != NULL || batch_13 != NULL;
  TRY(cuDeviceGetAttribute, &info->register_supported, 99, d->device);
  TRY(cuDeviceGetAttribute, &info->register_read_only_supported, 113, d->device);
  if (cuDeviceGetAttribute(&info->mps, 133, d->device)) info->mps = MG_MPS_UNKNOWN;
  if (info->mps && (info->mps != MG_MPS_UNKNOWN || mps_pipe)) {
    info->mps = 1;
    goto out;
  }
  info->mps = 0;
  TRY(cuDevicePrimaryCtxRetain, &d->context, d->device);
  r = enter(d, &g);
  if (r.code) goto out;
  entered = 1;
  TRY(cuModuleLoadData, &d->module, ptx);
  for (int i = 0; i < 3; i++) TRY(cuModuleGetFunction, &d->kernels[i], d->module, names[i]);
out:
  if (r.code || info->mps) {
    if (entered && d->module) cuModuleUnload(d->module);
    if (entered) leave(&g);
    if (d->context) cuDevicePrimaryCtxRelease(d->device);
    pthread_mutex_destroy(&d->lock);
    free(d);
    *out = NULL;
    return r;
  }
  leave(&g);
  *out = d;
  return r;
}

mg_result mg_close(mg_device *d) {
  guard g;
  mg_result r = enter(d, &g);
  /* 4: the driver has left before us, at the end of the process. Nothing can be called. */
  if (r.code) return r;
  for (int i = 0; i < d->event_count; i++) cuEventDestroy(d->events[i]);
  int code = cuModuleUnload(d->module);
  if (code) r = fails("cuModuleUnload", code);
  leave(&g);
  code = cuDevicePrimaryCtxRelease(d->device);
  if (code && !r.code) r = fails("cuDevicePrimaryCtxRelease", code);
  pthread_mutex_destroy(&d->lock);
  free(d->events);
  free(d);
  return r;
}

mg_result mg_range(mg_device *d, uint64_t address, int *is_device, uint64_t *start, uint64_t *bytes) {
  guard g;
  mg_result r = enter(d, &g);
  if (r.code) return r;
  unsigned type = 0;
  int ordinal = -1;
  device_pointer first = 0;
  size_t size = 0;
  *is_device = 0;
  /* Unknown addresses are refused by the driver: not an error of ours. */
  if (cuPointerGetAttribute(&type, 2, address) == 0 && type == 2) {
    TRY(cuPointerGetAttribute, &ordinal, 9, address);
    TRY(cuPointerGetAttribute, &first, 11, address);
    TRY(cuPointerGetAttribute, &size, 12, address);
    *is_device = ordinal == d->device;
    *start = first;
    *bytes = size;
  }
out:
  leave(&g);
  return r;
}

mg_result mg_register(mg_device *d, void *p, size_t n, int read_only) {
  guard g;
  mg_result r = enter(d, &g);
  if (r.code) return r;
  TRY(cuMemHostRegister, p, n, PORTABLE_MAPPED | (read_only ? READ_ONLY : 0));
out:
  leave(&g);
  return r;
}

mg_result mg_unregister(mg_device *d, void *p) {
  guard g;
  mg_result r = enter(d, &g);
  if (r.code) return r;
  TRY(cuMemHostUnregister, p);
out:
  leave(&g);
  return r;
}

static void *take_event(mg_device *d) {
  void *e = NULL;
  pthread_mutex_lock(&d->lock);
  if (d->event_count > 0) e = d->events[--d->event_count];
  pthread_mutex_unlock(&d->lock);
  return e;
}

mg_result mg_record(mg_device *d, uint64_t stream, uint64_t *event) {
  guard g;
  mg_result r = enter(d, &g);
  if (r.code) return r;
  void *s = (void *)(uintptr_t)stream, *e = NULL;
  int capturing = 0;
  /* An event of a stream that is captured would draw ours into the graph. */
  int code = cuStreamIsCapturing(s, &capturing);
  if (capturing || (code >= CAPTURE_FIRST && code <= CAPTURE_LAST)) {
    r = fails("cuStreamIsCapturing", MG_CAPTURING);
    goto out;
  }
  if (code) {
    r = fails("cuStreamIsCapturing", code);
    goto out;
  }
  e = take_event(d);
  if (e == NULL) TRY(cuEventCreate, &e, NO_TIMING);
  /* Stream 0 is the default stream of the context that was pushed. */
  TRY(cuEventRecord, e, s);
  /* Another thread may have begun a capture in between: the event is the graph's then. */
  code = cuStreamIsCapturing(s, &capturing);
  if (capturing || (code >= CAPTURE_FIRST && code <= CAPTURE_LAST)) {
    r = fails("cuStreamIsCapturing", MG_CAPTURING);
    goto out;
  }
  *event = (uint64_t)(uintptr_t)e;
  e = NULL;
out:
  if (e) cuEventDestroy(e);
  leave(&g);
  return r;
}

mg_result mg_passed(mg_device *d, uint64_t event, int *passed) {
  guard g;
  mg_result r = enter(d, &g);
  if (r.code) return r;
  int code = cuEventQuery((void *)(uintptr_t)event);
  *passed = code == 0;
  if (code && code != NOT_READY) r = fails("cuEventQuery", code);
  leave(&g);
  return r;
}

mg_result mg_forget(mg_device *d, uint64_t event) {
  void *e = (void *)(uintptr_t)event;
  pthread_mutex_lock(&d->lock);
  if (d->event_count == d->event_room) {
    int room = d->event_room ? 2 * d->event_room : 64;
    void **more = realloc(d->events, (size_t)room * sizeof *more);
    if (more != NULL) d->events = more, d->event_room = room;
  }
  int kept = d->event_count < d->event_room;
  if (kept) d->events[d->event_count++] = e;
  pthread_mutex_unlock(&d->lock);
  if (kept) return fine;
  guard g;
  mg_result r = enter(d, &g);
  if (r.code) return r;
  TRY(cuEventDestroy, e);
out:
  leave(&g);
  return r;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

mg_result mg_alloc(mg_device *d, size_t n, uint64_t *address) {
  guard g;
  mg_result r = enter(d, &g);
  if (r.code) return r;
  device_pointer p = 0;
  TRY(cuMemAlloc, &p, n);
  *address = p;
out:
  leave(&g);
  return r;
}

mg_result mg_release(mg_device *d, uint64_t address) {
  guard g;
  mg_result r = enter(d, &g);
  if (r.code) return r;
  TRY(cuMemFree, address);
out:
  leave(&g);
  return r;
}

mg_result mg_copy_now(mg_device *d, int to_device, uint64_t device, void *host, size_t n, double *seconds) {
  guard g;
  mg_result r = enter(d, &g);
  if (r.code) return r;
  void *s = NULL;
  TRY(cuStreamCreate, &s, NON_BLOCKING);
  double began = now();
  if (to_device) {
    TRY(cuMemcpyHtoDAsync, device, host, n, s);
  } else {
    TRY(cuMemcpyDtoHAsync, host, device, n, s);
  }
  TRY(cuStreamSynchronize, s);
  *seconds = now() - began;
out:
  if (s) cuStreamDestroy(s);
  leave(&g);
  return r;
}

struct slot {
  void *stream, *done;
  device_pointer stage;
  char *pieces, *fragments; /* pinned, as are hashes and tails: the kernel reads and writes them where they lie */
  uint64_t *hashes;
  char *tails;
  mg_copy *copies;
  void *bounce;
  int unknown; /* the end of its work could not be marked */
};

struct mg_lane {
  mg_device *d;
  int slot_count, blocks;
  uint64_t stage_bytes;
  void *pinned;
  device_pointer memory;
  struct slot *slots;
  /* Scratch of a batched copy. */
  device_pointer *to, *from;
  size_t *sizes;
  atomic_int wake;
};

static size_t align_up(size_t n) { return (n + 4095) & ~(size_t)4095; }

static void free_lane(mg_lane *l) {
  for (int i = 0; l->slots != NULL && i < l->slot_count; i++) {
    struct slot *s = &l->slots[i];
    if (s->stream) cuStreamDestroy(s->stream);
    if (s->done) cuEventDestroy(s->done);
    if (s->bounce) cuMemFreeHost(s->bounce);
    free(s->copies);
  }
  if (l->memory) cuMemFree(l->memory);
  if (l->pinned) cuMemFreeHost(l->pinned);
  free(l->slots), free(l->to), free(l->from), free(l->sizes), free(l);
}

mg_result mg_lane_open(mg_device *d, int slots, uint64_t stage_bytes, int pieces, int fragments, int copies, int blocks,
                       mg_lane **out) {
  guard g;
  mg_result r = enter(d, &g);
  if (r.code) return r;
  mg_lane *l = calloc(1, sizeof *l);
  const size_t piece_bytes = align_up((size_t)pieces * MG_PIECE_BYTES),
               fragment_bytes = align_up((size_t)fragments * MG_FRAGMENT_BYTES),
               hash_bytes = align_up((size_t)pieces * 8), tail_bytes = (size_t)MG_TAILS * MG_TAIL_BYTES;
  const size_t stage = align_up(stage_bytes), pinned = piece_bytes + fragment_bytes + hash_bytes + tail_bytes;
  char *p;
  if (l == NULL) {
    r = fails("calloc", MG_NO_MEMORY);
    goto out;
  }
  l->d = d, l->slot_count = slots, l->blocks = blocks, l->stage_bytes = stage_bytes;
  l->slots = calloc((size_t)slots, sizeof *l->slots);
  l->to = calloc((size_t)copies, sizeof *l->to);
  l->from = calloc((size_t)copies, sizeof *l->from);
  l->sizes = calloc((size_t)copies, sizeof *l->sizes);
  if (l->slots == NULL || l->to == NULL || l->from == NULL || l->sizes == NULL) {
    r = fails("calloc", MG_NO_MEMORY);
    goto out;
  }
  TRY(cuMemHostAlloc, &l->pinned, pinned * (size_t)slots, PORTABLE_MAPPED);
  TRY(cuMemAlloc, &l->memory, stage * (size_t)slots);
  p = l->pinned;
  for (int i = 0; i < slots; i++, p += pinned) {
    struct slot *s = &l->slots[i];
    s->stage = l->memory + stage * (size_t)i;
    s->pieces = p, s->fragments = p + piece_bytes, s->hashes = (uint64_t *)(p + piece_bytes + fragment_bytes);
    s->tails = p + piece_bytes + fragment_bytes + hash_bytes;
    s->copies = calloc((size_t)copies, sizeof *s->copies);
    if (s->copies == NULL) {
      r = fails("calloc", MG_NO_MEMORY);
      goto out;
    }
    TRY(cuStreamCreate, &s->stream, NON_BLOCKING);
    TRY(cuEventCreate, &s->done, NO_TIMING);
  }
out:
  if (r.code && l != NULL) free_lane(l), l = NULL;
  leave(&g);
  *out = l;
  return r;
}

mg_result mg_lane_close(mg_lane *l) {
  guard g;
  mg_result r = enter(l->d, &g);
  if (r.code) return r;
  for (int i = 0; i < l->slot_count; i++) {
    int code = cuStreamSynchronize(l->slots[i].stream);
    if (code && !r.code) r = fails("cuStreamSynchronize", code);
  }
  free_lane(l);
  leave(&g);
  return r;
}

mg_result mg_lane_bind(mg_lane *l) {
  int mode = CAPTURE_RELAXED;
  prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0); /* the usual 50 us would come on top of every nap */
  int code = cuCtxSetCurrent(l->d->context);
  if (code) return fails("cuCtxSetCurrent", code);
  code = cuThreadExchangeStreamCaptureMode(&mode);
  return code ? fails("cuThreadExchangeStreamCaptureMode", code) : fine;
}

void mg_lane_slot(mg_lane *l, int i, mg_slot *out) {
  struct slot *s = &l->slots[i];
  *out = (mg_slot){s->stage, s->pieces, s->fragments, s->hashes, s->tails, s->copies};
}

mg_result mg_lane_bounce(mg_lane *l, int i, void **p) {
  struct slot *s = &l->slots[i];
  if (s->bounce == NULL) {
    int code = cuMemHostAlloc(&s->bounce, l->stage_bytes, PORTABLE_MAPPED);
    if (code) return s->bounce = NULL, fails("cuMemHostAlloc", code);
  }
  *p = s->bounce;
  return fine;
}

static mg_result copy_all(mg_lane *l, struct slot *s, int load, int n) {
  if (n > 1 && (batch_12 != NULL || batch_13 != NULL)) {
    copy_attributes a = {ORDER_STREAM, 0, 0, 0, 0, 0};
    size_t first = 0, failed = 0;
    for (int i = 0; i < n; i++) {
      const mg_copy *c = &s->copies[i];
      l->to[i] = load ? c->device : c->host, l->from[i] = load ? c->host : c->device, l->sizes[i] = c->bytes;
    }
    int code = batch_13 != NULL ? batch_13(l->to, l->from, l->sizes, (size_t)n, &a, &first, 1, s->stream)
                                : batch_12(l->to, l->from, l->sizes, (size_t)n, &a, &first, 1, &failed, s->stream);
    if (code != NOT_SUPPORTED) return code ? fails("cuMemcpyBatchAsync", code) : fine;
  }
  for (int i = 0; i < n; i++) {
    const mg_copy *c = &s->copies[i];
    void *host = (void *)(uintptr_t)c->host;
    int code = load ? cuMemcpyHtoDAsync(c->device, host, c->bytes, s->stream)
                    : cuMemcpyDtoHAsync(host, c->device, c->bytes, s->stream);
    if (code) return fails(load ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync", code);
  }
  return fine;
}

static mg_result run_kernel(mg_lane *l, struct slot *s, int which, unsigned pieces) {
  /* Pinned memory has one address for both sides. */
  device_pointer list = (device_pointer)(uintptr_t)s->pieces, fragments = (device_pointer)(uintptr_t)s->fragments;
  device_pointer hashes = (device_pointer)(uintptr_t)s->hashes, tails = (device_pointer)(uintptr_t)s->tails;
  void *arguments[] = {&list, &pieces, &fragments, &hashes, &tails};
  int code = cuLaunchKernel(l->d->kernels[which], (unsigned)l->blocks, 1, 1, THREADS, 1, 1, 0, s->stream, arguments, NULL);
  return code ? fails("cuLaunchKernel", code) : fine;
}

mg_result mg_lane_launch(mg_lane *l, int i, int load, int direct, uint64_t after, int pieces, int copies, int *started) {
  struct slot *s = &l->slots[i];
  mg_result r = fine;
  *started = 0;
  s->unknown = 0;
  if (after) TRY(cuStreamWaitEvent, s->stream, (void *)(uintptr_t)after, 0);
  *started = 1;
  if (load) {
    r = copy_all(l, s, load, copies);
    if (!r.code) r = run_kernel(l, s, direct ? 2 : 1, (unsigned)pieces);
  } else {
    r = run_kernel(l, s, direct ? 2 : 0, (unsigned)pieces);
    if (!r.code) r = copy_all(l, s, load, copies);
  }
out:;
  if (*started) {
    int code = cuEventRecord(s->done, s->stream);
    if (code) {
      s->unknown = code;
      if (!r.code) r = fails("cuEventRecord", code);
    }
  }
  return r;
}

mg_result mg_lane_wait(mg_lane *l, int i, int limit_us, int *done) {
  struct slot *s = &l->slots[i];
  *done = 0;
  const double until = now() + limit_us * 1e-6;
  for (int n = 0;; n++) {
    /* The stream itself, when its end could not be marked. */
    const int whole = s->unknown;
    int code = whole ? cuStreamQuery(s->stream) : cuEventQuery(s->done);
    if (code == 0) return *done = 1, fine;
    if (code != NOT_READY) {
      s->unknown = code; /* if it is asked again, then the stream: nobody captures ours */
      return fails(whole ? "cuStreamQuery" : "cuEventQuery", code);
    }
    if (atomic_exchange(&l->wake, 0) || now() >= until) return fine;
    /* Short naps for short copies, longer ones for what takes longer anyway. */
    struct timespec nap = {0, n < 16 ? 20000 : 50000};
    nanosleep(&nap, NULL);
  }
}

int mg_lane_settle(mg_lane *l, int i) { return cuStreamSynchronize(l->slots[i].stream) == 0; }

void mg_lane_wake(mg_lane *l) { atomic_store(&l->wake, 1); }
