/*
 * A caller of libmaru.so that was compiled from include/maru.h alone. Without
 * arguments it prints the layout of the structs; with a server's address it makes a
 * round trip there and provokes every error of the boundary. It loads the library by
 * name (argv[2]), as Python does. Exit 0: everything was as the header says.
 */
#include "maru.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

#define CHECK(cond)                                                        \
  do {                                                                     \
    if (!(cond)) {                                                         \
      failures++;                                                          \
      printf("line %d: %s (last error: %s)\n", __LINE__, #cond, text());   \
    }                                                                      \
  } while (0)

#define FUNCTIONS(X)                                                                            \
  X(maru_abi_version) X(maru_version_string) X(maru_last_error) X(maru_opaque_keys)             \
  X(maru_namespace) X(maru_root) X(maru_chain_keys) X(maru_open) X(maru_close)                  \
  X(maru_client_info) X(maru_stats) X(maru_usage) X(maru_ping) X(maru_wait_log) X(maru_probe)   \
  X(maru_requests) X(maru_submit_lookup) X(maru_submit_requests) X(maru_targets) X(maru_delete) X(maru_alloc) X(maru_free) X(maru_commit)     \
  X(maru_retrieve) X(maru_release_views) X(maru_pin) X(maru_unpin) X(maru_region_view)          \
  X(maru_release_region_view) X(maru_region_page_count) X(maru_region_page_bytes)               \
  X(maru_region_free_count) X(maru_owned_regions) X(maru_next_region) X(maru_register_layout)   \
  X(maru_register_device_layout) X(maru_device_info)                                           \
  X(maru_unregister_layout) X(maru_store) X(maru_load) X(maru_submit_store) X(maru_submit_load) \
  X(maru_event_fd) X(maru_completed) X(maru_job_copied) X(maru_job_result)

/* One pointer a function, of the type that the header declares. */
#define DECLARE(name) static __typeof__(&name) p_##name;
FUNCTIONS(DECLARE)

static const char *text(void) {
  static char buf[4096];
  size_t needed = 0;
  buf[0] = 0;
  if (p_maru_last_error != NULL) p_maru_last_error(buf, sizeof buf, &needed);
  return buf;
}

static void layout(void) {
#define SIZE(t) printf(#t " %zu\n", sizeof(t))
#define FIELD(t, f) printf(#t "." #f " %zu\n", offsetof(t, f))
  SIZE(maru_page); FIELD(maru_page, data); FIELD(maru_page, bytes); FIELD(maru_page, region); FIELD(maru_page, index);
  SIZE(maru_view); FIELD(maru_view, id); FIELD(maru_view, data); FIELD(maru_view, bytes); FIELD(maru_view, region);
  FIELD(maru_view, index);
  SIZE(maru_run); FIELD(maru_run, data); FIELD(maru_run, bytes);
  SIZE(maru_layer); FIELD(maru_layer, base); FIELD(maru_layer, block_stride_bytes); FIELD(maru_layer, run_bytes);
  FIELD(maru_layer, run_count); FIELD(maru_layer, reserved);
  SIZE(maru_batch); FIELD(maru_batch, struct_bytes); FIELD(maru_batch, count); FIELD(maru_batch, keys);
  FIELD(maru_batch, parents); FIELD(maru_batch, ends); FIELD(maru_batch, runs); FIELD(maru_batch, layout);
  FIELD(maru_batch, blocks); FIELD(maru_batch, offsets); FIELD(maru_batch, stream);
}

static maru_handle open_client(const char *server, const char *instance, int32_t *status) {
  char config[512];
  maru_handle h = 99;
  snprintf(config, sizeof config,
           "{\"server_address\":\"%s\",\"instance_id\":\"%s\",\"opaque\":true,\"page_bytes\":4096,"
           "\"region_bytes\":65536,\"auto_expand\":false}",
           server, instance);
  *status = p_maru_open(config, strlen(config), &h);
  return h;
}

static void *other_thread(void *arg) {
  (void)arg;
  CHECK(strcmp(text(), "") == 0); /* errors are per thread */
  CHECK(p_maru_ping(1, 0) == MARU_ERR_INVALID);
  CHECK(strlen(text()) > 0);
  return NULL;
}

static void round_trip(const char *server) {
  int32_t status, codes[4], fd, writable;
  uint8_t keys[64], verdicts[2], dst[8], *data;
  uint64_t ends[2] = {3, 6}, leading, lengths[1] = {5}, cursor = 0, pages, free_pages;
  uint32_t count, region;
  size_t needed = 0;
  char buf[8192];
  maru_page page[1];
  maru_view view[2];
  char packed[40], a[17], b[17];
  maru_handle h = open_client(server, "c program", &status);
  CHECK(status == MARU_OK && h != 0 && h >> 56 == 1);
  if (status != MARU_OK) return;

  snprintf(a, sizeof a, "a%08lx", (unsigned long)getpid());
  snprintf(b, sizeof b, "b%08lx", (unsigned long)getpid());
  snprintf(packed, sizeof packed, "%s%s", a, b);
  ends[0] = strlen(a);
  ends[1] = ends[0] + strlen(b);
  CHECK(p_maru_opaque_keys(2, packed, ends, (const uint8_t *)"ss", keys) == MARU_OK);
  CHECK(p_maru_alloc(h, 1, page, &count, 0) == MARU_OK && count == 1 && page[0].bytes == 4096);
  memcpy(page[0].data, "hello", 5);
  CHECK(p_maru_commit(h, 1, keys, NULL, &page[0].region, &page[0].index, lengths, codes, 0) == MARU_OK);
  CHECK(codes[0] == MARU_OK);
  CHECK(p_maru_free(h, 1, &page[0].region, &page[0].index, codes) == MARU_OK && codes[0] == MARU_ERR_INVALID);
  CHECK(p_maru_probe(h, 2, keys, MARU_MODE_EACH, 0, NULL, 0, verdicts, &leading, 0) == MARU_OK);
  CHECK(leading == 1 && (verdicts[0] & 3) == MARU_VERDICT_HIT && (verdicts[1] & 3) == MARU_VERDICT_MISS);
  {
    maru_handle job = 0, done = 0;
    int32_t found[3] = {0, 0, 0};
    uint8_t sessions[4 * MARU_SESSION_BYTES];
    uint64_t request = 7;
    int tries;
    CHECK(p_maru_submit_lookup(h, 2, keys, 1, 1, request, 1000, &job) == MARU_OK && job >> 56 == 3);
    for (tries = 0, count = 0; tries < 5000 && count == 0; tries++) {
      CHECK(p_maru_completed(h, 1, &done, &count) == MARU_OK);
      if (count == 0) usleep(1000);
    }
    CHECK(count == 1 && done == job && p_maru_job_result(h, job, 3, found) == MARU_OK);
    CHECK(found[2] >= 0);
    if (p_maru_targets(h, 4, sessions, &count, 0) == MARU_OK)
      CHECK((found[0] & 3) == MARU_VERDICT_HIT && (found[1] & 3) == MARU_VERDICT_MISS);
    else /* this client is of no engine with workers */
      CHECK(found[0] == MARU_LOOKUP_AWAY && found[1] == MARU_LOOKUP_AWAY);
    CHECK(p_maru_submit_requests(h, MARU_REQUESTS_REFRESH, 1, &request) == MARU_OK);
    CHECK(p_maru_submit_requests(h, MARU_REQUESTS_END, 1, &request) == MARU_OK);
    CHECK(p_maru_submit_requests(h, 3, 1, &request) == MARU_ERR_INVALID);
    CHECK(p_maru_submit_lookup(h, 2, keys, 1, 1, 0, 0, NULL) == MARU_ERR_INVALID);
    CHECK(p_maru_submit_lookup(h, 2, NULL, 1, 1, 0, 0, &job) == MARU_ERR_INVALID);
    CHECK(p_maru_submit_lookup(h, 2, keys, 5, 1, 0, 0, &job) == MARU_OK); /* of five workers none has a session */
    for (tries = 0, count = 0; tries < 5000 && count == 0; tries++) {
      CHECK(p_maru_completed(h, 1, &done, &count) == MARU_OK);
      if (count == 0) usleep(1000);
    }
    CHECK(count == 1 && p_maru_job_result(h, done, 3, found) == MARU_OK);
    CHECK(found[0] == MARU_LOOKUP_AWAY && found[1] == MARU_LOOKUP_AWAY && found[2] >= 0);
  }
  CHECK(p_maru_retrieve(h, 2, keys, MARU_MODE_EACH, view, 0) == MARU_OK);
  CHECK(view[0].id != 0 && view[0].bytes == 5 && memcmp(view[0].data, "hello", 5) == 0 && view[1].id == 0);
  CHECK(p_maru_release_views(h, 1, &view[0].id) == MARU_OK);
  CHECK(p_maru_pin(h, 2, keys, MARU_MODE_PREFIX, codes, 0) == MARU_OK && codes[0] == 0 && codes[1] == MARU_ERR_MISS);
  CHECK(p_maru_delete(h, 1, keys, codes, 0) == MARU_OK && codes[0] == MARU_ERR_PINNED);
  CHECK(p_maru_unpin(h, 2, keys, codes, 0) == MARU_OK && codes[0] == 0 && codes[1] == MARU_ERR_NOT_FOUND);

  /* transfers */
  {
    maru_run run[2];
    maru_batch batch;
    maru_handle job = 0, jobs[4];
    int tries;
    uint64_t batch_ends[1] = {2}, offsets[1] = {1};
    char src1[] = "tra", src2[] = "nsfer";
    memset(&batch, 0, sizeof batch);
    batch.struct_bytes = sizeof batch;
    batch.count = 1;
    batch.keys = keys + 32;
    batch.ends = batch_ends;
    batch.runs = run;
    run[0].data = src1; run[0].bytes = 3;
    run[1].data = src2; run[1].bytes = 5;
    CHECK(p_maru_store(h, &batch, codes, 0) == MARU_OK && codes[0] == MARU_OK);
    memset(dst, 0, sizeof dst);
    run[0].data = dst; run[0].bytes = 2;
    run[1].data = dst + 2; run[1].bytes = 5;
    batch.offsets = offsets;
    CHECK(p_maru_load(h, &batch, codes, 0) == MARU_OK && codes[0] == MARU_OK && memcmp(dst, "ransfer", 7) == 0);
    memset(dst, 0, sizeof dst);
    CHECK(p_maru_submit_load(h, &batch, &job) == MARU_OK && job >> 56 == 3);
    CHECK(p_maru_event_fd(h, &fd) == MARU_OK && fd >= 0);
    for (tries = 0, count = 0; tries < 5000 && count == 0; tries++) {
      CHECK(p_maru_completed(h, 4, jobs, &count) == MARU_OK);
      if (count == 0) usleep(1000);
    }
    CHECK(count == 1 && jobs[0] == job);
    CHECK(p_maru_job_copied(h, job) == MARU_OK);
    CHECK(p_maru_job_result(h, job, 0, NULL) == MARU_ERR_LIMIT);
    CHECK(p_maru_job_result(h, job, 1, codes) == MARU_OK && codes[0] == MARU_OK && memcmp(dst, "ransfer", 7) == 0);
    CHECK(p_maru_job_result(h, job, 1, codes) == MARU_ERR_NOT_FOUND);
    CHECK(p_maru_job_copied(h, job) == MARU_ERR_NOT_FOUND);
    batch.struct_bytes--;
    CHECK(p_maru_load(h, &batch, codes, 0) == MARU_ERR_INVALID && strstr(text(), "struct_bytes") != NULL);
    batch.struct_bytes++;
    /* a stream needs a device layout; a caller of an older header has no stream */
    batch.stream = 1;
    CHECK(p_maru_load(h, &batch, codes, 0) == MARU_ERR_INVALID && strstr(text(), "stream") != NULL);
    batch.struct_bytes = offsetof(maru_batch, stream);
    CHECK(p_maru_load(h, &batch, codes, 0) == MARU_OK && codes[0] == MARU_OK);
    batch.struct_bytes = sizeof batch;
    batch.stream = 0;
    CHECK(p_maru_device_info(h, buf, sizeof buf, &needed) == MARU_ERR_NOT_FOUND);
    {
      static char tensor[4 * 16] __attribute__((aligned(16)));
      maru_layer layer = {tensor, 16, 16, 1, 0};
      int64_t offset = 0;
      uint32_t block = 2;
      maru_handle layout = 0;
      maru_batch b = batch;
      CHECK(p_maru_register_device_layout(h, 7, 1, &layer, &offset, 1, 4, &layout) == MARU_ERR_UNSUPPORTED);
      CHECK(p_maru_register_device_layout(h, 4096, 1, &layer, &offset, 1, 4, &layout) == MARU_ERR_INVALID);
      int32_t got = p_maru_register_device_layout(h, 0, 1, &layer, &offset, 1, 4, &layout);
      /* The fake library has a device of host memory; a real one is not this tensor's. */
      CHECK(got == MARU_OK || got == MARU_ERR_UNSUPPORTED || got == MARU_ERR_INVALID);
      if (got == MARU_OK) {
        CHECK(p_maru_device_info(h, buf, sizeof buf, &needed) == MARU_OK && strstr(buf, "driver_version") != NULL);
        b.runs = NULL, b.offsets = NULL, b.layout = layout, b.blocks = &block, b.stream = 9;
        batch_ends[0] = 1;
        CHECK(p_maru_load(h, &b, codes, 0) == MARU_OK && codes[0] == MARU_ERR_INVALID); /* 16 bytes of 8 */
        b.stream = 0xca;
        CHECK(p_maru_submit_load(h, &b, &job) == MARU_ERR_UNSUPPORTED && strstr(text(), "captured") != NULL);
        batch_ends[0] = 2;
        CHECK(p_maru_unregister_layout(h, layout) == MARU_OK);
      }
    }
    batch.keys = NULL;
    CHECK(p_maru_load(h, &batch, codes, 0) == MARU_ERR_INVALID && strstr(text(), "keys is NULL") != NULL);
  }

  /* regions */
  CHECK(p_maru_next_region(h, &cursor, &region, &pages) == MARU_OK && cursor == 1 && region == page[0].region);
  CHECK(p_maru_next_region(h, &cursor, &region, &pages) == MARU_ERR_NOT_FOUND);
  CHECK(p_maru_region_page_count(h, region, &pages) == MARU_OK && pages >= 16);
  CHECK(p_maru_region_free_count(h, region, &free_pages) == MARU_OK && free_pages < pages);
  CHECK(p_maru_region_view(h, region, (uint64_t)page[0].index * 4096, 5, &data, &writable) == MARU_OK);
  CHECK(writable == 1 && data == page[0].data);
  CHECK(p_maru_release_region_view(h, region) == MARU_OK);
  CHECK(p_maru_owned_regions(h, 0, NULL, &count) == MARU_ERR_LIMIT && count == 1);

  /* short buffers and missing places */
  CHECK(p_maru_client_info(h, NULL, 0, &needed) == MARU_ERR_LIMIT && needed > 10);
  CHECK(p_maru_client_info(h, buf, needed, &needed) == MARU_ERR_LIMIT);
  CHECK(p_maru_client_info(h, buf, needed + 1, &needed) == MARU_OK && strlen(buf) == needed && buf[0] == '{');
  CHECK(p_maru_stats(h, buf, sizeof buf, &needed) == MARU_OK && strstr(buf, "pages_free") != NULL);
  CHECK(p_maru_usage(h, buf, sizeof buf, &needed, 0) == MARU_OK || needed >= sizeof buf);
  CHECK(p_maru_client_info(h, buf, sizeof buf, NULL) == MARU_ERR_INVALID);
  CHECK(p_maru_client_info(h, NULL, 10, &needed) == MARU_ERR_INVALID);
  CHECK(p_maru_last_error(buf, 3, &needed) == MARU_ERR_LIMIT && needed > 3);
  CHECK(p_maru_probe(h, 1, NULL, 0, 0, NULL, 0, verdicts, &leading, 0) == MARU_ERR_INVALID);
  CHECK(p_maru_probe(h, 1, keys, 0, 0, NULL, 0, verdicts, NULL, 0) == MARU_ERR_INVALID);
  CHECK(p_maru_probe(h, 1, keys, 7, 0, NULL, 0, verdicts, &leading, 0) == MARU_ERR_INVALID);
  CHECK(p_maru_probe(h, UINT64_MAX, keys, 0, 0, NULL, 0, verdicts, &leading, 0) == MARU_ERR_LIMIT);
  CHECK(p_maru_ping(h, -5) == MARU_ERR_INVALID && p_maru_ping(h, 0) == MARU_OK);
  CHECK(p_maru_wait_log(h, 0, buf, sizeof buf, &needed) != MARU_ERR_INTERNAL);

  /* handles */
  CHECK(p_maru_ping(0, 0) == MARU_ERR_INVALID);
  CHECK(p_maru_ping(h + 1, 0) == MARU_ERR_INVALID);
  CHECK(p_maru_unregister_layout(h, h) == MARU_ERR_INVALID);
  CHECK(p_maru_open("{}", 2, NULL) == MARU_ERR_INVALID);
  CHECK(p_maru_open(NULL, 2, &h) == MARU_ERR_INVALID);
  {
    maru_handle bad = 99;
    CHECK(p_maru_open("{\"colour\":1}", 12, &bad) == MARU_ERR_INVALID && bad == 0 && strstr(text(), "colour") != NULL);
  }
  {
    pthread_t t;
    CHECK(pthread_create(&t, NULL, other_thread, NULL) == 0 && pthread_join(t, NULL) == 0);
  }

  /* fork: every call of the child is refused at once, the parent goes on */
  {
    int ws;
    pid_t pid;
    fflush(stdout);
    pid = fork();
    if (pid == 0) {
      maru_handle x = 0;
      alarm(20);
      failures = 0;
      CHECK(p_maru_ping(h, 0) == MARU_ERR_FORKED);
      CHECK(p_maru_close(h, 0) == MARU_ERR_FORKED);
      CHECK(p_maru_open("{}", 2, &x) == MARU_ERR_FORKED);
      CHECK(p_maru_opaque_keys(2, packed, ends, (const uint8_t *)"ss", keys) == MARU_ERR_FORKED);
      CHECK(strstr(text(), "fork") != NULL);
      CHECK(p_maru_abi_version() == MARU_ABI_VERSION);
      fflush(stdout);
      _exit(failures != 0);
    }
    CHECK(pid > 0 && waitpid(pid, &ws, 0) == pid && WIFEXITED(ws) && WEXITSTATUS(ws) == 0);
    CHECK(p_maru_ping(h, 0) == MARU_OK);
  }

  CHECK(p_maru_delete(h, 2, keys, codes, 0) == MARU_OK);
  CHECK(p_maru_close(h, 0) == MARU_OK);
  CHECK(p_maru_close(h, 0) == MARU_ERR_CLOSED);
  CHECK(p_maru_ping(h, 0) == MARU_ERR_CLOSED && strstr(text(), "closed") != NULL);
}

/* Only the fake library panics on demand. */
static void panics(const char *server) {
  int32_t status;
  uint8_t key[32] = {1}, verdict;
  uint64_t leading;
  maru_handle h = open_client(server, "panic:probe", &status);
  CHECK(status == MARU_OK);
  CHECK(p_maru_probe(h, 1, key, 0, 0, NULL, 0, &verdict, &leading, 0) == MARU_ERR_INTERNAL);
  CHECK(strstr(text(), "panic in probe") != NULL);
  CHECK(p_maru_ping(h, 0) == MARU_ERR_INTERNAL);
  CHECK(p_maru_close(h, 0) == MARU_OK);
}

int main(int argc, char **argv) {
  void *lib;
  if (argc < 3) {
    layout();
    return 0;
  }
  lib = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
  if (lib == NULL) {
    printf("%s\n", dlerror());
    return 1;
  }
#define RESOLVE(name)                                   \
  *(void **)(void *)&p_##name = dlsym(lib, #name);      \
  if (p_##name == NULL) {                               \
    printf("%s is not exported\n", #name);              \
    return 1;                                           \
  }
  FUNCTIONS(RESOLVE)
  CHECK(p_maru_abi_version() == MARU_ABI_VERSION);
  CHECK(strcmp(p_maru_version_string(), MARU_VERSION) == 0);
  CHECK(strcmp(text(), "") == 0);
  round_trip(argv[1]);
  if (argc > 3 && strcmp(argv[3], "fake") == 0) panics(argv[1]);
  printf(failures ? "%d failures\n" : "ok\n", failures);
  return failures != 0;
}
