package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/rpc"
)

// hotClient is a raw client of the hot plane, for tests: one connection, no retries.
type hotClient struct {
	conn      net.Conn
	reader    *hot.Reader
	challenge hot.Challenge
	hello     hot.Hello
	welcome   hot.Welcome
	secret    []byte
	id        uint64
	buf       []byte
}

// dialHot connects and reads the challenge.
func dialHot(address string) (*hotClient, error) {
	network := "tcp"
	if address != "" && address[0] == '/' {
		network = "unix"
	}
	conn, err := net.DialTimeout(network, address, 5*time.Second)
	if err != nil {
		return nil, err
	}
	c := &hotClient{conn: conn, reader: hot.NewReader(conn)}
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	h, payload, err := c.reader.Next()
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	if h.Op != hot.OpChallenge {
		return nil, fmt.Errorf("first frame is %s", h.Op)
	}
	return c, hot.DecodeChallenge(payload, &c.challenge)
}

// prove sends a Hello made by change from the right one.
func (c *hotClient) prove(id base.SessionID, epoch base.Epoch, secret []byte, change func(*hot.Hello)) error {
	c.secret = secret
	c.hello = hot.Hello{Session: id, Epoch: epoch, ServerEpoch: c.challenge.ServerEpoch}
	_, _ = rand.Read(c.hello.Nonce[:])
	c.hello.MAC = hot.HelloMAC(secret, &c.challenge, &c.hello)
	if change != nil {
		change(&c.hello)
	}
	payload, err := c.roundTrip(hot.AppendHello(nil, 1, &c.hello))
	if err != nil {
		return err
	}
	if err := hot.DecodeWelcome(payload, &c.welcome); err != nil {
		return err
	}
	if !hot.EqualMAC(c.welcome.MAC, hot.WelcomeMAC(secret, &c.challenge, &c.hello)) {
		return errors.New("the server's proof does not hold")
	}
	return nil
}

func (c *hotClient) roundTrip(frame []byte) ([]byte, error) {
	if _, err := c.conn.Write(frame); err != nil {
		return nil, err
	}
	h, payload, err := c.reader.Next()
	if err != nil {
		return nil, err
	}
	if h.Flags != hot.FlagAnswer {
		return nil, fmt.Errorf("frame %+v is no answer", h)
	}
	return payload, nil
}

func (c *hotClient) close() { _ = c.conn.Close() }

func (c *hotClient) probe(m *hot.ProbeRequest) (hot.ProbeAnswer, error) {
	var a hot.ProbeAnswer
	c.id++
	c.buf = hot.AppendProbe(c.buf[:0], c.id, m)
	payload, err := c.roundTrip(c.buf)
	if err == nil {
		err = hot.DecodeProbeAnswer(payload, &a)
	}
	return a, err
}

func (c *hotClient) acquire(m *hot.AcquireRequest) (hot.AcquireAnswer, error) {
	var a hot.AcquireAnswer
	c.id++
	c.buf = hot.AppendAcquire(c.buf[:0], c.id, m)
	payload, err := c.roundTrip(c.buf)
	if err == nil {
		err = hot.DecodeAcquireAnswer(payload, &a)
	}
	return a, err
}

func (c *hotClient) release(m *hot.ReleaseRequest) (hot.ReleaseAnswer, error) {
	var a hot.ReleaseAnswer
	c.id++
	c.buf = hot.AppendRelease(c.buf[:0], c.id, m)
	payload, err := c.roundTrip(c.buf)
	if err == nil {
		err = hot.DecodeReleaseAnswer(payload, &a)
	}
	return a, err
}

func (c *hotClient) commit(m *hot.CommitRequest) (hot.CommitResults, error) {
	c.id++
	c.buf = hot.AppendCommit(c.buf[:0], c.id, m)
	payload, err := c.roundTrip(c.buf)
	if err != nil {
		return nil, err
	}
	return hot.DecodeCommitAnswer(payload)
}

func (c *hotClient) resolve(m *hot.ResolveRequest) (hot.ResolveAnswer, error) {
	var a hot.ResolveAnswer
	c.id++
	payload, err := c.roundTrip(hot.AppendResolve(nil, c.id, m))
	if err == nil {
		err = hot.DecodeResolveAnswer(payload, &a)
	}
	return a, err
}

func (c *hotClient) relist(m *hot.RelistRequest) (hot.RelistAnswer, error) {
	var a hot.RelistAnswer
	c.id++
	payload, err := c.roundTrip(hot.AppendRelist(nil, c.id, m))
	if err == nil {
		err = hot.DecodeRelistAnswer(payload, &a)
	}
	return a, err
}

// client is a whole session: control and hot plane, for tests.
type client struct {
	t       testing.TB
	conn    *grpc.ClientConn
	api     maruv1.MetadataServerClient
	id      base.SessionID
	open    *maruv1.OpenResponse
	hot     *hotClient
	seq     base.Sequence
	beat    uint64
	counter uint32
}

