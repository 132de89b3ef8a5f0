package server

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	maruv1 "github.com/xcena-dev/maru/api/maru/v1"
	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/obs/obstest"
)

func openedState(t *testing.T, dir string) *stateDir {
	t.Helper()
	s, err := openStateDir(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return s
}

// withoutCheck makes server.json what a version without secrets writes.
func withoutCheck(t *testing.T, dir string) {
	t.Helper()
	path := filepath.Join(dir, stateFile)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	record := map[string]any{}
	if err := json.Unmarshal(b, &record); err != nil {
		t.Fatal(err)
	}
	if record["secret_check"] == nil {
		t.Fatal("server.json has no check of the secret")
	}
	delete(record, "secret_check")
	if b, err = json.Marshal(record); err == nil {
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// The secret is made once for a server id, readable by its user only, and whatever
// else lies in its place is refused with a cure and without a word of its content.
func TestOwnerSecretFile(t *testing.T) {
	other := base.NewOwnerSecret()
	for name, c := range map[string]struct {
		change func(t *testing.T, dir, path string)
		want   error // nil: it opens
		text   string
		fresh  bool // with another secret than before
	}{
		"opened again": {change: func(*testing.T, string, string) {}},
		"readable by the group": {func(t *testing.T, _, path string) {
			if err := os.Chmod(path, 0o640); err != nil {
				t.Fatal(err)
			}
		}, base.ErrDenied, "chmod 600", false},
		"writable by others": {func(t *testing.T, _, path string) {
			if err := os.Chmod(path, 0o602); err != nil {
				t.Fatal(err)
			}
		}, base.ErrDenied, "chmod 600", false},
		"read-only": {change: func(t *testing.T, _, path string) {
			if err := os.Chmod(path, 0o400); err != nil {
				t.Fatal(err)
			}
		}},
		"too short":  {func(t *testing.T, _, path string) { cut(t, path, -1) }, base.ErrCorrupt, "must have 64", false},
		"too long":   {func(t *testing.T, _, path string) { put(t, path, other.EncodeHex()+"00") }, base.ErrCorrupt, "must have 64", false},
		"empty":      {func(t *testing.T, _, path string) { put(t, path, "") }, base.ErrCorrupt, "empty", false},
		"no digits":  {func(t *testing.T, _, path string) { put(t, path, strings.Repeat("xy", 32)) }, base.ErrCorrupt, "something else", false},
		"of another": {func(t *testing.T, _, path string) { put(t, path, other.EncodeHex()) }, base.ErrForeign, "drop-owner", false},
		"lost": {func(t *testing.T, _, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}, base.ErrNotFound, "drop-owner", false},
		"a directory": {func(t *testing.T, _, path string) {
			if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o700)); err != nil {
				t.Fatal(err)
			}
		}, base.ErrCorrupt, secretFile, false},
		"an id without a secret": {change: func(t *testing.T, dir, path string) {
			withoutCheck(t, dir)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}, fresh: true},
		"server.json written by an older version since": {change: func(t *testing.T, dir, _ string) { withoutCheck(t, dir) }},
		"a start that was cut short": {change: func(t *testing.T, dir, path string) {
			put(t, path+".new", "half of")
			if err := os.Remove(filepath.Join(dir, stateFile)); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			path := filepath.Join(dir, secretFile)
			first := openedState(t, dir)
			info, err := os.Stat(path)
			if err != nil || info.Mode() != 0o600 || info.Size() != 65 {
				t.Fatalf("%v, %v", info, err)
			}
			c.change(t, dir, path)
			again, err := openStateDir(dir, "")
			if c.want == nil {
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = again.Close() }()
				if again.secret.Equal(first.secret) == c.fresh {
					t.Errorf("another secret: %v, want %v", !c.fresh, c.fresh)
				}
				if text := fmt.Sprintf("%v %+v %#v", again, again, *again); strings.Contains(text, again.secret.EncodeHex()[:8]) || strings.Contains(text, fmt.Sprint(again.secret.Bytes()[:8])[1:16]) {
					t.Errorf("shown as %s", text)
				}
				return
			}
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), path) {
				t.Errorf("%v, want %v with %q", err, c.want, c.text)
			}
			for _, secret := range []string{first.secret.EncodeHex(), other.EncodeHex(), "xyxyxyxy"} {
				if err != nil && strings.Contains(err.Error(), secret[:8]) {
					t.Errorf("the error shows the file: %v", err)
				}
			}
			if !errors.Is(c.want, base.ErrDenied) && err != nil && !strings.Contains(err.Error(), "maru rm drop-owner "+first.server.String()+" --confirm") {
				t.Errorf("no cure in %v", err)
			}
			// Refused is not repaired: nothing was written.
			if _, again := openStateDir(dir, ""); !errors.Is(again, c.want) {
				t.Errorf("the second time: %v", again)
			}
		})
	}
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func cut(t *testing.T, path string, by int64) {
	t.Helper()
	info, err := os.Stat(path)
	if err == nil {
		err = os.Truncate(path, info.Size()-1+by) // without its newline, and one digit less
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A directory that cannot be written has no place for a new secret, and is no
// trouble for one that is there.
func TestOwnerSecretInReadOnlyDirectory(t *testing.T) {
	dir, err := os.MkdirTemp("", "maru-secret-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Chmod(dir, 0o700); _ = os.RemoveAll(dir) })
	state := filepath.Join(dir, "state")
	openedState(t, state)
	readOnly := func() error {
		var err error
		done := make(chan struct{})
		go func() {
			defer close(done)
			// Root may write everywhere; this thread, which ends with the goroutine, as nobody.
			runtime.LockOSThread()
			if os.Geteuid() == 0 {
				const nobody = 65534
				err = errors.Join(os.Chown(dir, nobody, -1), os.Chown(state, nobody, -1), os.Chown(filepath.Join(state, stateLock), nobody, -1),
					os.Chmod(filepath.Join(state, stateFile), 0o644), unix.Setfsuid(nobody))
			}
			if err != nil {
				return
			}
			var s *stateDir
			if s, err = openStateDir(state, ""); err == nil {
				err = s.Close()
			}
		}()
		<-done
		return err
	}
	withoutCheck(t, state)
	if err := os.Remove(filepath.Join(state, secretFile)); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(state, 0o500); err != nil {
		t.Fatal(err)
	}
	if err := readOnly(); !errors.Is(err, base.ErrDenied) || !strings.Contains(err.Error(), secretFile) || !strings.Contains(err.Error(), "--state-dir") {
		t.Errorf("a new secret in a directory of mode 0500: %v", err)
	}
	if err := os.Chmod(state, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(state, secretFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("something was written: %v", err)
	}
}

// A server proves itself over its restarts and those of the resource manager, keeps
// its regions, and neither secret nor token is in a log or on a page.
func TestProofOverRestarts(t *testing.T) {
	l := newLab(t, 64<<20)
	var logged obstest.Text
	l.rmCfg.Logger, l.cfg.Log = logged.Logger(), logged.Logger()
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	api := l.rmClient()
	c := newClient(t, s.ControlAddress(), cxlRequest)
	l.prove(c)
	r := c.expand(maruv1.Medium_MEDIUM_CXL, 16, 65536)
	l.hold(api, c, false, 1, r.GetHandle())
	_, owner, err := s.rm.use()
	if err != nil || len(owner.token) != 32 || owner.incarnation != 1 {
		t.Fatalf("%d bytes of token, %v", len(owner.token), err)
	}

	if err := l.rm.Close(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the server sees that its resource manager is away", func() bool { d, _ := s.Ready(); return d != "" })
	l.startRM()
	waitReady(t, s)
	c.expand(maruv1.Medium_MEDIUM_CXL, 16, 65536)
	if _, now, _ := s.rm.use(); !bytes.Equal(now.token, owner.token) || now.incarnation != 1 {
		t.Error("a restart of the resource manager cost the server its incarnation")
	}
	_, page := httpGet(t, s, "/")
	_, metrics := httpGet(t, s, "/metrics")
	secret := s.state.secret
	stopServer(t, s)

	s = startServer(t, l.cfg)
	waitReady(t, s)
	_, again, err := s.rm.use()
	if err != nil || again.incarnation != 2 || bytes.Equal(again.token, owner.token) || !s.state.secret.Equal(secret) {
		t.Errorf("after a restart: incarnation %d, %v", again.incarnation, err)
	}
	if got := regionsAt(t, api); len(got) == 0 || got[0].GetRegionId() != r.GetHandle().GetRegionId() {
		t.Errorf("the held region is lost: %v", got)
	}
	for where, text := range map[string]string{"the log": logged.String(), "the page": page, "the metrics": metrics} {
		for what, b := range map[string][]byte{"secret": secret.Bytes(), "token": owner.token, "new token": again.token} {
			for _, form := range []string{string(b), fmt.Sprintf("%x", b), fmt.Sprint(b), base64.StdEncoding.EncodeToString(b)} {
				if strings.Contains(text, form) {
					t.Errorf("%s shows the %s", where, what)
				}
			}
		}
	}
}

// Who lost the secret is refused: with it gone from beside server.json at the start
// already; with an older server.json by the resource manager, which says what to do.
// Each cure works.
func TestLostSecret(t *testing.T) {
	l := newLab(t, 64<<20)
	var logged obstest.Text
	l.cfg.Log = logged.Logger()
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	c := newClient(t, s.ControlAddress(), cxlRequest)
	l.prove(c)
	region := c.expand(maruv1.Medium_MEDIUM_CXL, 16, 65536).GetHandle()
	api := l.rmClient()
	l.hold(api, c, false, 1, region) // or a server that has started again gives it back
	id := s.ServerID()
	stopServer(t, s)
	secret := filepath.Join(l.cfg.StateDir, secretFile)
	kept, err := os.ReadFile(secret)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(secret); err != nil {
		t.Fatal(err)
	}
	if s, err := Start(testContext(t), l.cfg); !errors.Is(err, base.ErrNotFound) || !strings.Contains(err.Error(), secret) {
		if err == nil {
			stopServer(t, s)
		}
		t.Fatalf("a start without the secret: %v", err)
	}
	// Put back, it is as before.
	put(t, secret, string(kept))
	s = startServer(t, l.cfg)
	waitReady(t, s)
	stopServer(t, s)

	// A new secret for the old id.
	withoutCheck(t, l.cfg.StateDir)
	if err := os.Remove(secret); err != nil {
		t.Fatal(err)
	}
	s = startServer(t, l.cfg)
	refused := func() bool {
		d, err := s.Ready()
		return err == nil && strings.Contains(d, "does not take this server")
	}
	waitFor(t, "the server is refused", refused)
	cure := "maru rm drop-owner " + id.String() + " --confirm"
	if d, _ := s.Ready(); s.ServerID() != id || !strings.Contains(d, cure) {
		t.Errorf("degraded because of %q", d)
	}
	waitFor(t, "the cure is in the log", func() bool { return strings.Contains(logged.String(), cure+": its regions go back") })
	if status, body := httpGet(t, s, "/readyz"); status != http.StatusOK || !strings.Contains(body, "degraded") {
		t.Errorf("readyz: %d %q", status, body)
	}
	cpu := newClient(t, s.ControlAddress(), nil)
	cpu.expand(maruv1.Medium_MEDIUM_CPU, 4, 4096)
	if n := len(regionsAt(t, api)); n != 1 {
		t.Errorf("%d regions of the owner are left", n)
	}
	if _, err := api.Unhold(testContext(t), &maruv1.UnholdRequest{SessionId: c.id[:], Sequence: 2, Handles: []*maruv1.RegionHandle{region}}); err != nil {
		t.Fatal(err)
	}
	if _, err := api.DropOwner(testContext(t), &maruv1.DropOwnerRequest{OwnerId: id[:], Confirm: true}); err != nil {
		t.Fatal(err)
	}
	waitReady(t, s) // by itself
	if n := len(regionsAt(t, api)); n != 0 {
		t.Errorf("%d regions after drop-owner", n)
	}
	c = newClient(t, s.ControlAddress(), cxlRequest)
	l.prove(c)
	c.expand(maruv1.Medium_MEDIUM_CXL, 16, 65536)

	// The state directory is gone altogether: another server, and the old one's regions
	// stay until somebody ends it.
	stopServer(t, s)
	if err := os.RemoveAll(l.cfg.StateDir); err != nil {
		t.Fatal(err)
	}
	s = startServer(t, l.cfg)
	waitReady(t, s)
	if s.ServerID() == id || len(regionsAt(t, api)) != 1 {
		t.Errorf("server %s, %d regions", s.ServerID(), len(regionsAt(t, api)))
	}
	if _, err := api.DropOwner(testContext(t), &maruv1.DropOwnerRequest{OwnerId: id[:], Confirm: true}); err != nil || len(regionsAt(t, api)) != 0 {
		t.Errorf("%v, %d regions", err, len(regionsAt(t, api)))
	}
}

// An Open that a client has given up is executed after its retry, and before the client has
// shown the secret that it got: the server forgets that one. The session's secret at the
// resource manager tells that it is the one.
func TestReopenAfterLateOpen(t *testing.T) {
	l := newLab(t, 64<<20)
	l.startRM()
	s := startServer(t, l.cfg)
	waitReady(t, s)
	secret := base.NewOwnerSecret().Bytes()
	request := func(m *maruv1.OpenRequest) { cxlRequest(m); m.SessionSecret = secret }
	c := newClient(t, s.ControlAddress(), request)
	l.prove(c)
	r := c.expand(maruv1.Medium_MEDIUM_CXL, 2, 65536)
	_, err := l.rmClient().Hold(testContext(t), &maruv1.HoldRequest{
		SessionId: c.id[:], SessionSecret: secret, ServerId: c.open.GetServerId(), OwnerIncarnation: c.open.GetOwnerIncarnation(), Sequence: 1,
		Handles: []*maruv1.RegionHandle{r.GetHandle()}, NodeId: c.open.GetNodeId(), BootId: c.open.GetBootId(),
	})
	if err != nil {
		t.Fatal(err)
	}
	late := c.open
	if err := c.reopen(request); err != nil { // the retry
		t.Fatal(err)
	}
	known := c.open
	if c.open = late; c.reopen(request) != nil {
		t.Fatal("the late one is refused: nothing is tested")
	}
	c.open = known
	for name, stranger := range map[string][]byte{"another secret": base.NewOwnerSecret().Bytes(), "none": nil} {
		if err := c.reopen(func(m *maruv1.OpenRequest) { cxlRequest(m); m.SessionSecret = stranger }); !errors.Is(err, base.ErrDenied) {
			t.Fatalf("with %s: %v", name, err)
		}
	}
	if err := c.reopen(request); err != nil {
		t.Errorf("with its own secret: %v", err)
	}
}
