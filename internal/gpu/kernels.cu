// Kernels of Maru's copies between an engine's KV blocks and a staging buffer.
//
// A launch has a list of pieces (the unit of the checksum, internal/checksum) and moves
// each with one warp, hashing it on the way: XXH3-64 with the piece's seed, bit for bit
// that of the specification. maru_pack reads the blocks and writes the stage,
// maru_unpack the other way round, maru_hash reads the blocks only. Whoever launches has
// checked every address; there is no bound here but the lists.
//
// Why a warp can hash while it copies: within 1024 bytes the accumulators of XXH3 are
// plain sums, so that 32 threads may add 16 bytes each in any order. Each thread always
// meets the same two accumulators, and with them the same words of the secret, which it
// keeps in registers. What is sequential, the scrambling after 1024 bytes, runs on the
// sums.
//
// Source of the hash: the XXH3 specification (Yann Collet, BSD 2-Clause).
// Made into kernels.ptx by scripts/ptx.sh; the structs are those of engine/lane.go.

typedef unsigned long long u64;
typedef unsigned int u32;

struct Fragment {
  u64 address;  // on the device
  u64 stage;
  u32 bytes;
  u32 reserved;
};
struct Piece {
  u64 address;  // of the block memory, when the piece lies in one run
  u64 stage;
  u64 seed;
  u32 bytes;
  u32 first;  // fragment
  u32 count;  // fragments; 0: the piece is one range at address
  u32 tail;   // 1 + number of the tail that a short piece is copied to
};

__constant__ u64 secret_words[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull, 0x78e5c0cc4ee679cbull,
    0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull, 0xcb00c391bb52283cull, 0xa32e531b8b65d088ull,
    0x4ef90da297486471ull, 0xd8acdea946ef1938ull, 0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull,
    0x647378d9c97e9fc8ull, 0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull};


static constexpr u64 kPrime32 = 0x9E3779B1ull, kPrime64 = 0x9E3779B185EBCA87ull;

__constant__ u64 start_words[8] = {0xC2B2AE3Dull,         0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull,
                                   0x85EBCA77C2B2AE63ull, 0x85EBCA77ull,         0x27D4EB2F165667C5ull, 0x9E3779B1ull};

// Pieces up to here have another algorithm: their bytes go to the host (a tail).
static constexpr u32 kShortBytes = 240;
static constexpr u32 kTailBytes = 256;
static constexpr u32 kRowBytes = 512;    // 32 threads of 16 bytes: eight stripes
static constexpr u32 kGroupBytes = 4096; // what a warp has in registers at once

