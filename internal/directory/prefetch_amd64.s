#include "textflag.h"

// func prefetchSlot(p *uint64)
TEXT ·prefetchSlot(SB), NOSPLIT, $0-8
	MOVQ       p+0(FP), AX
	PREFETCHT0 (AX)
	RET

// func prefetchHead(p *object)
TEXT ·prefetchHead(SB), NOSPLIT, $0-8
	MOVQ       p+0(FP), AX
	PREFETCHT0 (AX)
	RET

// func prefetchObject(p *object)
TEXT ·prefetchObject(SB), NOSPLIT, $0-8
	MOVQ       p+0(FP), AX
	PREFETCHT0 (AX)
	PREFETCHT0 64(AX)
	RET