func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func dialControl(t testing.TB, address string) *grpc.ClientConn {
	t.Helper()
	if address[0] == '/' {
		address = "unix:" + address
	}
	conn, err := rpc.Dial(testContext(t), address)
	if err != nil {
		t.Fatalf("dialling %s: %v", address, err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// workerRequest opens a worker of the opaque namespace with a private cpu pool.
func workerRequest(id base.SessionID) *maruv1.OpenRequest {
	return &maruv1.OpenRequest{
		Version: &maruv1.ProtocolVersion{Min: 1, Max: 1}, Capabilities: []string{"cpu_storage_v1"},
		SessionId: id[:], Role: maruv1.Role_ROLE_WORKER, WorldSize: 1,
		NamespaceCbor: opaqueNamespace(), Opaque: true, PieceSize: 64 << 10,
		NodeId: make([]byte, 16), BootId: make([]byte, 16), CpuBytes: 64 << 20,
		WriteOrder: []maruv1.Medium{maruv1.Medium_MEDIUM_CPU}, ReadOrder: []maruv1.Medium{maruv1.Medium_MEDIUM_CPU},
	}
}

// newClient connects and opens; change may alter the request.
func newClient(t testing.TB, control string, change func(*maruv1.OpenRequest)) *client {
	t.Helper()
	c := &client{t: t, conn: dialControl(t, control), id: base.NewID()}
	c.api = maruv1.NewMetadataServerClient(c.conn)
	if err := c.reopen(change); err != nil {
		t.Fatalf("open: %v", err)
	}
	return c
}

func (c *client) reopen(change func(*maruv1.OpenRequest)) error {
	m := workerRequest(c.id)
	if c.open != nil {
		m.PreviousSecret = c.open.GetSecret()
		m.PreviousServerEpoch, m.PreviousEpoch = c.open.GetServerEpoch(), c.open.GetEpoch()
	}
	if change != nil {
		change(m)
	}
	answer, err := c.api.Open(testContext(c.t), m)
	if err == nil {
		c.open = answer
	}
	return err
}

func (c *client) ctx() context.Context {
	return metadata.AppendToOutgoingContext(testContext(c.t),
		"maru-session-bin", string(c.id[:]), "maru-epoch", strconv.Itoa(int(c.open.GetEpoch())),
		"maru-secret-bin", string(c.open.GetSecret()))
}

// connect opens the hot plane at address, "" for the TCP one.
func (c *client) connect(address string) *hotClient {
	c.t.Helper()
	if address == "" {
		address = c.open.GetHotAddress()
	}
	h, err := dialHot(address)
	if err == nil {
		err = h.prove(c.id, base.Epoch(c.open.GetEpoch()), c.open.GetSecret(), nil)
	}
	if err != nil {
		c.t.Fatalf("hot plane at %s: %v", address, err)
	}
	c.t.Cleanup(h.close)
	c.hot = h
	return h
}

func (c *client) next() hot.Operation {
	c.seq++
	return hot.Operation{Sequence: c.seq, Watermark: c.seq}
}

func (c *client) heartbeat() (*maruv1.HeartbeatResponse, error) {
	c.beat++
	return c.api.Heartbeat(c.ctx(), &maruv1.HeartbeatRequest{Sequence: c.beat, Watermark: uint64(c.seq)})
}

func (c *client) expand(medium maruv1.Medium, pages, pageSize uint64) *maruv1.ExpandResponse {
	c.t.Helper()
	op := c.next()
	r, err := c.api.Expand(c.ctx(), &maruv1.ExpandRequest{
		Operation: uint64(op.Sequence), Medium: medium, Bytes: pages * pageSize, PageSize: pageSize, PieceSize: 64 << 10,
	})
	if err != nil {
		c.t.Fatalf("expand: %v", err)
	}
	return r
}

// commitKeys publishes keys into the first pages of a region.
func (c *client) commitKeys(r *maruv1.ExpandResponse, high uint32, keys []base.Key) hot.CommitResults {
	c.t.Helper()
	var rows []byte
	for i, k := range keys {
		c.counter++
		rows = hot.AppendCommitRow(rows, &hot.CommitRow{
			Key: k, Pool: r.GetPoolNumber(), Region: base.RegionID(r.GetHandle().GetRegionId()),
			Offset: uint64(i) * r.GetPlace().GetPageSize(), Length: r.GetPlace().GetPageSize(),
			Generation: base.MakeGeneration(high, c.counter), Checksum: uint64(i) + 1,
		})
	}
	results, err := c.hot.commit(&hot.CommitRequest{
		Operation: c.next(), Namespace: base.NamespaceNumber(c.open.GetNamespaceNumber()), Rows: rows,
	})
	if err != nil {
		c.t.Fatalf("commit: %v", err)
	}
	return results
}

func testKey(i int) base.Key {
	var d base.Digest
	for j := range 8 {
		d[j] = byte(i >> (8 * j))
	}
	d[20] = 1
	return base.MakeKey(d, 0, base.PartAllLayers)
}

func testKeyRange(from, to int) []base.Key {
	keys := make([]base.Key, 0, to-from)
	for i := from; i < to; i++ {
		keys = append(keys, testKey(i))
	}
	return keys
}

// acquireAll leases each key as a manifest of its own.
func (c *client) acquireAll(kind base.LeaseKind, keys []base.Key) (hot.AcquireAnswer, base.Sequence) {
	c.t.Helper()
	var sizes []byte
	for range keys {
		sizes = hot.AppendManifestSize(sizes, 1)
	}
	op := c.next()
	a, err := c.hot.acquire(&hot.AcquireRequest{
		Operation: op, Namespace: base.NamespaceNumber(c.open.GetNamespaceNumber()), Kind: kind, Mode: hot.ModeEach,
		ManifestSizes: sizes, Keys: hot.AppendKeys(nil, keys),
	})
	if err != nil {
		c.t.Fatalf("acquire: %v", err)
	}
	return a, op.Sequence
}

func (c *client) probeHits(keys []base.Key) int {
	c.t.Helper()
	a, err := c.hot.probe(&hot.ProbeRequest{
		Operation: hot.Operation{Watermark: c.seq}, Namespace: base.NamespaceNumber(c.open.GetNamespaceNumber()), Mode: hot.ModeEach,
		Keys: hot.AppendKeys(nil, keys),
	})
	if err != nil {
		c.t.Fatalf("probe: %v", err)
	}
	hits := 0
	for _, v := range a.Verdicts {
		if hot.Verdict(v).Status() == hot.Hit {
			hits++
		}
	}
	return hits
}
