/* The CUDA driver as internal/gpu uses it. Every call that needs the context pushes it
 * and pops it; the calls of a lane run on one thread that has it for life. Results are
 * those of the driver (CUresult), 0 is success. */
#ifndef MARU_GPU_SHIM_H
#define MARU_GPU_SHIM_H

#include <stddef.h>
#include <stdint.h>

/* What failed: the driver's code, and the call's name (static). */
typedef struct mg_result {
  int code;
  const char *call;
} mg_result;

typedef struct mg_info {
  char name[128];
  int driver_version;
  int batch_copy;
  int register_supported;
  int register_read_only_supported;
  int mps;
  uint64_t memory_bytes;
} mg_info;

typedef struct mg_device mg_device;
typedef struct mg_lane mg_lane;

/* The structs of engine/device.go. */
typedef struct mg_copy {
  uint64_t host, device, bytes;
} mg_copy;

typedef struct mg_slot {
  uint64_t stage;
  void *pieces, *fragments, *hashes, *tails;
  mg_copy *copies;
} mg_slot;

enum { MG_PIECE_BYTES = 40, MG_FRAGMENT_BYTES = 24, MG_TAIL_BYTES = 256, MG_TAILS = 1024 };
enum { MG_NO_LIBRARY = -1, MG_OLD_DRIVER = -2, MG_NO_MEMORY = -3, MG_CAPTURING = -4, MG_MPS_UNKNOWN = 2 };

/* Finds the library. text gets the reason when there is none. */
mg_result mg_load(char *text, size_t n);
/* Which CUDA the driver is for: 12080 is 12.8. Only after mg_load. */
mg_result mg_version(int *version);
const char *mg_name(int code);

/* mps_pipe: an MPS daemon's pipe was found. It decides where the driver does not know. */
mg_result mg_open(int ordinal, const char *ptx, int mps_pipe, mg_device **out, mg_info *info);
mg_result mg_close(mg_device *d);
/* The allocation that an address of this device lies in. */
mg_result mg_range(mg_device *d, uint64_t address, int *is_device, uint64_t *start, uint64_t *bytes);
mg_result mg_register(mg_device *d, void *p, size_t n, int read_only);
mg_result mg_unregister(mg_device *d, void *p);
mg_result mg_record(mg_device *d, uint64_t stream, uint64_t *event);
mg_result mg_passed(mg_device *d, uint64_t event, int *passed);
mg_result mg_forget(mg_device *d, uint64_t event);
/* Memory and one copy, for benchmarks. */
mg_result mg_alloc(mg_device *d, size_t n, uint64_t *address);
mg_result mg_release(mg_device *d, uint64_t address);
mg_result mg_copy_now(mg_device *d, int to_device, uint64_t device, void *host, size_t n, double *seconds);

mg_result mg_lane_open(mg_device *d, int slots, uint64_t stage_bytes, int pieces, int fragments, int copies, int blocks,
                       mg_lane **out);
mg_result mg_lane_close(mg_lane *l);
mg_result mg_lane_bind(mg_lane *l);
void mg_lane_slot(mg_lane *l, int i, mg_slot *out);
mg_result mg_lane_bounce(mg_lane *l, int i, void **p);
/* started: 0 when nothing was started. */
mg_result mg_lane_launch(mg_lane *l, int i, int load, int direct, uint64_t after, int pieces, int copies, int *started);
/* done: 1 when the slot's work has ended. */
mg_result mg_lane_wait(mg_lane *l, int i, int limit_us, int *done);
/* Waits for the slot's stream; 1 when nothing of it runs. */
int mg_lane_settle(mg_lane *l, int i);
void mg_lane_wake(mg_lane *l);

#endif
