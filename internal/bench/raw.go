package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/keys"
	"github.com/xcena-dev/maru/internal/node"
	"github.com/xcena-dev/maru/internal/rpc"
)

// rawSession is a worker's session without a client around it: the control calls that
// it needs, heartbeats, and bare frames. Its private cpu pool exists in the server's
// books only, so that any count of objects costs this process nothing.
type rawSession struct {
	control *grpc.ClientConn
	api     maruv1.MetadataServerClient
	id      base.SessionID
	open    *maruv1.OpenResponse
	seq     base.Sequence
	pages   uint32 // generations given out
	stop    context.CancelFunc
	wg      sync.WaitGroup
}

// rawPageBytes is the page of raw sessions. Nothing of it is ever touched.
const rawPageBytes = 4096

func openRaw(ctx context.Context, server string, cpuBytes uint64) (_ *rawSession, err error) {
	who, err := node.Read(node.Options{})
	if err != nil {
		return nil, err
	}
	s := &rawSession{id: base.NewID()}
	if s.control, err = rpc.Dial(ctx, server); err != nil {
		return nil, err
	}
	s.api = maruv1.NewMetadataServerClient(s.control)
	cpu := []maruv1.Medium{maruv1.Medium_MEDIUM_CPU}
	s.open, err = s.api.Open(ctx, &maruv1.OpenRequest{
		Version: &maruv1.ProtocolVersion{Min: 1, Max: 1}, Capabilities: []string{"cpu_storage_v1"},
		SessionId: s.id[:], Role: maruv1.Role_ROLE_WORKER, WorldSize: 1, NamespaceCbor: keys.OpaqueNamespace(), Opaque: true,
		PieceSize: 64 << 10, NodeId: who.Node[:], BootId: who.Boot[:], CpuBytes: cpuBytes, WriteOrder: cpu, ReadOrder: cpu,
		InstanceId: "bench",
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("bench: open a session at %s: %w", server, err), s.control.Close())
	}
	beats, stop := context.WithCancel(ctx)
	s.stop = stop
	s.wg.Go(func() { s.beat(beats) })
	return s, nil
}

func (s *rawSession) authorize(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx,
		"maru-session-bin", string(s.id[:]), "maru-epoch", strconv.FormatUint(uint64(s.open.GetEpoch()), 10),
		"maru-secret-bin", string(s.open.GetSecret()))
}

// beat keeps the session alive. A heartbeat that fails shows in the next call.
func (s *rawSession) beat(ctx context.Context) {
	tick := time.NewTicker(time.Duration(max(s.open.GetHeartbeatMs(), 10)) * time.Millisecond)
	defer tick.Stop()
	for n := uint64(1); ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		_, _ = s.api.Heartbeat(s.authorize(ctx), &maruv1.HeartbeatRequest{Sequence: n})
	}
}

// close ends the session; its objects go with it.
func (s *rawSession) close() error {
	s.stop()
	s.wg.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	_, err := s.api.Close(s.authorize(ctx), &maruv1.CloseRequest{Drained: true})
	return errors.Join(err, s.control.Close())
}

func (s *rawSession) next() hot.Operation {
	s.seq++
	return hot.Operation{Sequence: s.seq, Watermark: s.seq}
}

// fill commits the objects first..first+count-1 of keyOf into one new region, by
// frames of 4096 rows.
func (s *rawSession) fill(ctx context.Context, c *rawConn, first, count int) error {
	r, err := s.api.Expand(s.authorize(ctx), &maruv1.ExpandRequest{
		Operation: uint64(s.next().Sequence), Medium: maruv1.Medium_MEDIUM_CPU, Bytes: uint64(count) * rawPageBytes, //nolint:gosec // positive
		PageSize: rawPageBytes, PieceSize: 64 << 10,
	})
	if err != nil {
		return fmt.Errorf("bench: expand: %w", err)
	}
	var rows hot.CommitRows
	for done := 0; done < count; {
		n := min(hot.MaxKeys, count-done)
		rows = rows[:0]
		for i := range n {
			s.pages++
			at := uint64(done + i) //nolint:gosec // positive
			row := objectRow(uint64(first)+at, at*rawPageBytes, base.MakeGeneration(s.open.GetEpoch(), s.pages))
			row.Pool, row.Region = r.GetPoolNumber(), base.RegionID(r.GetHandle().GetRegionId())
			rows = hot.AppendCommitRow(rows, &row)
		}
		results, err := c.commit(&hot.CommitRequest{
			Operation: s.next(), Namespace: base.NamespaceNumber(s.open.GetNamespaceNumber()), Rows: rows,
		})
		if err != nil {
			return fmt.Errorf("bench: commit: %w", err)
		}
		for i := range results.Len() {
			if code := results.At(i).Code; code != base.CodeOK {
				return fmt.Errorf("bench: commit of object %d: %w", done+i, base.ErrorOf(code))
			}
		}
		done += n
	}
	return nil
}

// chainLength is how many objects have the first one's prefix: the others carry a
// parent digest.
const chainLength = 64

// objectRow is the commit of object i.
func objectRow(i, offset uint64, generation base.Generation) hot.CommitRow {
	row := hot.CommitRow{Key: keyOf(i), Offset: offset, Length: rawPageBytes, Generation: generation, Checksum: i + 1}
	if i%chainLength != 0 {
		row.Parent = keyOf(i - 1).Digest()
	}
	return row
}

