package sim

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Kind is what an action does.
type Kind uint8

// Kinds of actions. Rank names the worker that it is about: the live one of that rank;
// without one the action does nothing.
const (
	ActStore        Kind = iota // a worker stores Keys[0]
	ActLoad                     // a worker loads Keys
	ActView                     // a worker exports views of Keys
	ActDelete                   // a worker deletes Keys[0]
	ActProbe                    // the scheduler asks for Keys in the worker's name
	ActRest                     // nothing: time passes
	ActPause                    // the worker's process stands still For a while
	ActKill                     // it is killed, another one takes its rank
	ActClose                    // it closes; its process lives on For a while
	ActFork                     // it forks: the child uses the parent's session
	ActKillManager              // the resource manager is killed and started again
	ActKillServer               // the server is killed and started again
	ActPauseServer              // the server stands still
	ActPauseManager             // the resource manager stands still
	ActDropLink                 // the server loses its connection to the resource manager
	ActCutServer                // the worker and the server cannot reach each other
	ActCutManager               // the worker and the resource manager cannot
	ActCutDaemons               // server and resource manager cannot
	ActMachine                  // everything stands still; with Keys[0] odd the clock does too
	ActRoll                     // a second server with the same id takes over
	ActRollCut                  // and the older one cannot hear of it; the worker reads Keys there
	ActEdge                     // the worker reads Keys until the very end of its session
	ActKillAgent                // the agent of the rank's machine is killed and started again
	ActDropAgent                // an operator drops it at the resource manager
	ActReboot                   // its machine is booted again
	ActCutAgent                 // it and the resource manager cannot reach each other
	kindCount
)

var kindNames = [...]string{
	"store", "load", "view", "delete", "probe", "rest", "pause", "kill", "close", "fork", "kill-rm", "kill-server",
	"pause-server", "pause-rm", "drop-link", "cut-server", "cut-rm", "cut-daemons", "machine", "roll", "roll-cut", "edge",
	"kill-agent", "drop-agent", "reboot", "cut-agent",
}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Action is one step of a script.
type Action struct {
	Kind Kind
	Gap  time.Duration // after the action before
	Rank int
	Keys []int
	For  time.Duration
	Seed uint64 // of its draws
	Calm bool   // no troubles in what it causes
}

// Script is a whole run: the world and the actions in it. Equal scripts play equally.
type Script struct {
	Seed    uint64 // of the world: ids, what processes do by themselves
	Rough   int    // percent of the troubles that happen
	Workers int
	Calm    bool // processes have no troubles in what they do by themselves
	Mild    bool // at the end nobody is killed: all close
	Fault   Fault
	Actions []Action
}

// span of time that a draw is made from.
type span struct{ low, high time.Duration }

func (s span) draw(c *chain) time.Duration { return c.between(s.low, s.high) }

// weights say how often a kind is drawn, of 1000, and how long it lasts. Those from
// ActPause on are none of an ordinary day: of them only Rough percent are taken.
var weights = [kindCount]struct {
	weight int
	last   span
}{
	ActStore: {weight: 380}, ActLoad: {weight: 230}, ActView: {weight: 110}, ActDelete: {weight: 80}, ActProbe: {weight: 45},
	ActRest:         {15, span{time.Second, 8 * time.Second}},
	ActPause:        {28, span{10 * time.Millisecond, 2 * time.Second}},
	ActKill:         {18, span{}},
	ActClose:        {18, span{0, 20 * time.Second}},
	ActFork:         {4, span{0, 5 * time.Second}},
	ActKillManager:  {12, span{}},
	ActKillServer:   {12, span{}},
	ActPauseServer:  {8, span{10 * time.Millisecond, 3 * time.Second}},
	ActPauseManager: {5, span{10 * time.Millisecond, 3 * time.Second}},
	ActDropLink:     {8, span{}},
	ActCutServer:    {9, span{100 * time.Millisecond, 12 * time.Second}},
	ActCutManager:   {6, span{100 * time.Millisecond, 12 * time.Second}},
	ActCutDaemons:   {4, span{100 * time.Millisecond, 12 * time.Second}},
	ActMachine:      {3, span{100 * time.Millisecond, 30 * time.Second}},
	ActRoll:         {5, span{}},
	ActRollCut:      {3, span{12 * time.Second, 20 * time.Second}},
	ActEdge:         {6, span{}},
	ActKillAgent:    {8, span{}},
	ActDropAgent:    {3, span{}},
	ActReboot:       {3, span{}},
	ActCutAgent:     {6, span{100 * time.Millisecond, 12 * time.Second}},
}

// Generate makes the script of a seed. Steps: 0 is 500.
func Generate(seed uint64, steps int, fault Fault) *Script {
	if steps <= 0 {
		steps = 500
	}
	c := newChain(seed, false)
	s := &Script{
		Seed: c.Uint64(), Rough: []int{10, 30, 60, 100}[c.IntN(4)], Workers: workerCount, Fault: fault,
		Actions: make([]Action, steps),
	}
	total, ordinary := 0, 0
	for k, w := range weights {
		if total += w.weight; Kind(k) == ActRest { //nolint:gosec // a few
			ordinary = total
		}
	}
	keys := make([]int, 0, 2*steps)
	for i := range s.Actions {
		a := &s.Actions[i]
		n := c.IntN(total)
		if n >= ordinary && !c.chance(float64(s.Rough)) {
			n = c.IntN(ordinary)
		}
		for a.Kind = 0; n >= weights[a.Kind].weight; a.Kind++ {
			n -= weights[a.Kind].weight
		}
		a.Rank, a.Seed = c.IntN(s.Workers), c.Uint64()
		a.Gap = c.between(time.Millisecond, meanGap*2)
		w := weights[a.Kind]
		if a.For = w.last.draw(c); a.Kind == ActPause && c.chance(40) {
			a.For = c.between(8*time.Second, 15*time.Second) // it outlives its session
		}
		from := len(keys)
		switch a.Kind {
		case ActStore, ActDelete, ActMachine:
			keys = append(keys, c.IntN(keyCount))
		case ActLoad, ActProbe:
			keys = drawKeys(c, keys, 4)
		case ActView, ActEdge, ActRollCut:
			keys = drawKeys(c, keys, 3)
		default:
			continue
		}
		a.Keys = keys[from:len(keys):len(keys)]
	}
	return s
}

