/*
 * The names of include/maru.h. Each call first asks whether this process is a child
 * of the one that loaded the library: entering Go there would hang, because the
 * runtime's other threads are not there. So the check is here, in C.
 */
#include "maru.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "_cgo_export.h"

static atomic_int forked;

static void after_fork_in_child(void) { atomic_store(&forked, 1); }

/* The text of a thread's last error. Only a pointer lies in thread-local storage:
 * a library that is loaded late has a kilobyte and a half of it. */
static __thread char *error_text;
static pthread_key_t error_key;
static int error_key_ok;

__attribute__((constructor)) static void loaded(void) {
  pthread_atfork(NULL, NULL, after_fork_in_child);
  error_key_ok = pthread_key_create(&error_key, free) == 0;
}

static const char forked_text[] =
    "maru: used after fork: the library was loaded by a parent process and its runtime does not survive a "
    "fork; start workers by spawn or forkserver, or load it after the fork";

/* Called by the exports, on the thread that made the call. */
__attribute__((visibility("hidden"))) void maru_shim_set_error(const char *text, size_t n) {
  if (!error_key_ok) return; /* no key, no text: it would leak with each thread */
  char *copy = calloc(1, n + 1);
  if (copy == NULL) return;
  memcpy(copy, text, n);
  free(error_text);
  error_text = copy;
  pthread_setspecific(error_key, copy);
}

int32_t maru_last_error(char *buf, size_t cap, size_t *needed) {
  const char *text = atomic_load(&forked) ? forked_text : error_text ? error_text : "";
  size_t n = strlen(text);
  if (needed == NULL || (buf == NULL && cap > 0)) return MARU_ERR_INVALID;
  *needed = n;
  if (n + 1 > cap) return MARU_ERR_LIMIT;
  memcpy(buf, text, n + 1);
  return MARU_OK;
}

uint32_t maru_abi_version(void) { return MARU_ABI_VERSION; }
const char *maru_version_string(void) { return MARU_VERSION; }

#define ENTER \
  if (atomic_load_explicit(&forked, memory_order_relaxed)) return MARU_ERR_FORKED

int32_t maru_opaque_keys(uint64_t n, const char *packed, const uint64_t *ends, const uint8_t *tags,
                         uint8_t *keys) {
  ENTER;
  return maruGoOpaqueKeys(n, (char *)packed, (uint64_t *)ends, (uint8_t *)tags, keys);
}

int32_t maru_namespace(const char *json, size_t n, uint8_t *cbor, size_t cap, size_t *needed) {
  ENTER;
  return maruGoNamespace((char *)json, n, cbor, cap, needed);
}

int32_t maru_root(const uint8_t *namespace_id, const uint8_t *salt, size_t n, uint8_t *link) {
  ENTER;
  return maruGoRoot((uint8_t *)namespace_id, (uint8_t *)salt, n, link);
}

int32_t maru_chain_keys(uint8_t *link, uint64_t first, uint64_t n, const uint32_t *tokens,
                        const uint64_t *token_ends, const uint8_t *extras, const uint64_t *extra_ends,
                        uint16_t shard, uint16_t part, uint8_t *keys, uint8_t *parents, uint8_t *links) {
  ENTER;
  return maruGoChainKeys(link, first, n, (uint32_t *)tokens, (uint64_t *)token_ends, (uint8_t *)extras,
                         (uint64_t *)extra_ends, shard, part, keys, parents, links);
}

int32_t maru_open(const char *config_json, size_t n, maru_handle *client) {
  ENTER;
  return maruGoOpen((char *)config_json, n, client);
}

int32_t maru_close(maru_handle client, int64_t timeout_ms) {
  ENTER;
  return maruGoClose(client, timeout_ms);
}

int32_t maru_client_info(maru_handle client, char *buf, size_t cap, size_t *needed) {
  ENTER;
  return maruGoInfo(client, buf, cap, needed);
}

int32_t maru_stats(maru_handle client, char *buf, size_t cap, size_t *needed) {
  ENTER;
  return maruGoStats(client, buf, cap, needed);
}

