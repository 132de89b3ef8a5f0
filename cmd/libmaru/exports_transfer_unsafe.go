package main

// #include "maru.h"
import "C"

import (
	"unsafe"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/cabi"
)

//export maruGoRegionView
func maruGoRegionView(client C.maru_handle, region C.uint32_t, offset, size C.uint64_t, data **C.uint8_t, writable *C.int32_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("data", data == nil)
	a.need("writable", writable == nil)
	if a.err != nil {
		return status(a.err)
	}
	address, w, err := library.RegionView(uint64(client), uint32(region), uint64(offset), uint64(size))
	if err != nil {
		return status(err)
	}
	// A mapping's address, told as the number that it is.
	*(*uintptr)(unsafe.Pointer(data)) = address
	*writable = 0
	if w {
		*writable = 1
	}
	return C.MARU_OK
}

//export maruGoReleaseRegionView
func maruGoReleaseRegionView(client C.maru_handle, region C.uint32_t) (rc C.int32_t) {
	defer contain(&rc)
	return status(library.ReleaseRegionView(uint64(client), uint32(region)))
}

//export maruGoRegionPageCount
func maruGoRegionPageCount(client C.maru_handle, region C.uint32_t, count *C.uint64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	if a.need("count", count == nil); a.err != nil {
		return status(a.err)
	}
	n, err := library.RegionPageCount(uint64(client), uint32(region))
	*count = C.uint64_t(n)
	return status(err)
}

//export maruGoRegionPageBytes
func maruGoRegionPageBytes(client C.maru_handle, region C.uint32_t, size *C.uint64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	if a.need("bytes", size == nil); a.err != nil {
		return status(a.err)
	}
	n, err := library.RegionPageBytes(uint64(client), uint32(region))
	*size = C.uint64_t(n)
	return status(err)
}

//export maruGoRegionFreeCount
func maruGoRegionFreeCount(client C.maru_handle, region C.uint32_t, count *C.uint64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	if a.need("count", count == nil); a.err != nil {
		return status(a.err)
	}
	n, err := library.RegionFreeCount(uint64(client), uint32(region))
	*count = C.uint64_t(n)
	return status(err)
}

//export maruGoOwnedRegions
func maruGoOwnedRegions(client C.maru_handle, limit C.uint32_t, regions, count *C.uint32_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("count", count == nil)
	r := array[uint32](&a, "regions", regions, uint64(limit))
	if a.err != nil {
		return status(a.err)
	}
	n, err := library.OwnedRegions(uint64(client), r)
	*count = C.uint32_t(n) //nolint:gosec // a count
	return status(err)
}

//export maruGoNextRegion
func maruGoNextRegion(client C.maru_handle, cursor *C.uint64_t, region *C.uint32_t, pages *C.uint64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("cursor", cursor == nil)
	a.need("region", region == nil)
	a.need("pages", pages == nil)
	if a.err != nil {
		return status(a.err)
	}
	next, id, count, err := library.NextRegion(uint64(client), uint64(*cursor))
	if err != nil {
		return status(err)
	}
	*cursor, *region, *pages = C.uint64_t(next), C.uint32_t(id), C.uint64_t(count)
	return C.MARU_OK
}

//export maruGoRegisterLayout
func maruGoRegisterLayout(client C.maru_handle, nLayers C.uint32_t, layers *C.maru_layer, offsets *C.int64_t,
	nOffsets C.uint64_t, blockCount C.uint32_t, layout *C.maru_handle,
) (rc C.int32_t) {
	defer contain(&rc)
	return registerLayout(nLayers, layers, offsets, nOffsets, layout, func(y []cabi.Layer, o []int64) (uint64, error) {
		return library.RegisterLayout(uint64(client), y, o, uint32(blockCount))
	})
}

//export maruGoRegisterDeviceLayout
func maruGoRegisterDeviceLayout(client C.maru_handle, device, nLayers C.uint32_t, layers *C.maru_layer, offsets *C.int64_t,
	nOffsets C.uint64_t, blockCount C.uint32_t, layout *C.maru_handle,
) (rc C.int32_t) {
	defer contain(&rc)
	return registerLayout(nLayers, layers, offsets, nOffsets, layout, func(y []cabi.Layer, o []int64) (uint64, error) {
		return library.RegisterDeviceLayout(uint64(client), uint32(device), y, o, uint32(blockCount))
	})
}

