package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/hot"
	"github.com/xcena-dev/maru/internal/keys"
)

// writerOptions of a process that writes objects for others to read.
type writerOptions struct {
	Server      string `json:"server"`
	PageBytes   uint64 `json:"page_bytes"`
	RegionPages uint64 `json:"region_pages"` // of each region
}

// writerOrder is one thing to do with the objects from First on.
type writerOrder struct {
	Do    string `json:"do"` // store: whole pages of bytes; commit: as they are; delete
	First int    `json:"first"`
	Count int    `json:"count"`
}

type writerPart struct {
	opt    writerOptions
	client *client.Client
	value  []byte
}

func startWriterPart(ctx context.Context, raw json.RawMessage) (part, error) {
	p := &writerPart{}
	if err := json.Unmarshal(raw, &p.opt); err != nil {
		return nil, err
	}
	p.value = make([]byte, p.opt.PageBytes)
	for i := range p.value {
		p.value[i] = byte(i*7 + i>>9)
	}
	var err error
	p.client, err = openPages(ctx, p.opt.Server, "bench-writer", p.opt.PageBytes, p.opt.RegionPages, client.On)
	return p, err
}

// openPages opens a client of opaque values on the cxl pool.
func openPages(ctx context.Context, server, name string, pageBytes, regionPages uint64, sums client.Switch) (*client.Client, error) {
	return client.Open(ctx, pagesConfig(server, name, pageBytes, regionPages, sums))
}

func pagesConfig(server, name string, pageBytes, regionPages uint64, sums client.Switch) client.Config {
	return client.Config{
		ServerAddress: server, InstanceID: name, Namespace: keys.OpaqueNamespace(), Opaque: true, PageBytes: pageBytes,
		RegionBytes: pageBytes * regionPages, CopyThreads: 1, Checksums: sums, Prefault: client.Off, Logger: discard(),
	}
}

// ready is the writer's session.
func (p *writerPart) ready() any { return p.client.Session().String() }

// do answers with the count of the client's regions.
func (p *writerPart) do(ctx context.Context, raw json.RawMessage) (any, error) {
	var o writerOrder
	if err := json.Unmarshal(raw, &o); err != nil {
		return nil, err
	}
	var err error
	switch o.Do {
	case "commit":
		err = fillClient(ctx, p.client, o.First, o.Count)
	case "store":
		err = p.store(ctx, o)
	case "delete":
		err = p.remove(ctx, o)
	default:
		err = fmt.Errorf("%w: a writer cannot %q", base.ErrInvalid, o.Do)
	}
	return len(p.client.OwnedRegions()), err
}

func (p *writerPart) store(ctx context.Context, o writerOrder) error {
	codes := make([]base.Code, 1)
	for i := range o.Count {
		item := client.StoreItem{Key: keyOf(uint64(o.First + i)), Runs: [][]byte{p.value}} //nolint:gosec // positive
		if err := p.client.Store(ctx, []client.StoreItem{item}, codes); err != nil {
			return err
		}
		if err := allOK("store", codes); err != nil {
			return err
		}
	}
	return nil
}

func (p *writerPart) remove(ctx context.Context, o writerOrder) error {
	var packed hot.Keys
	for i := range o.Count {
		k := keyOf(uint64(o.First + i)) //nolint:gosec // positive
		packed = append(packed, k[:]...)
	}
	codes := make([]base.Code, o.Count)
	if err := p.client.Delete(ctx, packed, codes); err != nil {
		return err
	}
	return allOK("delete", codes)
}

func (p *writerPart) close() error {
	ctx, cancel := closing()
	defer cancel()
	if p.client == nil {
		return nil
	}
	return errors.Join(p.client.Close(ctx))
}
