package main

// #include "maru.h"
import "C"

import (
	"math"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/cabi"
)

// The exports check and forward; include/maru.h says what each does. Arrays are
// seen in place, C keeps them for the time of the call.

//export maruGoOpaqueKeys
func maruGoOpaqueKeys(n C.uint64_t, packed *C.char, ends *C.uint64_t, tags, keys *C.uint8_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	count := a.count(uint64(n))
	if a.err != nil {
		return status(a.err)
	}
	e := array[uint64](&a, "ends", ends, count)
	t := array[byte](&a, "tags", tags, count)
	k := array[byte](&a, "keys", keys, count*base.KeyBytes)
	var p []byte
	if a.err == nil && count > 0 {
		p = array[byte](&a, "packed", packed, e[count-1])
	}
	if a.err != nil {
		return status(a.err)
	}
	return status(cabi.OpaqueKeys(p, e, t, k))
}

//export maruGoNamespace
func maruGoNamespace(json *C.char, n C.size_t, cbor *C.uint8_t, limit C.size_t, needed *C.size_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("needed", needed == nil)
	text := array[byte](&a, "json", json, uint64(n))
	buf := array[byte](&a, "cbor", cbor, uint64(limit))
	if a.err != nil {
		return status(a.err)
	}
	size, err := cabi.EncodeNamespace(text, buf)
	*needed = C.size_t(size) //nolint:gosec // a length
	return status(err)
}

//export maruGoRoot
func maruGoRoot(namespaceID, salt *C.uint8_t, n C.size_t, link *C.uint8_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	id := array[byte](&a, "namespace_id", namespaceID, base.NamespaceBytes)
	s := array[byte](&a, "salt", salt, uint64(n))
	out := array[byte](&a, "link", link, base.NamespaceBytes)
	if a.err != nil {
		return status(a.err)
	}
	return status(cabi.Root(id, s, out))
}

//export maruGoChainKeys
func maruGoChainKeys(link *C.uint8_t, first, n C.uint64_t, tokens *C.uint32_t, tokenEnds *C.uint64_t, extras *C.uint8_t,
	extraEnds *C.uint64_t, shard, part C.uint16_t, keys, parents, links *C.uint8_t,
) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	count := a.count(uint64(n))
	if a.err != nil {
		return status(a.err)
	}
	c := cabi.Chunks{
		TokenEnds: array[uint64](&a, "token_ends", tokenEnds, count),
		ExtraEnds: optional[uint64](&a, "extra_ends", extraEnds, count),
		First:     uint64(first), Shard: uint16(shard), Part: uint16(part),
	}
	l := array[byte](&a, "link", link, base.NamespaceBytes)
	outKeys := optional[byte](&a, "keys", keys, count*base.KeyBytes)
	outParents := optional[byte](&a, "parents", parents, count*base.DigestBytes)
	outLinks := optional[byte](&a, "links", links, count*base.NamespaceBytes)
	if a.err == nil && count > 0 {
		total := c.TokenEnds[count-1]
		if total > math.MaxInt64/4 {
			a.fail("token_ends: %d tokens", total)
		} else {
			c.Tokens = array[byte](&a, "tokens", tokens, 4*total)
		}
		if c.ExtraEnds != nil {
			c.Extras = array[byte](&a, "extras", extras, c.ExtraEnds[count-1])
		}
	}
	if a.err != nil {
		return status(a.err)
	}
	return status(cabi.ChainKeys(l, c, outKeys, outParents, outLinks))
}

//export maruGoOpen
func maruGoOpen(text *C.char, n C.size_t, client *C.maru_handle) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("client", client == nil)
	t := array[byte](&a, "config_json", text, uint64(n))
	if a.err != nil {
		return status(a.err)
	}
	h, err := library.Open(t)
	*client = C.maru_handle(h)
	return status(err)
}

//export maruGoClose
func maruGoClose(client C.maru_handle, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	return status(library.Close(uint64(client), int64(timeoutMS)))
}

//export maruGoInfo
func maruGoInfo(client C.maru_handle, buf *C.char, limit C.size_t, needed *C.size_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	b := a.text(buf, limit, needed)
	if a.err != nil {
		return status(a.err)
	}
	n, err := library.Info(uint64(client), b)
	*needed = C.size_t(n) //nolint:gosec // a length
	return status(err)
}

