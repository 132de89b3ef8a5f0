package hot

import (
	"github.com/xcena-dev/maru/internal/base"
)

// Mode says how a batch goes on after a miss.
type Mode uint8

// Modes of Probe and Acquire.
const (
	ModeEach   Mode = 0 // every item is answered
	ModePrefix Mode = 1 // ordered: the answer stops at the first item that is no hit
)

// Verdict is the answer for one key and one requester (RPC-24): two bits of
// status, three bits of the medium of the chosen replica.
type Verdict uint8

// Statuses of a verdict.
const (
	Miss     Verdict = 0
	Pending  Verdict = 1
	Hit      Verdict = 2
	NotTried Verdict = 3 // behind the first miss of a prefix

	statusMask  Verdict = 3
	maxVerdict  Verdict = 31
	mediumShift         = 2
)

// MakeHit is a hit in a medium.
func MakeHit(m base.Medium) Verdict { return Hit | Verdict(m)<<mediumShift }

// Status returns Miss, Pending, Hit or NotTried.
func (v Verdict) Status() Verdict { return v & statusMask }

// Medium returns the medium of a hit.
func (v Verdict) Medium() base.Medium { return base.Medium(v >> mediumShift & 7) }

// ProbeRequest asks which keys this requester could read. It reserves nothing;
// with a RequestID its hits are kept from eviction by request leases.
//
// With targets, key i is expanded to the shards 0..len(targets)-1, shard s is
// judged with the domains of target session s, and the key is a hit when all are
// (RPC-25). Without targets keys are taken as they are, for the caller.
type ProbeRequest struct {
	Operation
	RequestID uint64 // 0: no request leases
	Namespace base.NamespaceNumber
	Mode      Mode
	Targets   []byte // packed session ids, 16 bytes each
	Keys      Keys
}

// TargetCount returns the count of target workers.
func (m *ProbeRequest) TargetCount() int { return len(m.Targets) / base.IDBytes }

// Target copies the session id of shard s out.
func (m *ProbeRequest) Target(s int) base.SessionID {
	return base.SessionID(m.Targets[s*base.IDBytes : (s+1)*base.IDBytes])
}

// AppendProbe appends the whole frame.
func AppendProbe(dst []byte, id uint64, m *ProbeRequest) []byte {
	start := len(dst)
	dst = appendHeader(dst, OpProbe, 0, id)
	dst = m.Operation.append(dst)
	dst = le.AppendUint64(dst, m.RequestID)
	dst = le.AppendUint32(dst, uint32(m.Namespace))
	dst = le.AppendUint32(dst, uint32(m.Keys.Len()))    //nolint:gosec // the decoder bounds it
	dst = le.AppendUint16(dst, uint16(m.TargetCount())) //nolint:gosec // the decoder bounds it
	dst = append(dst, byte(m.Mode), 0, 0, 0, 0, 0)
	dst = append(dst, m.Targets...)
	dst = append(dst, m.Keys...)
	return finish(dst, start)
}

// DecodeProbe decodes a request. Keys and Targets are views of payload.
func DecodeProbe(payload []byte, m *ProbeRequest) error {
	c := cursor{b: payload}
	m.Operation = c.operation()
	m.RequestID = c.u64()
	m.Namespace = base.NamespaceNumber(c.u32())
	keys := c.u32()
	targets := c.u16()
	m.Mode = Mode(c.u8())
	c.zero(5)
	m.Targets = c.rows(uint32(targets), base.IDBytes, MaxShards)
	m.Keys = c.rows(keys, base.KeyBytes, MaxKeys)
	if m.Mode > ModePrefix || m.Keys.Len()*max(1, m.TargetCount()) > MaxExpandedKeys {
		c.bad = true
	}
	return c.end(OpProbe, "request")
}

// ProbeAnswer has one verdict a key.
type ProbeAnswer struct {
	LeadingHits uint32 // hits before the first that is none
	Verdicts    []byte // one Verdict a key
}

// AppendProbeAnswer appends the whole frame.
func AppendProbeAnswer(dst []byte, id uint64, m *ProbeAnswer) []byte {
	start := len(dst)
	dst = appendOK(dst, OpProbe, id)
	dst = le.AppendUint32(dst, m.LeadingHits)
	dst = le.AppendUint32(dst, uint32(len(m.Verdicts))) //nolint:gosec // at most MaxKeys
	dst = append(dst, m.Verdicts...)
	dst = appendPad(dst, start+HeaderBytes)
	return finish(dst, start)
}

// DecodeProbeAnswer decodes an answer, or the error in it.
func DecodeProbeAnswer(payload []byte, m *ProbeAnswer) error {
	c := cursor{b: payload}
	if err := c.answer(OpProbe); err != nil {
		return err
	}
	m.LeadingHits = c.u32()
	m.Verdicts = c.rows(c.u32(), 1, MaxKeys)
	c.atMost(m.Verdicts, byte(maxVerdict))
	if uint64(m.LeadingHits) > uint64(len(m.Verdicts)) {
		c.bad = true
	}
	return c.end(OpProbe, "answer")
}

// RequestsAction is what happens to request leases.
type RequestsAction uint8

// Actions.
const (
	RequestsRefresh RequestsAction = 1
	RequestsEnd     RequestsAction = 2
)

// RequestsRequest refreshes or ends the request leases of engine requests.
type RequestsRequest struct {
	Operation
	Action RequestsAction
	IDs    []byte // packed u64 request ids
}

// Count returns the count of request ids.
func (m *RequestsRequest) Count() int { return len(m.IDs) / 8 }

// ID returns request id i.
func (m *RequestsRequest) ID(i int) uint64 { return le.Uint64(m.IDs[8*i:]) }

// AppendRequests appends the whole frame.
func AppendRequests(dst []byte, id uint64, m *RequestsRequest) []byte {
	start := len(dst)
	dst = appendHeader(dst, OpRequests, 0, id)
	dst = m.Operation.append(dst)
	dst = le.AppendUint32(dst, uint32(m.Count())) //nolint:gosec // the decoder bounds it
	dst = append(dst, byte(m.Action), 0, 0, 0)
	dst = append(dst, m.IDs...)
	return finish(dst, start)
}

// DecodeRequests decodes a request.
func DecodeRequests(payload []byte, m *RequestsRequest) error {
	c := cursor{b: payload}
	m.Operation = c.operation()
	n := c.u32()
	m.Action = RequestsAction(c.u8())
	c.zero(3)
	m.IDs = c.rows(n, 8, MaxKeys)
	if m.Action != RequestsRefresh && m.Action != RequestsEnd {
		c.bad = true
	}
	return c.end(OpRequests, "request")
}

// RequestsAnswer says how many of the ids were known.
type RequestsAnswer struct{ Known uint32 }

// AppendRequestsAnswer appends the whole frame.
func AppendRequestsAnswer(dst []byte, id uint64, m *RequestsAnswer) []byte {
	start := len(dst)
	dst = appendOK(dst, OpRequests, id)
	dst = le.AppendUint32(dst, m.Known)
	dst = append(dst, zeros[:4]...)
	return finish(dst, start)
}

// DecodeRequestsAnswer decodes an answer, or the error in it.
func DecodeRequestsAnswer(payload []byte, m *RequestsAnswer) error {
	c := cursor{b: payload}
	if err := c.answer(OpRequests); err != nil {
		return err
	}
	m.Known = c.u32()
	c.zero(4)
	return c.end(OpRequests, "answer")
}
