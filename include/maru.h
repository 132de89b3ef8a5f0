/*
 * maru.h: the C contract of libmaru.so, the client of Maru, a KV cache store for
 * LLM inference. Written by hand; C99 and C++17. docs/reference/c-abi.md explains
 * it with examples, docs/rfcs/0006-c-abi.md says why it is as it is.
 *
 * Rules that hold for every call
 *
 *  - A call returns MARU_OK or a MARU_ERR_ code and never aborts, prints, forks,
 *    exits or calls back. maru_last_error() has the text, per thread.
 *  - Calls are batched: arrays in, one code an item out (MARU_OK or the same
 *    numbers). The call's own status says whether it was made; with anything but
 *    MARU_OK, unless said otherwise, the arrays out hold nothing.
 *  - Handles are 64-bit numbers with their kind in the top byte. 0 is never a
 *    handle, none is ever used again, a stale one is an error (invariant C1).
 *  - Memory that is passed in is the caller's and is read or written only until
 *    the call returns; for submitted transfers the tensors and runs (not the
 *    arrays that describe them) must stay until the job is done.
 *  - Pointers that come out point into mappings of the library. A page's is good
 *    until it is committed, freed or the client is closed; a view's until the view
 *    is released. No Go pointer ever crosses.
 *  - Text and lists come out in a caller's buffer: `needed` is always set to the
 *    full size (text without its zero byte); a buffer that is too small gives
 *    MARU_ERR_LIMIT and holds nothing. buf may be NULL when cap is 0.
 *  - timeout_ms: 0 is the client's rpc_timeout_ms, negative is refused.
 *  - All calls may be made from any thread at once. There is no state of the
 *    process beyond the library itself: several clients live side by side.
 *  - Fork: in a child of the process that loaded the library every call returns
 *    MARU_ERR_FORKED at once. Load it in the process that uses it; start workers
 *    by spawn or exec.
 *  - One Go runtime fits into a process. Unloading (dlclose) does nothing.
 */
#ifndef MARU_H
#define MARU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by one when a function or struct changes so that an older caller would
 * break. New functions and new configuration fields do not raise it. */
#define MARU_ABI_VERSION 1u
#define MARU_VERSION "0.1.0"

/* Status codes: stable, append-only; the numbers of internal/base. */
#define MARU_OK 0
#define MARU_ERR_INVALID 1      /* an argument is outside what is allowed */
#define MARU_ERR_NOT_FOUND 2    /* no such region, layout, job, key */
#define MARU_ERR_EXISTS 3
#define MARU_ERR_FULL 4         /* no capacity now: skip the store */
#define MARU_ERR_LIMIT 5        /* a bound would be passed; or a short buffer */
#define MARU_ERR_PERMANENT 6    /* no retry can succeed */
#define MARU_ERR_STALE 7
#define MARU_ERR_FENCED 8
#define MARU_ERR_DENIED 9
#define MARU_ERR_BUSY 10        /* full queue, or somebody else has it now */
#define MARU_ERR_UNAVAILABLE 11 /* the server does not answer now */
#define MARU_ERR_UNKNOWN 12     /* the outcome is unknown */
#define MARU_ERR_ABORTED 13
#define MARU_ERR_RETIRED 14
#define MARU_ERR_PINNED 15      /* a view lease protects it */
#define MARU_ERR_CORRUPT 16     /* a checksum does not hold */
#define MARU_ERR_MISMATCH 17    /* namespace, geometry or format differ */
#define MARU_ERR_UNSUPPORTED 18
#define MARU_ERR_EXHAUSTED 19
#define MARU_ERR_CLOSED 20      /* the handle is closed */
#define MARU_ERR_TIMEOUT 21
#define MARU_ERR_FAULT 22       /* memory of a pool could not be read */
#define MARU_ERR_DRAINING 23
#define MARU_ERR_FORKED 24      /* the library was loaded by a parent process */
#define MARU_ERR_INTERNAL 25    /* a bug: please report it */
#define MARU_ERR_FOREIGN 26
#define MARU_ERR_OFFLINE 27
#define MARU_ERR_PENDING 28     /* not done yet; ask again */
#define MARU_ERR_MISS 29        /* no replica that this client can read */
#define MARU_ERR_ALREADY 30     /* the key was there; the first value stays */
#define MARU_ERR_UNPROVEN 31    /* a server did not prove its id to the resource manager */

/* Sizes of packed rows. */
#define MARU_KEY_BYTES 32       /* 28 of digest, shard u16le, part u16le */
#define MARU_DIGEST_BYTES 28    /* parents */
#define MARU_LINK_BYTES 32      /* links of a chain, namespace ids */
#define MARU_SESSION_BYTES 16