//export maruGoStats
func maruGoStats(client C.maru_handle, buf *C.char, limit C.size_t, needed *C.size_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	b := a.text(buf, limit, needed)
	if a.err != nil {
		return status(a.err)
	}
	n, err := library.Stats(uint64(client), b)
	*needed = C.size_t(n) //nolint:gosec // a length
	return status(err)
}

//export maruGoUsage
func maruGoUsage(client C.maru_handle, buf *C.char, limit C.size_t, needed *C.size_t, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	b := a.text(buf, limit, needed)
	if a.err != nil {
		return status(a.err)
	}
	n, err := library.Usage(uint64(client), int64(timeoutMS), b)
	*needed = C.size_t(n) //nolint:gosec // a length
	return status(err)
}

//export maruGoPing
func maruGoPing(client C.maru_handle, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	return status(library.Ping(uint64(client), int64(timeoutMS)))
}

//export maruGoWaitLog
func maruGoWaitLog(client C.maru_handle, timeoutMS C.int64_t, buf *C.char, limit C.size_t, needed *C.size_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	b := a.text(buf, limit, needed)
	if a.err != nil {
		return status(a.err)
	}
	n, err := library.WaitLog(uint64(client), int64(timeoutMS), b)
	*needed = C.size_t(n) //nolint:gosec // a length
	return status(err)
}

//export maruGoProbe
func maruGoProbe(client C.maru_handle, n C.uint64_t, keys *C.uint8_t, mode, nTargets C.uint32_t, targets *C.uint8_t,
	requestID C.uint64_t, verdicts *C.uint8_t, leading *C.uint64_t, timeoutMS C.int64_t,
) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("leading", leading == nil)
	count := a.count(uint64(n))
	a.count(uint64(nTargets))
	if a.err != nil {
		return status(a.err)
	}
	k := array[byte](&a, "keys", keys, count*base.KeyBytes)
	t := array[byte](&a, "targets", targets, uint64(nTargets)*base.IDBytes)
	v := array[byte](&a, "verdicts", verdicts, count)
	if a.err != nil {
		return status(a.err)
	}
	hits, err := library.Probe(uint64(client), k, uint32(mode), t, uint64(requestID), v, int64(timeoutMS))
	*leading = C.uint64_t(hits) //nolint:gosec // a count
	return status(err)
}

//export maruGoRequests
func maruGoRequests(client C.maru_handle, action C.uint32_t, n C.uint64_t, ids *C.uint64_t, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	i := array[uint64](&a, "ids", ids, a.count(uint64(n)))
	if a.err != nil {
		return status(a.err)
	}
	return status(library.Requests(uint64(client), uint32(action), i, int64(timeoutMS)))
}

//export maruGoSubmitLookup
func maruGoSubmitLookup(client C.maru_handle, n C.uint64_t, keys *C.uint8_t, workers, replicas C.uint32_t,
	requestID C.uint64_t, timeoutMS C.int64_t, job *C.maru_handle,
) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("job", job == nil)
	count := a.count(uint64(n))
	if a.err != nil {
		return status(a.err)
	}
	k := array[byte](&a, "keys", keys, count*base.KeyBytes)
	if a.err != nil {
		return status(a.err)
	}
	id, err := library.SubmitLookup(uint64(client), k, uint32(workers), uint32(replicas), uint64(requestID), int64(timeoutMS))
	*job = C.maru_handle(id)
	return status(err)
}

//export maruGoSubmitRequests
func maruGoSubmitRequests(client C.maru_handle, action C.uint32_t, n C.uint64_t, ids *C.uint64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	i := array[uint64](&a, "ids", ids, a.count(uint64(n)))
	if a.err != nil {
		return status(a.err)
	}
	return status(library.SubmitRequests(uint64(client), uint32(action), i))
}

//export maruGoTargets
func maruGoTargets(client C.maru_handle, limit C.uint32_t, sessions *C.uint8_t, count *C.uint32_t, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("count", count == nil)
	s := array[byte](&a, "sessions", sessions, uint64(limit)*base.IDBytes)
	if a.err != nil {
		return status(a.err)
	}
	n, err := library.Targets(uint64(client), s, int64(timeoutMS))
	*count = C.uint32_t(n) //nolint:gosec // a count
	return status(err)
}

