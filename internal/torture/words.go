package torture

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// What a worker says: one line each, a letter and then the fields.
//
//	B                       it has a session
//	S key generation t0 t1  a store was acknowledged
//	L key generation t0 t1  a load or view showed that store, every byte right
//	D key t0 t1             a delete was acknowledged
//	C {counts}              what it did since the last C; also its sign of life
//	X text                  something is wrong
//	F pid                   it forked a child
//	U                       a session ended while a daemon was away
//	A {answer}              an order is done

// answerLine is the answer to an order.
type answerLine struct {
	Order string `json:"order"`
	// Left counts the sessions of the process that ended with views out.
	Left int `json:"left"`
	// Untold: a session of the process ended while a daemon was away, which hears of it
	// with the end of the process only.
	Untold bool `json:"untold"`
	// Hits and Stored are of the order check.
	Hits   int    `json:"hits"`
	Stored int    `json:"stored"`
	Error  string `json:"error,omitempty"`
}

// order is one line to a worker.
type order struct {
	Do string `json:"do"` // rest, store, load, quit
	// Keys of store and load.
	First uint32 `json:"first,omitempty"`
	Count uint32 `json:"count,omitempty"`
}

// speaker writes a worker's lines. What was acknowledged may wait for a moment, what is
// wrong not.
type speaker struct {
	process uint32
	mu      struct {
		sync.Mutex
		out io.Writer
		b   []byte
		c   Counts
	}
}

// lineBuffer is how much is kept back before it is written by itself.
const lineBuffer = 16 << 10

func newSpeaker(process uint32, out io.Writer) *speaker {
	s := &speaker{process: process}
	s.mu.out = out
	return s
}

func (s *speaker) lineLocked(letter byte, fields ...uint64) {
	s.mu.b = append(s.mu.b, letter)
	for _, f := range fields {
		s.mu.b = append(s.mu.b, ' ')
		s.mu.b = strconv.AppendUint(s.mu.b, f, 10)
	}
	s.mu.b = append(s.mu.b, '\n')
	if len(s.mu.b) > lineBuffer {
		s.flushLocked()
	}
}

func (s *speaker) flushLocked() {
	if len(s.mu.b) > 0 {
		_, _ = s.mu.out.Write(s.mu.b) // whoever read it has gone, and ends this process
	}
	s.mu.b = s.mu.b[:0]
}

// say writes a line and a fact, and counts.
func (s *speaker) say(count func(*Counts), letter byte, fields ...uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if count != nil {
		count(&s.mu.c)
	}
	if letter != 0 {
		s.lineLocked(letter, fields...)
	}
}

func (s *speaker) add(count func(*Counts)) { s.say(count, 0) }

// wrong says at once that something is not as it must be.
func (s *speaker) wrong(format string, args ...any) {
	text := fmt.Sprintf("worker process %d: ", s.process) + fmt.Sprintf(format, args...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.b = append(s.mu.b, "X "+string(bytes.ReplaceAll([]byte(text), []byte("\n"), []byte(" | ")))+"\n"...)
	s.countsLocked()
	s.flushLocked()
}

func (s *speaker) countsLocked() {
	b, _ := json.Marshal(s.mu.c) // numbers only
	s.mu.c = Counts{}
	s.mu.b = append(append(append(s.mu.b, "C "...), b...), '\n')
}

// beat writes everything out.
func (s *speaker) beat() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.countsLocked()
	s.flushLocked()
}

// ready says that there is a session.
func (s *speaker) ready() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.b = append(s.mu.b, 'B', '\n')
	s.flushLocked()
}

func (s *speaker) answer(a answerLine) {
	b, _ := json.Marshal(a) // plain fields only
	s.mu.Lock()
	defer s.mu.Unlock()
	s.countsLocked()
	s.mu.b = append(append(append(s.mu.b, "A "...), b...), '\n')
	s.flushLocked()
}

// heard is what the driver does with a worker's lines.
type heard struct {
	ready  func()
	count  func(Counts)
	wrong  func(text string)
	forked func(pid int)
	answer func(answerLine)
	untold func()
}

// hear gives one line of worker process number to the judge or to h. Errors: a line
// that is none.
func (j *judge) hear(line []byte, number uint32, h heard) error {
	if len(line) == 0 {
		return fmt.Errorf("%w: an empty line", base.ErrInvalid)
	}
	rest := bytes.TrimPrefix(line[1:], []byte(" "))
	switch line[0] {
	case 'B':
		h.ready()
		return nil
	case 'U':
		h.untold()
		return nil
	case 'C':
		var c Counts
		if err := json.Unmarshal(rest, &c); err != nil {
			return err
		}
		h.count(c)
		return nil
	case 'X':
		h.wrong(string(rest))
		return nil
	case 'A':
		var a answerLine
		if err := json.Unmarshal(rest, &a); err != nil {
			return err
		}
		h.answer(a)
		return nil
	}
	fields := bytes.Fields(rest)
	var n [4]uint64
	want := map[byte]int{'S': 4, 'L': 4, 'D': 3, 'F': 1}[line[0]]
	if want == 0 || len(fields) != want {
		return fmt.Errorf("%w: line %.80q", base.ErrInvalid, line)
	}
	for i, f := range fields {
		var err error
		if n[i], err = strconv.ParseUint(string(f), 10, 64); err != nil {
			return fmt.Errorf("%w: line %.80q: %w", base.ErrInvalid, line, err)
		}
	}
	between := func(a, b uint64) interval { return interval{time.Duration(a), time.Duration(b)} } //nolint:gosec // clock readings
	switch line[0] {
	case 'S':
		j.stored(uint32(n[0]), generation(n[1]), between(n[2], n[3])) //nolint:gosec // as it was written
	case 'L':
		j.loaded(uint32(n[0]), generation(n[1]), between(n[2], n[3]), number) //nolint:gosec // as it was written
	case 'D':
		j.deleted(uint32(n[0]), between(n[1], n[2])) //nolint:gosec // as it was written
	case 'F':
		h.forked(int(n[0])) //nolint:gosec // a pid
	}
	return nil
}