// drawKeys adds 1 to most different keys to dst.
func drawKeys(c *chain, dst []int, most int) []int {
	from := len(dst)
	for n := 1 + c.IntN(most); len(dst)-from < n; {
		if k := c.IntN(keyCount); !slices.Contains(dst[from:], k) {
			dst = append(dst, k)
		}
	}
	return dst
}

// String is the script's text, which ParseScript reads.
func (s *Script) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "world seed=%x rough=%d workers=%d", s.Seed, s.Rough, s.Workers)
	if s.Calm {
		b.WriteString(" calm")
	}
	if s.Mild {
		b.WriteString(" mild")
	}
	if s.Fault != NoFault {
		fmt.Fprintf(&b, " fault=%v", s.Fault)
	}
	b.WriteByte('\n')
	for i := range s.Actions {
		b.WriteString(s.Actions[i].String())
		b.WriteByte('\n')
	}
	return b.String()
}

func (a *Action) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "+%v %v rank=%d seed=%x", a.Gap, a.Kind, a.Rank, a.Seed)
	if len(a.Keys) > 0 {
		b.WriteString(" keys=")
		for i, k := range a.Keys {
			if i > 0 {
				b.WriteByte(',')
			}
			b.WriteString(strconv.Itoa(k))
		}
	}
	if a.For != 0 {
		fmt.Fprintf(&b, " for=%v", a.For)
	}
	if a.Calm {
		b.WriteString(" calm")
	}
	return b.String()
}

// ParseScript reads what String wrote; lines that begin with # are for people.
// Errors: base.ErrInvalid names the line.
func ParseScript(r io.Reader) (*Script, error) {
	var s *Script
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		words := strings.Fields(lines.Text())
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		var err error
		switch {
		case s == nil && words[0] == "world":
			s = &Script{}
			err = s.parseWorld(words[1:])
		case s == nil:
			err = fmt.Errorf("it begins with %q, allowed: world", words[0])
		default:
			var a Action
			if err = a.parse(words, s.Workers); err == nil {
				s.Actions = append(s.Actions, a)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%w: script, line %d: %w", base.ErrInvalid, n, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%w: script: %w", base.ErrInvalid, err)
	}
	if s == nil {
		return nil, fmt.Errorf("%w: script: it is empty", base.ErrInvalid)
	}
	return s, nil
}

func (s *Script) parseWorld(words []string) (err error) {
	for _, word := range words {
		name, value, _ := strings.Cut(word, "=")
		switch name {
		case "seed":
			s.Seed, err = strconv.ParseUint(value, 16, 64)
		case "rough":
			s.Rough, err = number(value, 100)
		case "workers":
			s.Workers, err = number(value, mostWorkers)
		case "calm":
			s.Calm = true
		case "mild":
			s.Mild = true
		case "fault":
			s.Fault, err = ParseFault(value)
		default:
			err = fmt.Errorf("world has no %q", name)
		}
		if err != nil {
			return err
		}
	}
	if s.Workers == 0 {
		return fmt.Errorf("workers is 0, allowed: 1 to %d", mostWorkers)
	}
	return nil
}

func number(text string, most int) (int, error) {
	n, err := strconv.Atoi(text)
	if err == nil && (n < 0 || n > most) {
		err = fmt.Errorf("%d, allowed: 0 to %d", n, most)
	}
	return n, err
}

func (a *Action) parse(words []string, workers int) (err error) {
	if len(words) < 2 || !strings.HasPrefix(words[0], "+") {
		return fmt.Errorf("%q, allowed: +TIME KIND and its fields", strings.Join(words, " "))
	}
	if a.Gap, err = time.ParseDuration(words[0][1:]); err != nil {
		return err
	}
	k := slices.Index(kindNames[:], words[1])
	if k < 0 {
		return fmt.Errorf("kind %q is unknown, allowed: %s", words[1], strings.Join(kindNames[:], ", "))
	}
	a.Kind = Kind(k) //nolint:gosec // a few
	for _, word := range words[2:] {
		name, value, _ := strings.Cut(word, "=")
		switch name {
		case "rank":
			a.Rank, err = number(value, workers-1)
		case "seed":
			a.Seed, err = strconv.ParseUint(value, 16, 64)
		case "for":
			a.For, err = time.ParseDuration(value)
		case "calm":
			a.Calm = true
		case "keys":
			for part := range strings.SplitSeq(value, ",") {
				var key int
				if key, err = number(part, keyCount-1); err != nil {
					break
				}
				a.Keys = append(a.Keys, key)
			}
		default:
			err = fmt.Errorf("%v has no %q", a.Kind, name)
		}
		if err != nil {
			return err
		}
	}
	if a.Gap < 0 || a.For < 0 {
		return fmt.Errorf("times are %v and %v, allowed: 0 and more", a.Gap, a.For)
	}
	switch a.Kind {
	case ActStore, ActLoad, ActView, ActDelete, ActProbe, ActMachine, ActRollCut, ActEdge:
		if len(a.Keys) == 0 {
			return fmt.Errorf("%v needs keys", a.Kind)
		}
	}
	return nil
}