/* How a batch goes on after a miss. */
#define MARU_MODE_EACH 0        /* every item is answered */
#define MARU_MODE_PREFIX 1      /* ordered; stops at the first miss */

/* A verdict of maru_probe: status = v & 3, medium = v >> 2 & 7. */
#define MARU_VERDICT_MISS 0
#define MARU_VERDICT_PENDING 1
#define MARU_VERDICT_HIT 2
#define MARU_VERDICT_NOT_TRIED 3
#define MARU_LOOKUP_AWAY (-1)   /* of maru_submit_lookup: no answer */
#define MARU_MEDIUM_CPU 1
#define MARU_MEDIUM_CXL 2
#define MARU_MEDIUM_SSD 3

#define MARU_REQUESTS_REFRESH 1
#define MARU_REQUESTS_END 2

typedef uint64_t maru_handle;

/* A page that maru_alloc gave out. */
typedef struct maru_page {
  uint8_t *data;
  uint64_t bytes;               /* of the page */
  uint32_t region;
  uint32_t index;
} maru_page;

/* An object under a view lease. Its content never changes: do not write. */
typedef struct maru_view {
  uint64_t id;                  /* 0: a miss, the rest is 0 too */
  const uint8_t *data;
  uint64_t bytes;               /* of the object */
  uint32_t region;
  uint32_t index;
} maru_view;

/* A range of the caller's memory. */
typedef struct maru_run {
  void *data;
  uint64_t bytes;
} maru_run;

/* One tensor of an engine's KV cache: run i of block b begins at
 * base + b * block_stride_bytes + offset[i] and has run_bytes bytes. */
typedef struct maru_layer {
  void *base;
  int64_t block_stride_bytes;
  uint64_t run_bytes;
  uint32_t run_count;           /* offsets of this layer, taken in order */
  uint32_t reserved;            /* 0 */
} maru_layer;

/* A batch of transfers. Item i has the runs (or blocks) from ends[i-1] (0 for the
 * first) to ends[i]. Exactly one of runs and layout is given. */
typedef struct maru_batch {
  uint32_t struct_bytes;        /* sizeof(maru_batch), or that of an older header */
  uint32_t count;               /* items, 1 to 65536 */
  const uint8_t *keys;          /* count * MARU_KEY_BYTES */
  const uint8_t *parents;       /* store: count * MARU_DIGEST_BYTES, or NULL */
  const uint64_t *ends;         /* count */
  const maru_run *runs;         /* or NULL */
  maru_handle layout;           /* or 0 */
  const uint32_t *blocks;       /* with layout */
  const uint64_t *offsets;      /* load: where in the object the first run begins,
                                   count of them, or NULL for 0 */
  /* From here on: struct_bytes says whether the caller has it (0 if not). */
  uint64_t stream;              /* with a device layout: handle of the engine's stream
                                   behind which blocks are read or written; 0 is the
                                   device's default stream. Else 0 */
} maru_batch;

/* --- the library --- */

uint32_t maru_abi_version(void);
/* Static text "0.1.0". */
const char *maru_version_string(void);
/* The text of the last call of this thread that failed; "" if none did. */
int32_t maru_last_error(char *buf, size_t cap, size_t *needed);

/* --- identity: no client needed --- */

/* packed holds n keys one after another, key i ends at ends[i]; tags are 's'
 * (UTF-8), 'i' (decimal) or 'b' (raw). A bad key refuses the batch. */
int32_t maru_opaque_keys(uint64_t n, const char *packed, const uint64_t *ends,
                         const uint8_t *tags, uint8_t *keys);
/* The namespace in JSON (field names as in docs/rfcs/0005) as canonical CBOR. */
int32_t maru_namespace(const char *json, size_t n, uint8_t *cbor, size_t cap,
                       size_t *needed);
/* The start of a chain: the namespace's SHA-256, mixed with a salt if n > 0. */
int32_t maru_root(const uint8_t *namespace_id, const uint8_t *salt, size_t n,
                  uint8_t *link);
/* The next n chunks of a chain. link is in and out: the root, or the link of chunk
 * number `first`-1; then of the last one. Chunk i has the tokens up to
 * token_ends[i] and the extra keys (canonical CBOR) up to extra_ends[i]; extras
 * and extra_ends may both be NULL. keys, parents and links may be NULL. */
int32_t maru_chain_keys(uint8_t *link, uint64_t first, uint64_t n,
                        const uint32_t *tokens, const uint64_t *token_ends,
                        const uint8_t *extras, const uint64_t *extra_ends,
                        uint16_t shard, uint16_t part, uint8_t *keys,
                        uint8_t *parents, uint8_t *links);

/* --- a client --- */

