#include "textflag.h"

#define LINES(INSTRUCTION) \
	MOVQ first+0(FP), DI;      \
	MOVQ count+8(FP), CX;      \
	MOVQ lineBytes+16(FP), AX; \
loop:                       \
	INSTRUCTION (DI);          \
	ADDQ AX, DI;               \
	DECQ CX;                   \
	JNZ  loop;                 \
	RET

// func clwb(first unsafe.Pointer, count, lineBytes uintptr)
TEXT ·clwb(SB), NOSPLIT, $0-24
	LINES(CLWB)

// func clflushopt(first unsafe.Pointer, count, lineBytes uintptr)
TEXT ·clflushopt(SB), NOSPLIT, $0-24
	LINES(CLFLUSHOPT)

// func clflush(first unsafe.Pointer, count, lineBytes uintptr)
TEXT ·clflush(SB), NOSPLIT, $0-24
	LINES(CLFLUSH)

// func sfence()
TEXT ·sfence(SB), NOSPLIT, $0-0
	SFENCE
	RET

// func mfence()
TEXT ·mfence(SB), NOSPLIT, $0-0
	MFENCE
	RET

// func cpuid(leaf, sub uint32) (a, b, c, d uint32)
TEXT ·cpuid(SB), NOSPLIT, $0-24
	MOVL leaf+0(FP), AX
	MOVL sub+4(FP), CX
	CPUID
	MOVL AX, a+8(FP)
	MOVL BX, b+12(FP)
	MOVL CX, c+16(FP)
	MOVL DX, d+20(FP)
	RET