int32_t maru_usage(maru_handle client, char *buf, size_t cap, size_t *needed, int64_t timeout_ms) {
  ENTER;
  return maruGoUsage(client, buf, cap, needed, timeout_ms);
}

int32_t maru_ping(maru_handle client, int64_t timeout_ms) {
  ENTER;
  return maruGoPing(client, timeout_ms);
}

int32_t maru_wait_log(maru_handle client, int64_t timeout_ms, char *buf, size_t cap, size_t *needed) {
  ENTER;
  return maruGoWaitLog(client, timeout_ms, buf, cap, needed);
}

int32_t maru_probe(maru_handle client, uint64_t n, const uint8_t *keys, uint32_t mode, uint32_t n_targets,
                   const uint8_t *targets, uint64_t request_id, uint8_t *verdicts, uint64_t *leading,
                   int64_t timeout_ms) {
  ENTER;
  return maruGoProbe(client, n, (uint8_t *)keys, mode, n_targets, (uint8_t *)targets, request_id, verdicts,
                     leading, timeout_ms);
}

int32_t maru_requests(maru_handle client, uint32_t action, uint64_t n, const uint64_t *ids,
                      int64_t timeout_ms) {
  ENTER;
  return maruGoRequests(client, action, n, (uint64_t *)ids, timeout_ms);
}

int32_t maru_submit_lookup(maru_handle client, uint64_t n, const uint8_t *keys, uint32_t workers, uint32_t replicas,
                           uint64_t request_id, int64_t timeout_ms, maru_handle *job) {
  ENTER;
  return maruGoSubmitLookup(client, n, (uint8_t *)keys, workers, replicas, request_id, timeout_ms, job);
}

int32_t maru_submit_requests(maru_handle client, uint32_t action, uint64_t n, const uint64_t *ids) {
  ENTER;
  return maruGoSubmitRequests(client, action, n, (uint64_t *)ids);
}

int32_t maru_targets(maru_handle client, uint32_t cap, uint8_t *sessions, uint32_t *count,
                     int64_t timeout_ms) {
  ENTER;
  return maruGoTargets(client, cap, sessions, count, timeout_ms);
}

int32_t maru_delete(maru_handle client, uint64_t n, const uint8_t *keys, int32_t *codes, int64_t timeout_ms) {
  ENTER;
  return maruGoDelete(client, n, (uint8_t *)keys, codes, timeout_ms);
}

int32_t maru_alloc(maru_handle client, uint32_t n, maru_page *out, uint32_t *count, int64_t timeout_ms) {
  ENTER;
  return maruGoAlloc(client, n, out, count, timeout_ms);
}

int32_t maru_free(maru_handle client, uint64_t n, const uint32_t *regions, const uint32_t *indices,
                  int32_t *codes) {
  ENTER;
  return maruGoFree(client, n, (uint32_t *)regions, (uint32_t *)indices, codes);
}

int32_t maru_commit(maru_handle client, uint64_t n, const uint8_t *keys, const uint8_t *parents,
                    const uint32_t *regions, const uint32_t *indices, const uint64_t *lengths, int32_t *codes,
                    int64_t timeout_ms) {
  ENTER;
  return maruGoCommit(client, n, (uint8_t *)keys, (uint8_t *)parents, (uint32_t *)regions,
                      (uint32_t *)indices, (uint64_t *)lengths, codes, timeout_ms);
}

int32_t maru_retrieve(maru_handle client, uint64_t n, const uint8_t *keys, uint32_t mode, maru_view *out,
                      int64_t timeout_ms) {
  ENTER;
  return maruGoRetrieve(client, n, (uint8_t *)keys, mode, out, timeout_ms);
}

int32_t maru_release_views(maru_handle client, uint64_t n, const uint64_t *ids) {
  ENTER;
  return maruGoReleaseViews(client, n, (uint64_t *)ids);
}

int32_t maru_pin(maru_handle client, uint64_t n, const uint8_t *keys, uint32_t mode, int32_t *codes,
                 int64_t timeout_ms) {
  ENTER;
  return maruGoPin(client, n, (uint8_t *)keys, mode, codes, timeout_ms);
}