/* Opens a session. config_json is an object, docs/reference/c-abi.md lists its
 * fields; unknown ones are refused. */
int32_t maru_open(const char *config_json, size_t n, maru_handle *client);
/* Ends the session. The handle is gone whatever this returns. With views of objects
 * or regions out the mappings stay to the end of the process. */
int32_t maru_close(maru_handle client, int64_t timeout_ms);
/* JSON: session, epoch, connected, page_bytes, value_bytes, piece_bytes, role. */
int32_t maru_client_info(maru_handle client, char *buf, size_t cap, size_t *needed);
/* JSON: counters of this client. */
int32_t maru_stats(maru_handle client, char *buf, size_t cap, size_t *needed);
/* JSON: the server's UsageResponse (64-bit numbers are strings). */
int32_t maru_usage(maru_handle client, char *buf, size_t cap, size_t *needed,
                   int64_t timeout_ms);
/* One round trip. */
int32_t maru_ping(maru_handle client, int64_t timeout_ms);
/* Waits for the next log record, JSON {"time","level","msg","attrs"}. PENDING when
 * none came in time, CLOSED when the client is closed. A record that does not fit
 * stays. */
int32_t maru_wait_log(maru_handle client, int64_t timeout_ms, char *buf, size_t cap,
                      size_t *needed);

/* --- metadata --- */

/* One verdict a key; leading counts the hits before the first that is none. With
 * n_targets > 0 shard s of each key is judged for session target s. request_id,
 * when not 0, puts request leases on the hits. */
int32_t maru_probe(maru_handle client, uint64_t n, const uint8_t *keys, uint32_t mode,
                   uint32_t n_targets, const uint8_t *targets, uint64_t request_id,
                   uint8_t *verdicts, uint64_t *leading, int64_t timeout_ms);
int32_t maru_requests(maru_handle client, uint32_t action, uint64_t n,
                      const uint64_t *ids, int64_t timeout_ms);
/* The live workers of this client's engine, for maru_probe; count is set. */
int32_t maru_targets(maru_handle client, uint32_t cap, uint8_t *sessions,
                     uint32_t *count, int64_t timeout_ms);
/* A lookup of a scheduler that does not wait. Which leading keys, of fewer than 65536,
 * could every worker of this client's engine read: it has that many workers, and shard s
 * is read by the ranks from s * replicas on, replicas of them. request_id as in
 * maru_probe. The job is handed out by maru_completed, and maru_job_result gives n + 1
 * codes: a verdict a key as of MARU_MODE_PREFIX, or MARU_LOOKUP_AWAY for each when the
 * server does not answer or not all workers have a session there; last, the microseconds
 * until the answer was there. timeout_ms is of the call to the server (0: rpc_timeout_ms);
 * for a second after one without an answer nobody asks. The keys are copied. queue_jobs
 * does not count the job, which stays until its result is taken, and maru_close does not
 * wait for it. */
int32_t maru_submit_lookup(maru_handle client, uint64_t n, const uint8_t *keys,
                           uint32_t workers, uint32_t replicas, uint64_t request_id,
                           int64_t timeout_ms, maru_handle *job);
/* maru_requests without waiting: an end comes behind the lookups of its request that
 * were submitted before, and a later lookup of it behind that end. Its outcome is not
 * told: leases end by themselves, too. While the server does not answer, ends wait for
 * its next answer and refreshes are left out. */
int32_t maru_submit_requests(maru_handle client, uint32_t action, uint64_t n,
                             const uint64_t *ids);
/* codes: OK, NOT_FOUND, PINNED, UNKNOWN (hidden, not acknowledged in time). */
int32_t maru_delete(maru_handle client, uint64_t n, const uint8_t *keys, int32_t *codes,
                    int64_t timeout_ms);

/* --- pages written in place --- */

/* FULL with count < n: the pages in out are the caller's all the same. */
int32_t maru_alloc(maru_handle client, uint32_t n, maru_page *out, uint32_t *count,
                   int64_t timeout_ms);
/* codes: OK; INVALID for a page that is not being written; NOT_FOUND for a region
 * that is not this client's. */
int32_t maru_free(maru_handle client, uint64_t n, const uint32_t *regions,
                  const uint32_t *indices, int32_t *codes);
/* Publishes pages. codes: OK; ALREADY (the page is free); UNKNOWN (the page is in
 * quarantine); INVALID and NOT_FOUND (nothing changed); any other: refused, the
 * page is free. When the call itself is refused nothing has changed. */
int32_t maru_commit(maru_handle client, uint64_t n, const uint8_t *keys,
                    const uint8_t *parents, const uint32_t *regions,
                    const uint32_t *indices, const uint64_t *lengths, int32_t *codes,
                    int64_t timeout_ms);

/* --- views and pins --- */

