#include "textflag.h"

// Copy loops, and XXH3-64's long-input loop in one with them. Per stripe of 64 bytes:
//
//	key = data ^ secret; lane[i] += lo32(key) * hi32(key); lane[i^1] += data
//
// and after 16 stripes each lane is scrambled: lane = (lane ^ lane>>47 ^ key) * prime.
// Every source byte is loaded once: what is hashed is the register that is stored.
//
// Prefetches run ahead of the hardware's, which stop at the end of a 4 KiB page; the
// distances are measured (docs/rfcs/0004-checksum.md). A prefetch never faults, so
// they may run past the end of a mapping.

#define FUSE_AHEAD 1024
#define COPY_AHEAD 448

// In: SI source, DI destination, R11 the stripe's secret, Y0 Y1 lanes.
#define STRIPE2(o, s, STORE) \
	PREFETCHNTA (FUSE_AHEAD+o)(SI);         \
	VMOVDQU (o)(SI), Y2;                    \
	VMOVDQU (o+32)(SI), Y3;                 \
	VPXOR   (s)(R11), Y2, Y4;               \
	VPXOR   (s+32)(R11), Y3, Y5;            \
	STORE   Y2, (o)(DI);                    \
	STORE   Y3, (o+32)(DI);                 \
	VPSHUFD $0x31, Y4, Y6;                  \
	VPSHUFD $0x31, Y5, Y7;                  \
	VPMULUDQ Y4, Y6, Y6;                    \
	VPMULUDQ Y5, Y7, Y7;                    \
	VPSHUFD $0x4E, Y2, Y2;                  \
	VPSHUFD $0x4E, Y3, Y3;                  \
	VPADDQ  Y2, Y0, Y0;                     \
	VPADDQ  Y3, Y1, Y1;                     \
	VPADDQ  Y6, Y0, Y0;                     \
	VPADDQ  Y7, Y1, Y1

// The same with stores of 16 bytes. STORE is not used.
#define STRIPE4(o, s, STORE) \
	PREFETCHNTA (FUSE_AHEAD+o)(SI);         \
	VMOVDQU (o)(SI), Y2;                    \
	VMOVDQU (o+32)(SI), Y3;                 \
	VPXOR   (s)(R11), Y2, Y4;               \
	VPXOR   (s+32)(R11), Y3, Y5;            \
	VEXTRACTI128 $1, Y2, X9;                \
	VEXTRACTI128 $1, Y3, X10;               \
	VMOVNTDQ X2, (o)(DI);                   \
	VMOVNTDQ X9, (o+16)(DI);                \
	VMOVNTDQ X3, (o+32)(DI);                \
	VMOVNTDQ X10, (o+48)(DI);               \
	VPSHUFD $0x31, Y4, Y6;                  \
	VPSHUFD $0x31, Y5, Y7;                  \
	VPMULUDQ Y4, Y6, Y6;                    \
	VPMULUDQ Y5, Y7, Y7;                    \
	VPSHUFD $0x4E, Y2, Y2;                  \
	VPSHUFD $0x4E, Y3, Y3;                  \
	VPADDQ  Y2, Y0, Y0;                     \
	VPADDQ  Y3, Y1, Y1;                     \
	VPADDQ  Y6, Y0, Y0;                     \
	VPADDQ  Y7, Y1, Y1

// In: R9 secret, Y8 the prime in each lane's low half.
#define SCRAMBLE2(lanes, s) \
	VPSRLQ $47, lanes, Y4;                  \
	VPXOR  lanes, Y4, Y4;                   \
	VPXOR  (s)(R9), Y4, Y4;                 \
	VPSRLQ $32, Y4, Y5;                     \
	VPMULUDQ Y8, Y4, Y4;                    \
	VPMULUDQ Y8, Y5, Y5;                    \
	VPSLLQ $32, Y5, Y5;                     \
	VPADDQ Y4, Y5, lanes

#define ARGUMENTS \
	MOVQ dst+0(FP), DI;                     \
	MOVQ src+8(FP), SI;                     \
	MOVQ stripes+16(FP), CX;                \
	MOVQ at+24(FP), R10;                    \
	MOVQ acc+32(FP), R8;                    \
	MOVQ secret+40(FP), R9;                 \
	MOVL $0x9E3779B1, AX

// The body of every fused loop: single stripes up to a block's begin, whole blocks
// unrolled, single stripes to the end. BLOCK is 16 stripes; SCRAMBLE leaves R9.
#define FUSE_LOOP(STRIPE, SCRAMBLE, STORE) \
check:                                          \
	TESTQ R10, R10;                         \
	JNZ   single;                           \
	CMPQ  CX, $16;                          \
	JB    single;                           \
	MOVQ  R9, R11;                          \
block:                                          \
	STRIPE(0, 0, STORE);                    \
	STRIPE(64, 8, STORE);                   \
	STRIPE(128, 16, STORE);                 \
	STRIPE(192, 24, STORE);                 \
	STRIPE(256, 32, STORE);                 \
	STRIPE(320, 40, STORE);                 \
	STRIPE(384, 48, STORE);                 \
	STRIPE(448, 56, STORE);                 \
	STRIPE(512, 64, STORE);                 \
	STRIPE(576, 72, STORE);                 \
	STRIPE(640, 80, STORE);                 \
	STRIPE(704, 88, STORE);                 \
	STRIPE(768, 96, STORE);                 \
	STRIPE(832, 104, STORE);                \
	STRIPE(896, 112, STORE);                \
	STRIPE(960, 120, STORE);                \
	SCRAMBLE;                               \
	ADDQ  $1024, SI;                        \
	ADDQ  $1024, DI;                        \
	SUBQ  $16, CX;                          \
	CMPQ  CX, $16;                          \
	JAE   block;                            \
	TESTQ CX, CX;                           \
	JZ    done;                             \