int32_t maru_unpin(maru_handle client, uint64_t n, const uint8_t *keys, int32_t *codes, int64_t timeout_ms) {
  ENTER;
  return maruGoUnpin(client, n, (uint8_t *)keys, codes, timeout_ms);
}

int32_t maru_region_view(maru_handle client, uint32_t region, uint64_t offset, uint64_t bytes, uint8_t **data,
                         int32_t *writable) {
  ENTER;
  return maruGoRegionView(client, region, offset, bytes, data, writable);
}

int32_t maru_release_region_view(maru_handle client, uint32_t region) {
  ENTER;
  return maruGoReleaseRegionView(client, region);
}

int32_t maru_region_page_count(maru_handle client, uint32_t region, uint64_t *count) {
  ENTER;
  return maruGoRegionPageCount(client, region, count);
}

int32_t maru_region_page_bytes(maru_handle client, uint32_t region, uint64_t *bytes) {
  ENTER;
  return maruGoRegionPageBytes(client, region, bytes);
}

int32_t maru_region_free_count(maru_handle client, uint32_t region, uint64_t *count) {
  ENTER;
  return maruGoRegionFreeCount(client, region, count);
}

int32_t maru_owned_regions(maru_handle client, uint32_t cap, uint32_t *regions, uint32_t *count) {
  ENTER;
  return maruGoOwnedRegions(client, cap, regions, count);
}

int32_t maru_next_region(maru_handle client, uint64_t *cursor, uint32_t *region, uint64_t *pages) {
  ENTER;
  return maruGoNextRegion(client, cursor, region, pages);
}

int32_t maru_register_layout(maru_handle client, uint32_t n_layers, const maru_layer *layers,
                             const int64_t *offsets, uint64_t n_offsets, uint32_t block_count,
                             maru_handle *layout) {
  ENTER;
  return maruGoRegisterLayout(client, n_layers, (maru_layer *)layers, (int64_t *)offsets, n_offsets,
                              block_count, layout);
}

int32_t maru_register_device_layout(maru_handle client, uint32_t device, uint32_t n_layers,
                                    const maru_layer *layers, const int64_t *offsets, uint64_t n_offsets,
                                    uint32_t block_count, maru_handle *layout) {
  ENTER;
  return maruGoRegisterDeviceLayout(client, device, n_layers, (maru_layer *)layers, (int64_t *)offsets, n_offsets,
                                    block_count, layout);
}

int32_t maru_device_info(maru_handle client, char *buf, size_t cap, size_t *needed) {
  ENTER;
  return maruGoDeviceInfo(client, buf, cap, needed);
}

int32_t maru_unregister_layout(maru_handle client, maru_handle layout) {
  ENTER;
  return maruGoUnregisterLayout(client, layout);
}

int32_t maru_store(maru_handle client, const maru_batch *batch, int32_t *codes, int64_t timeout_ms) {
  ENTER;
  return maruGoStore(client, (maru_batch *)batch, codes, timeout_ms);
}

int32_t maru_load(maru_handle client, const maru_batch *batch, int32_t *codes, int64_t timeout_ms) {
  ENTER;
  return maruGoLoad(client, (maru_batch *)batch, codes, timeout_ms);
}

int32_t maru_submit_store(maru_handle client, const maru_batch *batch, maru_handle *job) {
  ENTER;
  return maruGoSubmitStore(client, (maru_batch *)batch, job);
}

int32_t maru_submit_load(maru_handle client, const maru_batch *batch, maru_handle *job) {
  ENTER;
  return maruGoSubmitLoad(client, (maru_batch *)batch, job);
}

int32_t maru_event_fd(maru_handle client, int32_t *fd) {
  ENTER;
  return maruGoEventFD(client, fd);
}

int32_t maru_completed(maru_handle client, uint32_t cap, maru_handle *jobs, uint32_t *count) {
  ENTER;
  return maruGoCompleted(client, cap, jobs, count);
}

int32_t maru_job_copied(maru_handle client, maru_handle job) {
  ENTER;
  return maruGoJobCopied(client, job);
}

int32_t maru_job_result(maru_handle client, maru_handle job, uint32_t cap, int32_t *codes) {
  ENTER;
  return maruGoJobResult(client, job, cap, codes);
}