int32_t maru_retrieve(maru_handle client, uint64_t n, const uint8_t *keys,
                      uint32_t mode, maru_view *out, int64_t timeout_ms);
/* Never waits; unknown ids are ignored. */
int32_t maru_release_views(maru_handle client, uint64_t n, const uint64_t *ids);
int32_t maru_pin(maru_handle client, uint64_t n, const uint8_t *keys, uint32_t mode,
                 int32_t *codes, int64_t timeout_ms);
int32_t maru_unpin(maru_handle client, uint64_t n, const uint8_t *keys, int32_t *codes,
                   int64_t timeout_ms);

/* --- regions --- */

/* Bytes of a region that is mapped; own ones are writable. The memory stays until
 * the region was released as often as it was viewed, or the process ends. */
int32_t maru_region_view(maru_handle client, uint32_t region, uint64_t offset,
                         uint64_t bytes, uint8_t **data, int32_t *writable);
int32_t maru_release_region_view(maru_handle client, uint32_t region);
int32_t maru_region_page_count(maru_handle client, uint32_t region, uint64_t *count);
int32_t maru_region_page_bytes(maru_handle client, uint32_t region, uint64_t *bytes);
/* Free pages of an own region now. */
int32_t maru_region_free_count(maru_handle client, uint32_t region, uint64_t *count);
/* Regions whose pages this client allocates, oldest first; count is always set. */
int32_t maru_owned_regions(maru_handle client, uint32_t cap, uint32_t *regions,
                           uint32_t *count);
/* Own regions in the order in which they came. cursor begins at 0 and is moved on;
 * NOT_FOUND when there is no further one yet. */
int32_t maru_next_region(maru_handle client, uint64_t *cursor, uint32_t *region,
                         uint64_t *pages);

/* --- transfers --- */

/* offsets has the run offsets of all layers, one layer after another. */
int32_t maru_register_layout(maru_handle client, uint32_t n_layers,
                             const maru_layer *layers, const int64_t *offsets,
                             uint64_t n_offsets, uint32_t block_count,
                             maru_handle *layout);
/* The same for tensors in the memory of a GPU: device is its number in this process.
 * Bases, strides, offsets and runs are multiples of 16. The first call opens the device
 * (up to half a second) and has the pools registered with it in the background. One
 * device a client. UNSUPPORTED: no driver, no such device, MPS. INVALID: addresses that
 * are not the device's. */
int32_t maru_register_device_layout(maru_handle client, uint32_t device,
                                    uint32_t n_layers, const maru_layer *layers,
                                    const int64_t *offsets, uint64_t n_offsets,
                                    uint32_t block_count, maru_handle *layout);
/* JSON: gpu, name, driver_version, memory_bytes, counters; NOT_FOUND before the first
 * device layout. */
int32_t maru_device_info(maru_handle client, char *buf, size_t cap, size_t *needed);
int32_t maru_unregister_layout(maru_handle client, maru_handle layout);
/* codes: OK, ALREADY, FULL (skipped), UNKNOWN, UNAVAILABLE, FAULT, INVALID. */
int32_t maru_store(maru_handle client, const maru_batch *batch, int32_t *codes,
                   int64_t timeout_ms);
/* codes: OK, MISS, CORRUPT, FAULT, INVALID. Except with OK the content of the
 * destination is undefined. */
int32_t maru_load(maru_handle client, const maru_batch *batch, int32_t *codes,
                  int64_t timeout_ms);
/* BUSY when queue_jobs jobs are out. With a device layout an event is recorded in the
 * batch's stream, on the calling thread: what is in the stream then is waited for on the
 * GPU. UNSUPPORTED for a stream that is being captured. */
int32_t maru_submit_store(maru_handle client, const maru_batch *batch, maru_handle *job);
int32_t maru_submit_load(maru_handle client, const maru_batch *batch, maru_handle *job);
/* Readable while finished jobs wait, and once when a store's blocks are the caller's
 * again. The descriptor is the library's. */
int32_t maru_event_fd(maru_handle client, int32_t *fd);
/* Hands out finished jobs, each once. */
int32_t maru_completed(maru_handle client, uint32_t cap, maru_handle *jobs,
                       uint32_t *count);
/* OK when the memory of a job's items is the caller's again: a store has read it, though
 * its outcome may not be known yet. PENDING before. */
int32_t maru_job_copied(maru_handle client, maru_handle job);
/* PENDING while the job runs. Else one code an item (of a lookup one more), and the job
 * is forgotten.
 * LIMIT when cap is below the items; then the job stays. */
int32_t maru_job_result(maru_handle client, maru_handle job, uint32_t cap,
                        int32_t *codes);

#ifdef __cplusplus
}
#endif
#endif
