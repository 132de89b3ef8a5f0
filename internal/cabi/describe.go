package cabi

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"unicode"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/xcena-dev/maru/client"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/keys"
)

// Info writes what a client is as JSON into buf.
func (l *Library) Info(h uint64, buf []byte) (needed int, err error) {
	err = l.call(h, "info", func(e *entry) error {
		text, err := json.Marshal(map[string]any{
			"session": e.client.Session().String(), "epoch": e.client.Epoch(), "connected": e.client.Connected(),
			"page_bytes": pageBytes(&e.cfg), "value_bytes": e.cfg.ValueBytes, "piece_bytes": e.cfg.PieceBytes,
			"role": e.cfg.Role.String(), "opaque": e.cfg.Opaque, "server_address": e.cfg.ServerAddress,
		})
		if err != nil {
			return fmt.Errorf("%w: encode info: %w", base.ErrInternal, err)
		}
		needed, err = putText(buf, text)
		return err
	})
	return needed, err
}

// pageBytes is the page that follows from a configuration; 0 for a scheduler.
func pageBytes(c *client.Config) uint64 {
	if c.PageBytes != 0 || c.Opaque || c.ValueBytes == 0 {
		return c.PageBytes
	}
	piece := c.PieceBytes
	if piece == 0 {
		piece = keys.OpaquePieceBytes
	}
	page, err := keys.EnginePageBytes(c.ValueBytes, piece)
	if err != nil {
		return 0 // Open has refused it
	}
	return page
}

// Stats writes a client's counters as JSON into buf.
func (l *Library) Stats(h uint64, buf []byte) (needed int, err error) {
	err = l.call(h, "stats", func(e *entry) error {
		text, err := json.Marshal(snakeFields(e.client.Stats()))
		if err != nil {
			return fmt.Errorf("%w: encode stats: %w", base.ErrInternal, err)
		}
		needed, err = putText(buf, text)
		return err
	})
	return needed, err
}

// DeviceInfo writes the GPU of a client and its counters as JSON into buf.
//
// Errors: ErrNotFound before the first device layout.
func (l *Library) DeviceInfo(h uint64, buf []byte) (needed int, err error) {
	err = l.call(h, "device info", func(e *entry) error {
		info, counts, ok := e.client.DeviceInfo()
		if !ok {
			return fmt.Errorf("%w: no layout of this client lies on a GPU", base.ErrNotFound)
		}
		all := snakeFields(info)
		for k, v := range snakeFields(counts) {
			all[k] = v
		}
		text, err := json.Marshal(all)
		if err != nil {
			return fmt.Errorf("%w: encode device info: %w", base.ErrInternal, err)
		}
		needed, err = putText(buf, text)
		return err
	})
	return needed, err
}

// Usage writes the server's usage as proto3 JSON into buf.
func (l *Library) Usage(h uint64, timeoutMS int64, buf []byte) (needed int, err error) {
	err = l.call(h, "usage", func(e *entry) error {
		ctx, cancel, err := within(timeoutMS)
		if err != nil {
			return err
		}
		defer cancel()
		u, err := e.client.Usage(ctx)
		if err != nil {
			return fmt.Errorf("usage: %w", err)
		}
		text, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(u)
		if err != nil {
			return fmt.Errorf("%w: encode usage: %w", base.ErrInternal, err)
		}
		needed, err = putText(buf, text)
		return err
	})
	return needed, err
}

// snakeFields gives the exported fields of a struct names as JSON users write them.
func snakeFields(v any) map[string]any {
	rv := reflect.ValueOf(v)
	out := make(map[string]any, rv.NumField())
	for i := range rv.NumField() {
		if f := rv.Type().Field(i); f.IsExported() {
			out[snake(f.Name)] = rv.Field(i).Interface()
		}
	}
	return out
}

func snake(name string) string {
	var b strings.Builder
	for i, r := range name {
		if unicode.IsUpper(r) && i > 0 && !unicode.IsUpper(rune(name[i-1])) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
