// Package gpu is the CUDA driver behind internal/gpu/engine: contexts, streams, events,
// registrations and the kernels, as few calls as the engine needs. libcuda.so.1 is opened
// at run time; nothing of CUDA is needed to build, and a machine without a driver gets
// base.ErrUnsupported with a sentence.
//
// It decides nothing: which bytes go where is the engine's, when memory may be unmapped
// its caller's. The kernels (kernels.cu, made into kernels.ptx by scripts/ptx.sh) trust
// the lists that they are given.
//
// What must hold, and why:
//
//	D1. Every call pushes the device's primary context and pops it within one C call: a
//	    context belongs to an OS thread, a goroutine does not. A lane's goroutine keeps
//	    its thread, and the context on it.
//	D2. Every call relaxes the thread's capture mode first: another thread may be
//	    capturing a graph, which an ordinary call would break.
//	D3. No event is recorded in a stream that is being captured.
//	D4. A lane naps in C: the sleep of an idle Go runtime is a thousand times too long.
//	D5. Nothing is called at the end of the process: the driver may have left already.
//	D6. No Go pointer stays in C: lists live in memory of the driver.
package gpu
