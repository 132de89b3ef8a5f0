// Runs the kernels of kernels.cu on the processor: 32 contexts that take turns, one step
// each between two shuffles. It reads cases from standard input and
// writes hashes and whether the bytes arrived; kernels_test.go has the expected ones.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

struct int4 {
  int x, y, z, w;
};
struct dim {
  unsigned x;
};
static dim threadIdx, blockIdx = {0}, blockDim = {32}, gridDim = {1};
static unsigned long long exchanged[32];

#define __device__
#define __global__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(n)

static ucontext_t contexts[32], home;

// The next thread's turn; back here when all others had theirs.
static void turn() {
  const unsigned self = threadIdx.x, next = (self + 1) % 32;
  threadIdx.x = next;
  swapcontext(&contexts[self], &contexts[next]);
  threadIdx.x = self;
}
static unsigned long long shuffle(unsigned long long v, unsigned from) {
  exchanged[threadIdx.x] = v;
  turn();
  const unsigned long long r = exchanged[from];
  turn();
  return r;
}
#define __shfl_xor_sync(mask, v, k) shuffle(v, threadIdx.x ^ (k))
#define __shfl_sync(mask, v, k) shuffle(v, k)
static void __syncwarp() { turn(); }
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }

#include "../kernels.cu"

using Kernel = void (*)(const Piece *, u32, const Fragment *, u64 *, u64);

static struct {
  Kernel kernel;
  const Piece *pieces;
  u32 n;
  const Fragment *fragments;
  u64 *hashes;
  u64 tails;
} job;
static unsigned ended;

static void body() {
  job.kernel(job.pieces, job.n, job.fragments, job.hashes, job.tails);
  if (++ended == 32) setcontext(&home);
  for (;;) turn();  // others are on their last step
}

static void run(Kernel k, const std::vector<Piece> &p, const std::vector<Fragment> &f, u64 *hashes, char *tails) {
  static char stacks[32][256 << 10];
  job = {k, p.data(), (u32)p.size(), f.data(), hashes, (u64)tails};
  ended = 0;
  for (unsigned i = 0; i < 32; i++) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stacks[i], contexts[i].uc_stack.ss_size = sizeof stacks[i], contexts[i].uc_link = nullptr;
    makecontext(&contexts[i], body, 0);
  }
  threadIdx.x = 0;
  swapcontext(&home, &contexts[0]);
}

int main() {
  unsigned bytes, fragment;
  unsigned long long seed;
  while (scanf("%u %llu %u", &bytes, &seed, &fragment) == 3) {
    // Bytes as in the test: x = 6364136223846793005 x + 1442695040888963407, its upper byte.
    char *block = (char *)aligned_alloc(64, bytes + 64), *stage = (char *)aligned_alloc(64, bytes + 64);
    char *back = (char *)aligned_alloc(64, bytes + 64), tails[kTailBytes] = {};
    unsigned long long x = bytes;
    for (unsigned i = 0; i < bytes; i++) x = x * 6364136223846793005ull + 1442695040888963407ull, block[i] = x >> 56;
    memset(stage, 0xee, bytes + 64), memset(back, 0xee, bytes + 64);
    auto lists = [&](char *memory, std::vector<Fragment> &f) {
      Piece p = {(u64)memory, (u64)stage, seed, bytes, 0, 0, bytes <= kShortBytes ? 1u : 0u};
      if (fragment) {
        p.address = 0;
        for (unsigned at = 0; at < bytes; at += fragment, p.count++)
          f.push_back({(u64)memory + at, (u64)stage + at, at + fragment > bytes ? bytes - at : fragment, 0});
      }
      return std::vector<Piece>{p};
    };
    u64 hashes[3] = {0, 0, 0};
    std::vector<Fragment> f, g;
    auto p = lists(block, f);
    run(maru_pack, p, f, &hashes[0], tails);
    int ok = memcmp(stage, block, bytes) == 0 && (unsigned char)stage[bytes] == 0xee;
    if (bytes <= kShortBytes) ok = ok && memcmp(tails, block, bytes) == 0, memset(tails, 0, sizeof tails);
    auto q = lists(back, g);
    run(maru_unpack, q, g, &hashes[1], tails);
    ok = ok && memcmp(back, block, bytes) == 0 && (unsigned char)back[bytes] == 0xee;
    if (bytes <= kShortBytes) ok = ok && memcmp(tails, block, bytes) == 0;
    if (!fragment) run(maru_hash, p, f, &hashes[2], tails);
    printf("%d %llu %llu %llu\n", ok, hashes[0], hashes[1], fragment ? hashes[0] : hashes[2]);
    free(block), free(stage), free(back);
  }
}
