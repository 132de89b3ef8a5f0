//go:build linux

#include "textflag.h"

// func ctr() uint64
TEXT ·ctr(SB), NOSPLIT, $0-8
	MRS  CTR_EL0, R0
	MOVD R0, ret+0(FP)
	RET

// func clean(first unsafe.Pointer, count, lineBytes uintptr)
TEXT ·clean(SB), NOSPLIT, $0-24
	MOVD first+0(FP), R0
	MOVD count+8(FP), R1
	MOVD lineBytes+16(FP), R2

loop:
	DC   CVAC, R0
	ADD  R2, R0
	SUBS $1, R1
	BNE  loop
	RET

// func cleanInvalidate(first unsafe.Pointer, count, lineBytes uintptr)
TEXT ·cleanInvalidate(SB), NOSPLIT, $0-24
	MOVD first+0(FP), R0
	MOVD count+8(FP), R1
	MOVD lineBytes+16(FP), R2

loop:
	DC   CIVAC, R0
	ADD  R2, R0
	SUBS $1, R1
	BNE  loop
	RET

// func barrier()
TEXT ·barrier(SB), NOSPLIT, $0-0
	DSB $15
	RET