single:                                         \
	LEAQ  (R9)(R10*8), R11;                 \
	STRIPE(0, 0, STORE);                    \
	ADDQ  $64, SI;                          \
	ADDQ  $64, DI;                          \
	INCQ  R10;                              \
	CMPQ  R10, $16;                         \
	JNE   next;                             \
	SCRAMBLE;                               \
	XORL  R10, R10;                         \
next:                                           \
	DECQ  CX;                               \
	JNZ   check;                            \
done:

#define SCRAMBLE_AVX2 \
	SCRAMBLE2(Y0, 128);                     \
	SCRAMBLE2(Y1, 160)

#define BEGIN_AVX2 \
	VMOVQ AX, X8;                           \
	VPBROADCASTQ X8, Y8;                    \
	VMOVDQU (R8), Y0;                       \
	VMOVDQU 32(R8), Y1

#define END_AVX2 \
	VMOVDQU Y0, (R8);                       \
	VMOVDQU Y1, 32(R8);                     \
	VZEROUPPER;                             \
	RET

// func fuseStreamAVX2(dst, src *byte, stripes, at int, acc *accumulators, secret *byte)
TEXT ·fuseStreamAVX2(SB), NOSPLIT, $0-48
	ARGUMENTS
	BEGIN_AVX2
	FUSE_LOOP(STRIPE2, SCRAMBLE_AVX2, VMOVNTDQ)
	END_AVX2

// func fuseStream16AVX2(dst, src *byte, stripes, at int, acc *accumulators, secret *byte)
TEXT ·fuseStream16AVX2(SB), NOSPLIT, $0-48
	ARGUMENTS
	BEGIN_AVX2
	FUSE_LOOP(STRIPE4, SCRAMBLE_AVX2, VMOVNTDQ)
	END_AVX2

// func fuseCachedAVX2(dst, src *byte, stripes, at int, acc *accumulators, secret *byte)
TEXT ·fuseCachedAVX2(SB), NOSPLIT, $0-48
	ARGUMENTS
	BEGIN_AVX2
	FUSE_LOOP(STRIPE2, SCRAMBLE_AVX2, VMOVDQU)
	END_AVX2

// In: SI source, DI destination, R11 the stripe's secret, Z0 lanes.
#define STRIPE1(o, s, STORE) \
	PREFETCHNTA (FUSE_AHEAD+o)(SI);         \
	VMOVDQU64 (o)(SI), Z2;                  \
	VPXORQ  (s)(R11), Z2, Z4;               \
	STORE   Z2, (o)(DI);                    \
	VPSHUFD $0x31, Z4, Z6;                  \
	VPMULUDQ Z4, Z6, Z6;                    \
	VPSHUFD $0x4E, Z2, Z2;                  \
	VPADDQ  Z2, Z0, Z0;                     \
	VPADDQ  Z6, Z0, Z0

#define SCRAMBLE_AVX512 \
	VPSRLQ $47, Z0, Z4;                     \
	VPXORQ Z0, Z4, Z4;                      \
	VPXORQ 128(R9), Z4, Z4;                 \
	VPSRLQ $32, Z4, Z5;                     \
	VPMULUDQ Z8, Z4, Z4;                    \
	VPMULUDQ Z8, Z5, Z5;                    \
	VPSLLQ $32, Z5, Z5;                     \
	VPADDQ Z4, Z5, Z0

#define BEGIN_AVX512 \
	VMOVQ AX, X8;                           \
	VPBROADCASTQ X8, Z8;                    \
	VMOVDQU64 (R8), Z0

#define END_AVX512 \
	VMOVDQU64 Z0, (R8);                     \
	VZEROUPPER;                             \
	RET

// func fuseStreamAVX512(dst, src *byte, stripes, at int, acc *accumulators, secret *byte)
TEXT ·fuseStreamAVX512(SB), NOSPLIT, $0-48
	ARGUMENTS
	BEGIN_AVX512
	FUSE_LOOP(STRIPE1, SCRAMBLE_AVX512, VMOVNTDQ)
	END_AVX512

// func fuseCachedAVX512(dst, src *byte, stripes, at int, acc *accumulators, secret *byte)
TEXT ·fuseCachedAVX512(SB), NOSPLIT, $0-48
	ARGUMENTS
	BEGIN_AVX512
	FUSE_LOOP(STRIPE1, SCRAMBLE_AVX512, VMOVDQU64)
	END_AVX512

// func streamAVX2(dst, src *byte, lines int)
TEXT ·streamAVX2(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ lines+16(FP), CX
	SUBQ $2, CX
	JB   odd

pair:
	PREFETCHNTA COPY_AHEAD(SI)
	PREFETCHNTA (COPY_AHEAD+64)(SI)
	VMOVDQU  (SI), Y0
	VMOVDQU  32(SI), Y1
	VMOVDQU  64(SI), Y2
	VMOVDQU  96(SI), Y3
	VMOVNTDQ Y0, (DI)
	VMOVNTDQ Y1, 32(DI)
	VMOVNTDQ Y2, 64(DI)
	VMOVNTDQ Y3, 96(DI)
	ADDQ $128, SI
	ADDQ $128, DI
	SUBQ $2, CX
	JAE  pair

odd:
	ADDQ $2, CX
	JZ   done
	VMOVDQU  (SI), Y0
	VMOVDQU  32(SI), Y1
	VMOVNTDQ Y0, (DI)
	VMOVNTDQ Y1, 32(DI)

done:
	VZEROUPPER
	RET

// func storeFence()
TEXT ·storeFence(SB), NOSPLIT, $0-0
	SFENCE
	RET