// Data is read once: it need not displace what the engine's kernels keep in L1.
__device__ __forceinline__ int4 load_once(u64 address) {
#ifdef __CUDACC__
  int4 v;
  asm volatile("ld.global.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
  return v;
#else  // testdata/emulate.cc
  return *reinterpret_cast<int4*>(address);
#endif
}
__device__ __forceinline__ void store16(u64 address, int4 v) { *reinterpret_cast<int4*>(address) = v; }

// What a thread keeps of the secret for one seed.
struct Words {
  u64 even0, even1;  // rows that begin a block of 1024 bytes
  u64 odd0, odd1;    // rows that end one
  u64 last0, last1;  // the last stripe, which begins at byte 121 of the secret
  u64 scramble, merge;

  __device__ __forceinline__ void derive(u64 seed, u32 lane) {
    auto at = [&](u32 i) { return secret_words[i] + (i & 1 ? 0 - seed : seed); };
    const u32 pair = 2 * (lane & 3), stripe = lane >> 2, own = pair + (stripe & 1);
    even0 = at(stripe + pair), even1 = at(stripe + pair + 1);
    odd0 = at(stripe + pair + 8), odd1 = at(stripe + pair + 9);
    const u64 a = at(15 + pair), b = at(16 + pair), c = at(17 + pair);
    last0 = a >> 8 | b << 56, last1 = b >> 8 | c << 56;
    scramble = at(16 + own);
    merge = at(1 + own) >> 24 | at(2 + own) << 40;
  }
};

__device__ __forceinline__ void add_stripe(u64& s0, u64& s1, int4 r, u64 k0, u64 k1) {
  const u64 d0 = (u32)r.x | (u64)(u32)r.y << 32, d1 = (u32)r.z | (u64)(u32)r.w << 32;
  const u64 m0 = d0 ^ k0, m1 = d1 ^ k1;
  s0 += d1 + (u64)(u32)m0 * (m0 >> 32);
  s1 += d0 + (u64)(u32)m1 * (m1 >> 32);
}

// Hashes `bytes` (a multiple of 16 over kShortBytes) at src, and copies them to dst when
// COPY. All 32 threads get the hash.
template <bool COPY>
__device__ __forceinline__ u64 digest(u64 src, u64 dst, u32 bytes, const Words& w, u32 lane) {
  const u32 own = 2 * (lane & 3) + ((lane >> 2) & 1);
  const u32 stripes = bytes & ~63u;  // bytes in whole stripes
  u64 acc = start_words[own];
  const u64 mine = lane * 16;
  for (u32 base = 0; base < bytes; base += kGroupBytes) {
    const u32 rem = bytes - base;
    u64 sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};  // two for each of four blocks of 1024 bytes
    int4 r[8];
    const u64 s = src + base + mine, d = dst + base + mine;
    if (rem > kGroupBytes) {  // the last stripe is not here: no thread has to look
#pragma unroll
      for (u32 i = 0; i < 8; i++) r[i] = load_once(s + i * kRowBytes);
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        if (COPY) store16(d + i * kRowBytes, r[i]);
        add_stripe(sum[i & ~1u], sum[i | 1u], r[i], i & 1 ? w.odd0 : w.even0, i & 1 ? w.odd1 : w.even1);
      }
    } else {
#pragma unroll
      for (u32 i = 0; i < 8; i++)
        if (i * kRowBytes + mine < rem) r[i] = load_once(s + i * kRowBytes);
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        const u32 at = i * kRowBytes + lane * 16;
        if (at < rem) {
          if (COPY) store16(d + i * kRowBytes, r[i]);
          const u32 stripe_end = base + (at & ~63u) + 64;
          const bool last = stripe_end == bytes;
          if (stripe_end <= stripes)
            add_stripe(sum[i & ~1u], sum[i | 1u], r[i], last ? w.last0 : i & 1 ? w.odd0 : w.even0, last ? w.last1 : i & 1 ? w.odd1 : w.even1);
        }
      }
      if (stripes != bytes && lane < 4) {
        // The last stripe overlaps the one before: read again, 16 bytes for each of four.
        const int4 v = load_once(src + bytes - 64 + mine);
        const u32 block = (rem - 1) / 1024;
#pragma unroll
        for (u32 b = 0; b < 4; b++)
          if (b == block) add_stripe(sum[2 * b], sum[2 * b + 1], v, w.last0, w.last1);
      }
    }
    // Sums over the eight threads of an accumulator pair. Each exchange halves what a
    // thread still has to sum: in the end it has one block and one accumulator.
    const bool upper = lane & 16, middle = lane & 8, second = lane & 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      const u64 give = upper ? sum[i] : sum[i + 4], keep = upper ? sum[i + 4] : sum[i];
      sum[i] = keep + __shfl_xor_sync(~0u, give, 16);
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      const u64 give = middle ? sum[i] : sum[i + 2], keep = middle ? sum[i + 2] : sum[i];
      sum[i] = keep + __shfl_xor_sync(~0u, give, 8);
    }
    const u64 total = (second ? sum[1] : sum[0]) + __shfl_xor_sync(~0u, second ? sum[0] : sum[1], 4);
