//go:build vmguest

package inside

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/keys"
)

const (
	serverAddress = "127.0.0.1:5555"
	objectCount   = 64
	objectBytes   = 48 << 10
)

func openClient(t *testing.T) *client.Client {
	t.Helper()
	c, err := client.Open(deadline(t), client.Config{
		ServerAddress: serverAddress, InstanceID: t.Name(),
		Namespace: keys.OpaqueNamespace(), Opaque: true,
		PageBytes: 64 << 10, CXLBytes: 16 << 20, RegionBytes: 8 << 20,
		// An emulated processor on a busy host takes seconds for what takes
		// milliseconds elsewhere.
		RPCTimeout: 20 * time.Second, ConnectTimeout: 20 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func object(t *testing.T, i int) (base.Key, []byte) {
	t.Helper()
	k, err := keys.Opaque(keys.TagString, fmt.Appendf(nil, "object %d", i))
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, objectBytes)
	for at := 0; at < len(b); at += 8 {
		binary.LittleEndian.PutUint64(b[at:], uint64(i)<<32|uint64(at))
	}
	return k, b
}

// load reads all objects, checks every byte of those that are there, and returns
// how many that are.
func load(t *testing.T, c *client.Client) int {
	t.Helper()
	items := make([]client.LoadItem, objectCount)
	codes := make([]base.Code, objectCount)
	for i := range items {
		k, b := object(t, i)
		items[i] = client.LoadItem{Key: k, Runs: [][]byte{make([]byte, len(b))}}
	}
	if err := c.Load(deadline(t), items, codes); err != nil {
		t.Fatal(err)
	}
	hits := 0
	for i, code := range codes {
		_, want := object(t, i)
		switch {
		case code == base.CodeMiss:
		case code != base.CodeOK:
			t.Errorf("object %d: code %v", i, code)
		case !bytes.Equal(items[i].Runs[0], want):
			t.Errorf("object %d: wrong bytes", i)
		default:
			hits++
		}
	}
	return hits
}

// TestClientStore stores all objects, reads them back, and ends without a word to
// the server, as a process that is killed does.
func TestClientStore(t *testing.T) {
	c := openClient(t)
	items := make([]client.StoreItem, objectCount)
	codes := make([]base.Code, objectCount)
	for i := range items {
		k, b := object(t, i)
		items[i] = client.StoreItem{Key: k, Runs: [][]byte{b}}
	}
	if err := c.Store(deadline(t), items, codes); err != nil {
		t.Fatal(err)
	}
	for i, code := range codes {
		if code != base.CodeOK && code != base.CodeAlreadyStored {
			t.Fatalf("object %d: code %v", i, code)
		}
	}
	if n := load(t, c); n != objectCount {
		t.Errorf("%d of %d objects are there for their own writer", n, objectCount)
	}
}

// TestClientLoad reads, in another process, what TestClientStore left.
func TestClientLoad(t *testing.T) {
	c := openClient(t)
	if n := load(t, c); n != objectCount {
		t.Errorf("%d of %d objects are there", n, objectCount)
	}
	if err := c.Close(deadline(t)); err != nil {
		t.Error(err)
	}
}

// TestClientCold: after a restart of the server nothing is there, and nothing is
// wrong.
func TestClientCold(t *testing.T) {
	c := openClient(t)
	if n := load(t, c); n != 0 {
		t.Errorf("%d of %d objects are there; a new server knows none", n, objectCount)
	}
	if err := c.Close(deadline(t)); err != nil {
		t.Error(err)
	}
}