//export maruGoDeviceInfo
func maruGoDeviceInfo(client C.maru_handle, buf *C.char, limit C.size_t, needed *C.size_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	b := a.text(buf, limit, needed)
	if a.err != nil {
		return status(a.err)
	}
	n, err := library.DeviceInfo(uint64(client), b)
	*needed = C.size_t(n) //nolint:gosec // a length
	return status(err)
}

func registerLayout(nLayers C.uint32_t, layers *C.maru_layer, offsets *C.int64_t, nOffsets C.uint64_t, layout *C.maru_handle,
	register func(y []cabi.Layer, o []int64) (uint64, error),
) C.int32_t {
	var a args
	a.need("layout", layout == nil)
	y := array[cabi.Layer](&a, "layers", layers, a.count(uint64(nLayers)))
	if uint64(nOffsets) > cabi.MaxParts {
		a.fail("n_offsets is %d, at most %d are allowed", uint64(nOffsets), cabi.MaxParts)
	}
	o := array[int64](&a, "offsets", offsets, uint64(nOffsets))
	if a.err != nil {
		return status(a.err)
	}
	id, err := register(y, o)
	*layout = C.maru_handle(id)
	return status(err)
}

//export maruGoUnregisterLayout
func maruGoUnregisterLayout(client, layout C.maru_handle) (rc C.int32_t) {
	defer contain(&rc)
	return status(library.UnregisterLayout(uint64(client), uint64(layout)))
}

//export maruGoStore
func maruGoStore(client C.maru_handle, batch *C.maru_batch, codes *C.int32_t, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	b := batchOf(&a, batch)
	if a.err != nil {
		return status(a.err)
	}
	c := array[base.Code](&a, "codes", codes, uint64(batch.count))
	if a.err != nil {
		return status(a.err)
	}
	return status(library.Store(uint64(client), b, c, int64(timeoutMS)))
}

//export maruGoLoad
func maruGoLoad(client C.maru_handle, batch *C.maru_batch, codes *C.int32_t, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	b := batchOf(&a, batch)
	if a.err != nil {
		return status(a.err)
	}
	c := array[base.Code](&a, "codes", codes, uint64(batch.count))
	if a.err != nil {
		return status(a.err)
	}
	return status(library.Load(uint64(client), b, c, int64(timeoutMS)))
}

//export maruGoSubmitStore
func maruGoSubmitStore(client C.maru_handle, batch *C.maru_batch, job *C.maru_handle) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("job", job == nil)
	b := batchOf(&a, batch)
	if a.err != nil {
		return status(a.err)
	}
	id, err := library.SubmitStore(uint64(client), b)
	*job = C.maru_handle(id)
	return status(err)
}

//export maruGoSubmitLoad
func maruGoSubmitLoad(client C.maru_handle, batch *C.maru_batch, job *C.maru_handle) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("job", job == nil)
	b := batchOf(&a, batch)
	if a.err != nil {
		return status(a.err)
	}
	id, err := library.SubmitLoad(uint64(client), b)
	*job = C.maru_handle(id)
	return status(err)
}

//export maruGoEventFD
func maruGoEventFD(client C.maru_handle, fd *C.int32_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	if a.need("fd", fd == nil); a.err != nil {
		return status(a.err)
	}
	n, err := library.EventFD(uint64(client))
	*fd = C.int32_t(n) //nolint:gosec // a descriptor
	return status(err)
}

//export maruGoCompleted
func maruGoCompleted(client C.maru_handle, limit C.uint32_t, jobs *C.maru_handle, count *C.uint32_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("count", count == nil)
	j := array[uint64](&a, "jobs", jobs, uint64(limit))
	if a.err != nil {
		return status(a.err)
	}
	n, err := library.Completed(uint64(client), j)
	*count = C.uint32_t(n) //nolint:gosec // a count
	return status(err)
}

//export maruGoJobCopied
func maruGoJobCopied(client, job C.maru_handle) (rc C.int32_t) {
	defer contain(&rc)
	return status(library.JobCopied(uint64(client), uint64(job)))
}

//export maruGoJobResult
func maruGoJobResult(client, job C.maru_handle, limit C.uint32_t, codes *C.int32_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	c := array[base.Code](&a, "codes", codes, a.count(uint64(limit)))
	if a.err != nil {
		return status(a.err)
	}
	return status(library.JobResult(uint64(client), uint64(job), c))
}
