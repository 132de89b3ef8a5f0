package hot

import (
	"fmt"
	"strings"

	"github.com/xcena-dev/maru/internal/base"
)

// Keys is a packed array of object keys, 32 bytes each.
type Keys []byte

// Len returns the count of keys.
func (k Keys) Len() int { return len(k) / base.KeyBytes }

// At copies key i out.
func (k Keys) At(i int) base.Key { return base.Key(k[i*base.KeyBytes : (i+1)*base.KeyBytes]) }

// AppendKeys packs keys.
func AppendKeys(dst []byte, keys []base.Key) []byte {
	for i := range keys {
		dst = append(dst, keys[i][:]...)
	}
	return dst
}

// cursor walks a payload; every get checks the length, the first failure sticks.
type cursor struct {
	b   []byte
	bad bool
}

func (c *cursor) take(n int) []byte {
	if c.bad || n < 0 || n > len(c.b) {
		c.bad = true
		return nil
	}
	out := c.b[:n:n]
	c.b = c.b[n:]
	return out
}

func (c *cursor) u8() uint8 {
	if b := c.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (c *cursor) u16() uint16 {
	if b := c.take(2); b != nil {
		return le.Uint16(b)
	}
	return 0
}

func (c *cursor) u32() uint32 {
	if b := c.take(4); b != nil {
		return le.Uint32(b)
	}
	return 0
}

func (c *cursor) u64() uint64 {
	if b := c.take(8); b != nil {
		return le.Uint64(b)
	}
	return 0
}

// zero takes n bytes that must be zero: room for later fields.
func (c *cursor) zero(n int) {
	for _, v := range c.take(n) {
		if v != 0 {
			c.bad = true
		}
	}
}

// rows takes count rows of size bytes and the zero bytes up to the next multiple of 8.
func (c *cursor) rows(count uint32, size, maxCount int) []byte {
	if int64(count) > int64(maxCount) {
		c.bad = true
		return nil
	}
	out := c.take(int(count) * size)
	c.zero(pad8(int(count) * size))
	return out
}

// reserved checks that bytes [from, to) of every row of size bytes are zero. A
// row with something in its reserved bytes comes from a peer that means more than
// this side understands, and encodings stay canonical: one message, one frame.
func (c *cursor) reserved(rows []byte, size, from, to int) {
	var sum byte
	for ; len(rows) >= size; rows = rows[size:] {
		for _, v := range rows[from:to] {
			sum |= v
		}
	}
	c.bad = c.bad || sum != 0
}

// atMost checks that no byte of an array is above limit.
func (c *cursor) atMost(bytes []byte, limit byte) {
	var top byte
	for _, v := range bytes {
		top = max(top, v)
	}
	c.bad = c.bad || top > limit
}

// end checks that everything was read.
func (c *cursor) end(op Op, what string) error {
	if c.bad || len(c.b) != 0 {
		return fmt.Errorf("%w: hot %s %s does not decode", base.ErrInvalid, op, what)
	}
	return nil
}

// pad8 is the count of bytes from n to the next multiple of 8.
func pad8(n int) int { return -n & 7 }

var zeros [8]byte

func appendPad(dst []byte, payloadStart int) []byte {
	return append(dst, zeros[:pad8(len(dst)-payloadStart)]...)
}

// Operation is the first 16 bytes of every request after Hello: the operation's
// sequence (0: the request changes nothing) and the client's watermark (every
// lower operation is resolved).
type Operation struct {
	Sequence  base.Sequence
	Watermark base.Sequence
}

func (o Operation) append(dst []byte) []byte {
	dst = le.AppendUint64(dst, uint64(o.Sequence))
	return le.AppendUint64(dst, uint64(o.Watermark))
}

func (c *cursor) operation() Operation {
	return Operation{Sequence: base.Sequence(c.u64()), Watermark: base.Sequence(c.u64())}
}

// AppendError appends a whole answer frame that reports an error. Texts are cut
// at 512 bytes.
func AppendError(dst []byte, op Op, id uint64, err error) []byte {
	text := strings.ToValidUTF8(err.Error(), "?")
	if len(text) > 512 {
		text = strings.ToValidUTF8(text[:512], "")
	}
	start := len(dst)
	dst = appendHeader(dst, op, FlagAnswer, id)
	dst = le.AppendUint32(dst, uint32(base.CodeOf(err)))
	dst = le.AppendUint32(dst, uint32(len(text))) //nolint:gosec // cut above
	dst = append(dst, text...)
	return finish(dst, start)
}

// appendOK starts a successful answer: code 0, text length 0.
func appendOK(dst []byte, op Op, id uint64) []byte {
	dst = appendHeader(dst, op, FlagAnswer, id)
	return append(dst, zeros[:]...)
}

// answer takes the first 8 bytes of an answer and returns the error in it.
func (c *cursor) answer(op Op) error {
	code, n := c.u32(), c.u32()
	if c.bad {
		return c.end(op, "answer")
	}
	if code == 0 {
		if n != 0 {
			c.bad = true
		}
		return nil
	}
	text := c.take(int(min(n, 1024)))
	if err := c.end(op, "error answer"); err != nil {
		return err
	}
	return base.Errorf(base.Code(code), string(text))
}
