package client

import (
	"context"
	"testing"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/rm"
)

// allowFarewells lets this test's clients say goodbye later, and waits for the last word.
func allowFarewells(t *testing.T) {
	farewells.Store(0)
	t.Cleanup(func() {
		eventually(t, "the last word", func() bool { return farewells.Load() == 0 })
		farewells.Store(farewellCount)
	})
}

// A session is closed while both daemons are away, and its process goes on living: when they
// are back they hear of it, and nothing of the session is left. It is the same whether the
// server was started again, which makes it forget the session, or only the resource manager.
func TestRealFarewell(t *testing.T) {
	for name, restart := range map[string]bool{"both are started again": true, "the resource manager is": false} {
		t.Run(name, func(t *testing.T) {
			allowFarewells(t)
			l := startLab(t, 64<<20)
			l.stop()
			l.start()
			l.cfg.Port, l.cfg.HotPort = portOf(t, l.srv.ControlAddress()), portOf(t, l.srv.HotAddress())
			cfg := l.config()
			cfg.CPUBytes = 16 * testPage
			c := open(t, cfg)
			want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
			if len(l.regionIDs()) == 0 || l.holds(c.Session()) == 0 {
				t.Fatal("the session has nothing")
			}
			if restart {
				l.stop()
			}
			if err := l.rm.Close(); err != nil {
				t.Fatal(err)
			}
			if err := c.Close(t.Context()); err == nil {
				t.Fatal("Close was heard by nobody, and says nothing")
			}
			var err error
			if l.rm, err = rm.Start(context.Background(), l.rmCfg); err != nil {
				t.Fatal(err)
			}
			if restart {
				l.start()
			}
			eventually(t, "the end of the holds", func() bool { return l.holds(c.Session()) == 0 })
			// Of a session that lists nothing a new server finds no key: its region goes back.
			kept := 1
			if restart {
				kept = 0
			}
			eventually(t, "its regions", func() bool { return len(l.regionIDs()) == kept })
			eventually(t, "the end of the session at the server", func() bool {
				other := cfg
				other.CPUBytes, other.InstanceID = 0, "other"
				o := open(t, other)
				defer func() { _ = o.Close(context.Background()) }()
				u, err := o.Usage(t.Context())
				if err != nil {
					return false
				}
				for _, s := range u.GetSessions() {
					if id := c.Session(); string(s.GetSessionId()) == string(id[:]) {
						return false
					}
				}
				return true
			})
		})
	}
}

// A session that was not heard in time is heard later by a server that is the same still,
// in whatever epoch it is there.
func TestFarewell(t *testing.T) {
	for name, begin := range map[string]func(f *fake){"as it was": func(*fake) {}, "started again": (*fake).begin} {
		t.Run(name, func(t *testing.T) {
			allowFarewells(t)
			f := startFake(t)
			c := open(t, cxlConfig(f))
			want(t, "store", storeOne(t, c, 1, value(1, 1000)), base.CodeOK)
			control, hotAddress := f.address, f.hotLn.Addr().String()
			f.stop()
			if err := c.Close(t.Context()); err == nil {
				t.Fatal("Close was heard by nobody, and says nothing")
			}
			if farewells.Load() != 1 || f.holdCount() == 0 {
				t.Fatalf("%d goodbyes, %d holds", farewells.Load(), f.holdCount())
			}
			begin(f)
			f.listen(control, hotAddress)
			eventually(t, "the last word", func() bool { return farewells.Load() == 0 })
			f.mu.Lock()
			defer f.mu.Unlock()
			if len(f.mu.closes) != 1 || !f.mu.closes[0].GetDrained() || len(f.mu.holds) != 0 {
				t.Errorf("closes %v, holds %v", f.mu.closes, f.mu.holds)
			}
			if c.Connected() {
				t.Error("a closed client is connected")
			}
		})
	}
}

// Nobody waits where nobody is to: switched off, with as many waiting as may, and after a
// Close that was heard.
func TestNoFarewell(t *testing.T) {
	f := startFake(t)
	cfg := cxlConfig(f)
	heard := open(t, cfg)
	farewells.Store(0)
	defer farewells.Store(farewellCount)
	if err := heard.Close(t.Context()); err != nil || farewells.Load() != 0 {
		t.Fatalf("%d goodbyes: %v", farewells.Load(), err)
	}
	full := open(t, cfg)
	cfg.Farewell = Off
	off := open(t, cfg)
	f.stop()
	if err := off.Close(t.Context()); err == nil || farewells.Load() != 0 {
		t.Fatalf("%d goodbyes of a client that says none: %v", farewells.Load(), err)
	}
	farewells.Store(farewellCount)
	if err := full.Close(t.Context()); err == nil || farewells.Load() != farewellCount {
		t.Fatalf("%d goodbyes where %d may be: %v", farewells.Load(), farewellCount, err)
	}
}