#pragma unroll
    for (u32 b = 0; b < 4; b++) {
      const u64 x = acc + __shfl_sync(~0u, total, b * 8 + (lane & 7));
      if (b * 1024 + 1024 < rem) {
        acc = (x ^ x >> 47 ^ w.scramble) * kPrime32;
      } else if (b * 1024 < rem) {
        acc = x;
      }
    }
  }
  const u64 x = acc ^ w.merge, y = __shfl_xor_sync(~0u, x, 4);
  u64 h = x * y ^ __umul64hi(x, y);
  h += __shfl_xor_sync(~0u, h, 1);
  h += __shfl_xor_sync(~0u, h, 2);
  h += bytes * kPrime64;
  h = (h ^ h >> 37) * 0x165667919E3779F9ull;
  return h ^ h >> 32;
}

__device__ __forceinline__ void copy_warp(u64 dst, u64 src, u32 bytes, u32 lane) {
  for (u32 base = 0; base < bytes; base += kGroupBytes) {
    const u32 rem = bytes - base;
    int4 r[8];
    const u64 s = src + base + lane * 16, d = dst + base + lane * 16;
#pragma unroll
    for (u32 i = 0; i < 8; i++)
      if (i * kRowBytes + lane * 16 < rem) r[i] = load_once(s + i * kRowBytes);
#pragma unroll
    for (u32 i = 0; i < 8; i++)
      if (i * kRowBytes + lane * 16 < rem) store16(d + i * kRowBytes, r[i]);
  }
}

enum Way { kPack, kUnpack, kHash };

template <Way WAY>
__device__ __forceinline__ void work(const Piece* pieces, u32 n, const Fragment* fragments, u64* hashes, u64 tails) {
  const u32 lane = threadIdx.x & 31, warps = gridDim.x * (blockDim.x / 32);
  Words w;
  u64 seed = 0;
  w.derive(seed, lane);
  // Neighbours in the list go to different blocks of threads, so that a short list is
  // spread over all of them.
  for (u32 k = (threadIdx.x / 32) * gridDim.x + blockIdx.x; k < n; k += warps) {
    const Piece p = pieces[k];
    if (p.seed != seed) seed = p.seed, w.derive(seed, lane);
    const bool whole = p.count == 0;
    u64 from = WAY == kUnpack ? p.stage : p.address, to = WAY == kUnpack ? p.address : p.stage;
    if (WAY == kPack && !whole) {
      for (u32 i = 0; i < p.count; i++) {
        const Fragment f = fragments[p.first + i];
        copy_warp(f.stage, f.address, f.bytes, lane);
      }
      __syncwarp();  // what the others wrote is read below
      from = p.stage;
    }
    if (p.bytes > kShortBytes) {
      const u64 h = WAY != kHash && whole ? digest<true>(from, to, p.bytes, w, lane) : digest<false>(from, 0, p.bytes, w, lane);
      if (lane == 0) hashes[k] = h;
    } else if (lane * 16 < p.bytes) {
      const int4 v = load_once(from + lane * 16);
      if (WAY != kHash && whole) store16(to + lane * 16, v);
      if (p.tail) store16(tails + (u64)(p.tail - 1) * kTailBytes + lane * 16, v);
    }
    if (WAY == kUnpack && !whole) {
      for (u32 i = 0; i < p.count; i++) {
        const Fragment f = fragments[p.first + i];
        copy_warp(f.address, f.stage, f.bytes, lane);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(512) maru_pack(const Piece* pieces, u32 n, const Fragment* fragments, u64* hashes, u64 tails) {
  work<kPack>(pieces, n, fragments, hashes, tails);
}
extern "C" __global__ void __launch_bounds__(512) maru_unpack(const Piece* pieces, u32 n, const Fragment* fragments, u64* hashes, u64 tails) {
  work<kUnpack>(pieces, n, fragments, hashes, tails);
}
extern "C" __global__ void __launch_bounds__(512) maru_hash(const Piece* pieces, u32 n, const Fragment* fragments, u64* hashes, u64 tails) {
  work<kHash>(pieces, n, fragments, hashes, tails);
}
