package hot

import (
	"crypto/hmac"
	"crypto/sha256"

	"github.com/xcena-dev/maru/internal/base"
)

// NonceBytes is the size of the nonces of a handshake; MACBytes of its proofs.
const (
	NonceBytes  = 32
	MACBytes    = sha256.Size
	SecretBytes = 16
)

// Challenge is the server's first frame.
type Challenge struct {
	Nonce       [NonceBytes]byte
	ServerEpoch base.ServerEpoch
}

// AppendChallenge appends the whole frame.
func AppendChallenge(dst []byte, m *Challenge) []byte {
	start := len(dst)
	dst = appendHeader(dst, OpChallenge, 0, 0)
	dst = append(dst, m.Nonce[:]...)
	dst = le.AppendUint64(dst, uint64(m.ServerEpoch))
	dst = append(dst, zeros[:]...)
	return finish(dst, start)
}

// DecodeChallenge decodes a Challenge.
func DecodeChallenge(payload []byte, m *Challenge) error {
	c := cursor{b: payload}
	copy(m.Nonce[:], c.take(NonceBytes))
	m.ServerEpoch = base.ServerEpoch(c.u64())
	c.zero(8)
	return c.end(OpChallenge, "frame")
}

// Hello proves a session to the server and binds the connection to it.
type Hello struct {
	Session     base.SessionID
	Epoch       base.Epoch
	ServerEpoch base.ServerEpoch
	Nonce       [NonceBytes]byte
	MAC         [MACBytes]byte
}

// AppendHello appends the whole frame.
func AppendHello(dst []byte, id uint64, m *Hello) []byte {
	start := len(dst)
	dst = appendHeader(dst, OpHello, 0, id)
	dst = append(dst, m.Session[:]...)
	dst = le.AppendUint32(dst, uint32(m.Epoch))
	dst = append(dst, zeros[:4]...)
	dst = le.AppendUint64(dst, uint64(m.ServerEpoch))
	dst = append(dst, m.Nonce[:]...)
	dst = append(dst, m.MAC[:]...)
	return finish(dst, start)
}

// DecodeHello decodes a Hello.
func DecodeHello(payload []byte, m *Hello) error {
	c := cursor{b: payload}
	copy(m.Session[:], c.take(base.IDBytes))
	m.Epoch = base.Epoch(c.u32())
	c.zero(4)
	m.ServerEpoch = base.ServerEpoch(c.u64())
	copy(m.Nonce[:], c.take(NonceBytes))
	copy(m.MAC[:], c.take(MACBytes))
	return c.end(OpHello, "request")
}

// Welcome is the answer to a Hello.
type Welcome struct {
	Namespace base.NamespaceNumber
	Provable  bool // the server watches this process's pidfd
	MAC       [MACBytes]byte
}

// AppendWelcome appends the whole frame.
func AppendWelcome(dst []byte, id uint64, m *Welcome) []byte {
	start := len(dst)
	dst = appendOK(dst, OpHello, id)
	dst = le.AppendUint32(dst, uint32(m.Namespace))
	var provable uint32
	if m.Provable {
		provable = 1
	}
	dst = le.AppendUint32(dst, provable)
	dst = append(dst, m.MAC[:]...)
	return finish(dst, start)
}

// DecodeWelcome decodes the answer to a Hello, or the error in it.
func DecodeWelcome(payload []byte, m *Welcome) error {
	c := cursor{b: payload}
	if err := c.answer(OpHello); err != nil {
		return err
	}
	m.Namespace = base.NamespaceNumber(c.u32())
	provable := c.u32()
	m.Provable = provable == 1
	c.bad = c.bad || provable > 1
	copy(m.MAC[:], c.take(MACBytes))
	return c.end(OpHello, "answer")
}

// HelloMAC is what a client must show: HMAC-SHA256 under the epoch's secret.
func HelloMAC(secret []byte, ch *Challenge, m *Hello) [MACBytes]byte {
	h := hmac.New(sha256.New, secret)
	h.Write([]byte("maru-hot-hello-v1\x00"))
	h.Write(ch.Nonce[:])
	h.Write(m.Nonce[:])
	h.Write(m.Session[:])
	var n [16]byte
	le.PutUint32(n[:], uint32(m.Epoch))
	le.PutUint64(n[8:], uint64(m.ServerEpoch))
	h.Write(n[:])
	return [MACBytes]byte(h.Sum(nil))
}

// WelcomeMAC is what the server must show in return.
func WelcomeMAC(secret []byte, ch *Challenge, m *Hello) [MACBytes]byte {
	h := hmac.New(sha256.New, secret)
	h.Write([]byte("maru-hot-welcome-v1\x00"))
	h.Write(m.Nonce[:])
	h.Write(ch.Nonce[:])
	return [MACBytes]byte(h.Sum(nil))
}

// EqualMAC compares two proofs in constant time.
func EqualMAC(a, b [MACBytes]byte) bool { return hmac.Equal(a[:], b[:]) }