//export maruGoDelete
func maruGoDelete(client C.maru_handle, n C.uint64_t, keys *C.uint8_t, codes *C.int32_t, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	k, c, err := keysAndCodes(n, keys, codes)
	if err != nil {
		return status(err)
	}
	return status(library.Delete(uint64(client), k, c, int64(timeoutMS)))
}

// keysAndCodes are the arrays of most batches. base.Code and int32 are one size,
// and all codes are positive.
func keysAndCodes(n C.uint64_t, keys *C.uint8_t, codes *C.int32_t) ([]byte, []base.Code, error) {
	var a args
	count := a.count(uint64(n))
	if a.err != nil {
		return nil, nil, a.err
	}
	k := array[byte](&a, "keys", keys, count*base.KeyBytes)
	c := array[base.Code](&a, "codes", codes, count)
	return k, c, a.err
}

//export maruGoAlloc
func maruGoAlloc(client C.maru_handle, n C.uint32_t, out *C.maru_page, count *C.uint32_t, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	a.need("count", count == nil)
	pages := array[cabi.Page](&a, "out", out, a.count(uint64(n)))
	if a.err != nil {
		return status(a.err)
	}
	got, err := library.Alloc(uint64(client), pages, int64(timeoutMS))
	*count = C.uint32_t(got) //nolint:gosec // a count
	return status(err)
}

//export maruGoFree
func maruGoFree(client C.maru_handle, n C.uint64_t, regions, indices *C.uint32_t, codes *C.int32_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	count := a.count(uint64(n))
	r := array[uint32](&a, "regions", regions, count)
	i := array[uint32](&a, "indices", indices, count)
	c := array[base.Code](&a, "codes", codes, count)
	if a.err != nil {
		return status(a.err)
	}
	return status(library.Free(uint64(client), r, i, c))
}

//export maruGoCommit
func maruGoCommit(client C.maru_handle, n C.uint64_t, keys, parents *C.uint8_t, regions, indices *C.uint32_t,
	lengths *C.uint64_t, codes *C.int32_t, timeoutMS C.int64_t,
) (rc C.int32_t) {
	defer contain(&rc)
	k, c, err := keysAndCodes(n, keys, codes)
	if err != nil {
		return status(err)
	}
	var a args
	count := uint64(n)
	p := optional[byte](&a, "parents", parents, count*base.DigestBytes)
	r := array[uint32](&a, "regions", regions, count)
	i := array[uint32](&a, "indices", indices, count)
	l := array[uint64](&a, "lengths", lengths, count)
	if a.err != nil {
		return status(a.err)
	}
	return status(library.Commit(uint64(client), k, p, r, i, l, c, int64(timeoutMS)))
}

//export maruGoRetrieve
func maruGoRetrieve(client C.maru_handle, n C.uint64_t, keys *C.uint8_t, mode C.uint32_t, out *C.maru_view, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	count := a.count(uint64(n))
	if a.err != nil {
		return status(a.err)
	}
	k := array[byte](&a, "keys", keys, count*base.KeyBytes)
	v := array[cabi.View](&a, "out", out, count)
	if a.err != nil {
		return status(a.err)
	}
	return status(library.Retrieve(uint64(client), k, uint32(mode), v, int64(timeoutMS)))
}

//export maruGoReleaseViews
func maruGoReleaseViews(client C.maru_handle, n C.uint64_t, ids *C.uint64_t) (rc C.int32_t) {
	defer contain(&rc)
	var a args
	i := array[uint64](&a, "ids", ids, a.count(uint64(n)))
	if a.err != nil {
		return status(a.err)
	}
	return status(library.ReleaseViews(uint64(client), i))
}

//export maruGoPin
func maruGoPin(client C.maru_handle, n C.uint64_t, keys *C.uint8_t, mode C.uint32_t, codes *C.int32_t, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	k, c, err := keysAndCodes(n, keys, codes)
	if err != nil {
		return status(err)
	}
	return status(library.Pin(uint64(client), k, uint32(mode), c, int64(timeoutMS)))
}

//export maruGoUnpin
func maruGoUnpin(client C.maru_handle, n C.uint64_t, keys *C.uint8_t, codes *C.int32_t, timeoutMS C.int64_t) (rc C.int32_t) {
	defer contain(&rc)
	k, c, err := keysAndCodes(n, keys, codes)
	if err != nil {
		return status(err)
	}
	return status(library.Unpin(uint64(client), k, c, int64(timeoutMS)))
}