// keyOf is the key of object i, as random as a digest.
func keyOf(i uint64) base.Key {
	var d base.Digest
	for word := 0; word < len(d); word += 8 {
		x := (i*4 + uint64(word)/8 + 1) * 0x9e3779b97f4a7c15 //nolint:gosec // positive
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		x ^= x >> 31
		for b := word; b < min(word+8, len(d)); b++ {
			d[b] = byte(x >> (8 * (b - word)))
		}
	}
	return base.MakeKey(d, 0, base.PartAllLayers)
}

// rawConn is one hot connection of a session: one call at a time.
type rawConn struct {
	conn      net.Conn
	reader    *hot.Reader
	namespace base.NamespaceNumber
	id        uint64
	buf       []byte
	undo      func() bool
}

// dialRaw connects and proves the session. The connection ends with ctx.
func dialRaw(ctx context.Context, a address, id base.SessionID, open *maruv1.OpenResponse) (_ *rawConn, err error) {
	conn, err := a.dial(ctx)
	if err != nil {
		return nil, err
	}
	c := &rawConn{conn: conn, reader: hot.NewReader(conn)}
	c.undo = context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer func() {
		if err != nil {
			c.close()
			err = fmt.Errorf("bench: hot plane at %s: %w", a.Target, err)
		}
	}()
	h, payload, err := c.reader.Next()
	if err != nil {
		return nil, err
	}
	if h.Op != hot.OpChallenge {
		return nil, fmt.Errorf("%w: the first frame is %s", base.ErrInvalid, h.Op)
	}
	var challenge hot.Challenge
	if err := hot.DecodeChallenge(payload, &challenge); err != nil {
		return nil, err
	}
	hello := hot.Hello{Session: id, Epoch: base.Epoch(open.GetEpoch()), ServerEpoch: challenge.ServerEpoch}
	_, _ = rand.Read(hello.Nonce[:])
	hello.MAC = hot.HelloMAC(open.GetSecret(), &challenge, &hello)
	if payload, err = c.roundTrip(hot.AppendHello(nil, 1, &hello)); err != nil {
		return nil, err
	}
	var welcome hot.Welcome
	if err := hot.DecodeWelcome(payload, &welcome); err != nil {
		return nil, err
	}
	if !hot.EqualMAC(welcome.MAC, hot.WelcomeMAC(open.GetSecret(), &challenge, &hello)) {
		return nil, fmt.Errorf("%w: the server's proof does not hold", base.ErrDenied)
	}
	c.namespace = welcome.Namespace
	return c, nil
}

func (c *rawConn) close() {
	c.undo()
	_ = c.conn.Close()
}

func (c *rawConn) roundTrip(frame []byte) ([]byte, error) {
	if _, err := c.conn.Write(frame); err != nil {
		return nil, err
	}
	h, payload, err := c.reader.Next()
	if err == nil && h.Flags != hot.FlagAnswer {
		err = fmt.Errorf("%w: frame %+v is no answer", base.ErrInvalid, h)
	}
	return payload, err
}

func (c *rawConn) commit(m *hot.CommitRequest) (hot.CommitResults, error) {
	c.id++
	c.buf = hot.AppendCommit(c.buf[:0], c.id, m)
	payload, err := c.roundTrip(c.buf)
	if err != nil {
		return nil, err
	}
	return hot.DecodeCommitAnswer(payload)
}

// probe asks for packed keys and fails unless all are hits.
func (c *rawConn) probe(packed hot.Keys) error {
	c.id++
	c.buf = hot.AppendProbe(c.buf[:0], c.id, &hot.ProbeRequest{Namespace: c.namespace, Keys: packed})
	payload, err := c.roundTrip(c.buf)
	if err != nil {
		return err
	}
	var a hot.ProbeAnswer
	if err := hot.DecodeProbeAnswer(payload, &a); err != nil {
		return err
	}
	if int(a.LeadingHits) != packed.Len() {
		return fmt.Errorf("%w: %d of %d probed keys hit", base.ErrInternal, a.LeadingHits, packed.Len())
	}
	return nil
}

// acquire leases packed keys, a manifest each, and fails unless it gets all.
func (c *rawConn) acquire(op hot.Operation, sizes []byte, packed hot.Keys) error {
	c.id++
	c.buf = hot.AppendAcquire(c.buf[:0], c.id, &hot.AcquireRequest{
		Operation: op, Namespace: c.namespace, Kind: base.LeaseCopy, Mode: hot.ModePrefix, ManifestSizes: sizes, Keys: packed,
	})
	payload, err := c.roundTrip(c.buf)
	if err != nil {
		return err
	}
	var a hot.AcquireAnswer
	if err := hot.DecodeAcquireAnswer(payload, &a); err != nil {
		return err
	}
	if int(a.Manifests) != packed.Len() {
		return fmt.Errorf("%w: %d of %d acquired keys hit", base.ErrInternal, a.Manifests, packed.Len())
	}
	return nil
}

// release ends every lease of an Acquire.
func (c *rawConn) release(op hot.Operation, acquired base.Sequence) error {
	c.id++
	rows := hot.AppendReleaseRow(nil, hot.ReleaseRow{Acquire: acquired, Count: hot.ReleaseAll})
	c.buf = hot.AppendRelease(c.buf[:0], c.id, &hot.ReleaseRequest{Operation: op, Rows: rows})
	payload, err := c.roundTrip(c.buf)
	if err != nil {
		return err
	}
	var a hot.ReleaseAnswer
	if err := hot.DecodeReleaseAnswer(payload, &a); err != nil {
		return err
	}
	if len(a.Held) != 1 || a.Held[0] != 1 {
		return fmt.Errorf("%w: leases were gone before their release", base.ErrInternal)
	}
	return nil
}
