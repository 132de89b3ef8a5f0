package settings

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"pgregory.net/rapid"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/leak"
)

func TestMain(m *testing.M) { leak.Check(m) }

type level string

func (l *level) UnmarshalText(b []byte) error {
	if s := string(b); s != "low" && s != "high" {
		return fmt.Errorf("%q is neither low nor high", s)
	}
	*l = level(b)
	return nil
}

func (l level) MarshalText() ([]byte, error) { return []byte(l), nil }

type config struct {
	Host      string        `yaml:"host" help:"where to listen"`
	Port      int           `yaml:"port"`
	Small     uint8         `yaml:"small"`
	PoolBytes uint64        `yaml:"pool_size"`
	Heartbeat time.Duration `yaml:"heartbeat_interval"`
	CPUOnly   bool          `yaml:"cpu_only"`
	Ratio     float64       `yaml:"ratio"`
	Order     []string      `yaml:"write_order"`
	Level     level         `yaml:"level"`
	TLS       struct {
		CertFile string `yaml:"cert_file"`
	} `yaml:"tls"`
	Extra `yaml:",inline"`
	Log   any `yaml:"-"`
}

type Extra struct {
	RMAddress string `yaml:"rm_address"`
}

type input struct {
	args []string
	env  []string
	yaml string
}

func load(t *testing.T, c *config, in input) (*Set, error) {
	t.Helper()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	s, err := Bind(fs, c, Options{Environ: func() []string { return in.env }})
	if err != nil {
		t.Fatal(err)
	}
	if in.yaml != "" {
		path := filepath.Join(t.TempDir(), "maru.yaml")
		if err := os.WriteFile(path, []byte(in.yaml), 0o600); err != nil {
			t.Fatal(err)
		}
		in.args = append([]string{"--config", path}, in.args...)
	}
	if err := fs.Parse(in.args); err != nil {
		t.Fatal(err)
	}
	return s, s.Load(nil)
}

func TestPrecedence(t *testing.T) {
	flag, file, env := []string{"--host=flag"}, "host: file\n", []string{"MARU_HOST=env"}
	cases := []struct {
		in   input
		want string
		from Source
	}{
		{input{}, "default", FromDefault},
		{input{env: env}, "env", FromEnvironment},
		{input{yaml: file}, "file", FromFile},
		{input{yaml: file, env: env}, "file", FromFile},
		{input{args: flag}, "flag", FromFlag},
		{input{args: flag, yaml: file, env: env}, "flag", FromFlag},
		{input{args: []string{"--host="}, yaml: file}, "", FromFlag},
		{input{yaml: "host:\n", env: env}, "env", FromEnvironment},
	}
	for _, c := range cases {
		cfg := config{Host: "default"}
		s, err := load(t, &cfg, c.in)
		if err != nil || cfg.Host != c.want || s.SourceOf("host") != c.from {
			t.Errorf("%+v: %q from %v, %v", c.in, cfg.Host, s.SourceOf("host"), err)
		}
	}
}

func TestKinds(t *testing.T) {
	want := config{
		Host: "h", Port: 5555, Small: 255, PoolBytes: 4 << 30, Heartbeat: 1500 * time.Millisecond, CPUOnly: true, Ratio: 0.5,
		Order: []string{"cpu", "cxl"}, Level: "high",
	}
	want.TLS.CertFile = "/c"
	want.RMAddress = "r:1"
	ins := map[string]input{
		"flags": {args: []string{
			"--host=h", "--port", "5555", "--small=0xff", "--pool-size=4G", "--heartbeat-interval=1.5s", "--cpu-only", "--ratio=.5",
			"--write-order=cpu", "--write-order", "cxl", "--level=high", "--tls-cert-file=/c", "--rm-address=r:1",
		}},
		"yaml": {yaml: "host: h\nport: 5555\nsmall: 0xff\npool-size: 4G\nheartbeat_interval: 1.5s\ncpu_only: yes\nratio: 0.5\n" +
			"write_order: [cpu, cxl]\nlevel: high\ntls:\n  cert_file: /c\nrm_address: \"r:1\"\n"},
		"yaml, other spellings": {yaml: "host: &x h\nport: '5555'\nsmall: 255\npool_size: 4294967296\nheartbeat_interval: 1500ms\n" +
			"cpu_only: on\nratio: 5e-1\nwrite_order: cpu,cxl\nlevel: high\ntls: {cert_file: /c}\nrm_address: r:1\n"},
		"environment": {env: []string{
			"MARU_HOST=h", "MARU_PORT=5555", "MARU_SMALL=255", "MARU_POOL_SIZE=4GiB", "MARU_HEARTBEAT_INTERVAL=1500ms",
			"MARU_CPU_ONLY=1", "MARU_RATIO=0.5", "MARU_WRITE_ORDER=cpu, cxl", "MARU_LEVEL=high", "MARU_TLS_CERT_FILE=/c",
			"MARU_RM_ADDRESS=r:1", "PATH=/bin", "MARU_UNRELATED=1",
		}},
	}
	for name, in := range ins {
		var got config
		if _, err := load(t, &got, in); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestEveryProblemAtOnce(t *testing.T) {
	cfg := config{Port: 7}
	_, err := load(t, &cfg, input{
		args: []string{"--port=x", "--pool-size=4Q", "--heartbeat-interval=5"},
		env:  []string{"MARU_SMALL=256", "MARU_CPU_ONLY=maybe", "MARU_RATIO=NaN"},
		yaml: "hots: h\nlevel: mid\nhost: [a, b]\ntls: 5\nport: 1\nport: 2\nwrite_order: {a: b}\ntls2:\n  cert_file: x\n",
	})
	if !errors.Is(err, base.ErrInvalid) {
		t.Fatalf("%v", err)
	}
	for _, part := range []string{
		`--port: `, `"x"`, `--pool-size: `, `"4Q"`, "1024-based", `--heartbeat-interval: `, "no unit",
		"MARU_SMALL: ", "between 0 and 255", "MARU_CPU_ONLY: ", "1, true, yes, on", "MARU_RATIO: ",
		`line 1: key "hots" is unknown; the nearest that exists is "host"`, "line 2: level: ", "neither low nor high",
		"line 3: host must be one value of kind string", "line 4: tls must be keys", `line 6: key "port" is on line 5 already`,
		"line 7: write_order", `line 8: key "tls2" is unknown`,
	} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is missing", part)
		}
	}
	if t.Failed() {
		t.Log(err)
	}
}

func TestValidateIsPartOfIt(t *testing.T) {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	var cfg config
	s, err := Bind(fs, &cfg, Options{Environ: func() []string { return []string{"MARU_PORT=x"} }})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Load(func() error { return fmt.Errorf("%w: host is empty", base.ErrInvalid) })
	if err == nil || !strings.Contains(err.Error(), "MARU_PORT") || !strings.Contains(err.Error(), "host is empty") {
		t.Errorf("%v", err)
	}
}

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	big := filepath.Join(dir, "big")
	if err := os.WriteFile(big, make([]byte, maxFileBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]error{filepath.Join(dir, "none"): base.ErrNotFound, dir: base.ErrInvalid, big: base.ErrInvalid} {
		var cfg config
		_, err := load(t, &cfg, input{args: []string{"--config=" + path}})
		if !errors.Is(err, want) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "--config") {
			t.Errorf("%s: %v", path, err)
		}
		_, err = load(t, &cfg, input{env: []string{"MARU_CONFIG=" + path}})
		if !errors.Is(err, want) || !strings.Contains(err.Error(), "MARU_CONFIG") {
			t.Errorf("%s: %v", path, err)
		}
	}
	for text, ok := range map[string]bool{
		"": true, "# nothing\n": true, "---\nhost: a\n": true, "null\n": true,
		"- a\n": false, "x": false, "host: a\n---\nhost: b\n": false, "host: [\n": false, "? [a]\n: b\n": false, "<<: {host: a}\n": false,
	} {
		_, problems := parseFile("f", []byte(text), mustFields(t, &config{}))
		if ok != (len(problems) == 0) {
			t.Errorf("%q: %v", text, problems)
		}
	}
}

func mustFields(t testing.TB, c *config) []*field {
	t.Helper()
	f, err := fieldsOf(reflect.ValueOf(c).Elem(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestBindRefuses(t *testing.T) {
	bind := func(cfg any) error {
		_, err := Bind(pflag.NewFlagSet("test", pflag.ContinueOnError), cfg, Options{})
		return err
	}
	for name, err := range map[string]error{
		"no pointer": bind(config{}),
		"no name":    bind(&struct{ A int }{}),
		"no setting": bind(&struct {
			A map[string]int `yaml:"a"`
		}{}),
		"twice": bind(&struct {
			A int `yaml:"a_b"`
			B int `yaml:"a-b"`
		}{}),
		"taken": bind(&struct {
			A int `yaml:"config"`
		}{}),
		"nested without name": bind(&struct {
			A struct {
				B int `yaml:"b"`
			}
		}{}),
	} {
		if !errors.Is(err, base.ErrInternal) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestHelpAndSettings(t *testing.T) {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	cfg := config{PoolBytes: 100 << 20, Heartbeat: time.Second, Order: []string{"cpu"}}
	s, err := Bind(fs, &cfg, Options{Help: map[string]string{"port": "which port"}, Environ: func() []string {
		return []string{"MARU_POOL_SIZES=1", "MARU_STAT=1", "MARU_PORT=1"}
	}})
	if err != nil {
		t.Fatal(err)
	}
	usage := fs.FlagUsages()
	for _, part := range []string{
		"where to listen (MARU_HOST)", "which port (MARU_PORT)", "--pool-size size", "100MiB", "--heartbeat-interval duration", "1s", "--config",
	} {
		if !strings.Contains(usage, part) {
			t.Errorf("%q is missing in\n%s", part, usage)
		}
	}
	if err := s.Load(nil); err != nil {
		t.Fatal(err)
	}
	if got := s.Suspects(); len(got) != 1 || got["MARU_POOL_SIZES"] != "MARU_POOL_SIZE" {
		t.Errorf("suspects %v", got)
	}
	for _, x := range s.Settings() {
		if x.Key == "port" && x != (Setting{"port", "port", "MARU_PORT", "1", FromEnvironment}) {
			t.Errorf("%+v", x)
		}
	}
}

func TestParseSize(t *testing.T) {
	good := map[string]uint64{
		"0": 0, "4096": 4096, "4G": 4 << 30, "4g": 4 << 30, "500M": 500 << 20, "1.5GiB": 3 << 29, "1.5 GiB": 3 << 29, "2KB": 2048, "1k": 1024,
		"1Ki": 1024, "16T": 16 << 40, "1P": 1 << 50, "100B": 100, " 7 ": 7, "0.5K": 512, "18446744073709551615": math.MaxUint64, "1.0": 1,
	}
	for s, want := range good {
		if got, err := ParseSize(s); err != nil || got != want {
			t.Errorf("%q: %d, %v", s, got, err)
		}
	}
	for _, s := range []string{
		"", "G", "-1", "+1", "1.5", "0.3K", "1e3", "0x10", "4Q", "4GG", "4iB", "4I", "1 2", "1.G", ".5G", "1..5G", "16777216T", "1/2K", "NaN", "Inf",
		"18446744073709551616", "4G ib x", strings.Repeat("1", 40), "１G",
	} {
		if got, err := ParseSize(s); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%q: %d, %v", s, got, err)
		}
	}
}

func TestSizeRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Uint64().Draw(t, "n") << rapid.IntRange(0, 40).Draw(t, "shift")
		if got, err := ParseSize(FormatSize(n)); err != nil || got != n {
			t.Fatalf("%d shown as %q read as %d, %v", n, FormatSize(n), got, err)
		}
	})
}

func TestScalars(t *testing.T) {
	for s, want := range map[string]bool{"1": true, "TRUE": true, "Yes": true, "on": true, "0": false, "false": false, "no": false, "OFF": false} {
		if got, err := ParseBool(s); err != nil || got != want {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "2", "y", "truee"} {
		if _, err := ParseBool(s); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%q: %v", s, err)
		}
	}
	for s, want := range map[string]time.Duration{"0": 0, "1h30m": 90 * time.Minute, "500ms": 500 * time.Millisecond} {
		if got, err := ParseDuration(s); err != nil || got != want {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "10", "1.5", "x", "10 s"} {
		if _, err := ParseDuration(s); !errors.Is(err, base.ErrInvalid) {
			t.Errorf("%q: %v", s, err)
		}
	}
	if n, err := parseInt("-9223372036854775808", 64); err != nil || n != math.MinInt64 {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := parseInt("128", 8); !errors.Is(err, base.ErrInvalid) || !strings.Contains(err.Error(), "between -128 and 127") {
		t.Errorf("%v", err)
	}
	if _, err := parseUint("18446744073709551616", 64); err == nil || !strings.Contains(err.Error(), "18446744073709551615") {
		t.Errorf("%v", err)
	}
}

func TestReadSecretFile(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for text, want := range map[string]string{"hunter2\n": "hunter2", "hunter2\r\n": "hunter2", "a\nb\n\n": "a\nb\n", "x": "x"} {
		if b, err := ReadSecretFile(write("good", text, 0o400)); err != nil || string(b) != want {
			t.Errorf("%q: %q, %v", text, b, err)
		}
		_ = os.Remove(filepath.Join(dir, "good"))
	}
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	bad := map[string]error{
		write("group", "hunter2", 0o640):                           base.ErrDenied,
		write("world", "hunter2", 0o604):                           base.ErrDenied,
		write("written", "hunter2", 0o620):                         base.ErrDenied,
		write("empty", "", 0o600):                                  base.ErrInvalid,
		write("newline", "\n", 0o600):                              base.ErrInvalid,
		write("big", strings.Repeat("x", maxSecretBytes+1), 0o600): base.ErrInvalid,
		filepath.Join(dir, "none"):                                 base.ErrNotFound,
		dir:                                                        base.ErrInvalid,
		fifo:                                                       base.ErrInvalid,
	}
	for p, want := range bad {
		_, err := ReadSecretFile(p)
		if !errors.Is(err, want) || strings.Contains(err.Error(), "hunter2") || !strings.Contains(err.Error(), p) {
			t.Errorf("%s: %v", p, err)
		}
	}
	if os.Getuid() == 0 {
		p := write("stranger", "hunter2", 0o600)
		if err := os.Chown(p, 12345, 12345); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadSecretFile(p); !errors.Is(err, base.ErrDenied) {
			t.Errorf("a stranger's: %v", err)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"4G", "1.5GiB", "500M", "x", "1e9", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseSize(s)
		if err != nil {
			return
		}
		if again, err := ParseSize(FormatSize(n)); err != nil || again != n {
			t.Fatalf("%q: %d, then %d, %v", s, n, again, err)
		}
	})
}

func FuzzFile(f *testing.F) {
	for _, s := range []string{"host: a\nport: 5\n", "tls: {cert_file: x}\n", "a: &a [*a]\n", "write_order: [a, b]\n", "? \n", "- -\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var cfg config
		values, _ := parseFile("f", b, mustFields(t, &cfg))
		for _, v := range values {
			_ = v.f.set(v.parts)
		}
		// Whatever was taken can be shown.
		for _, fl := range mustFields(t, &cfg) {
			_ = fl.text()
		}
		if _, err := json.Marshal(cfg.Order); err != nil {
			t.Fatal(err)
		}
	})
}

func TestAboutSizeIsShort(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0", 31: "31B", 1023: "1023B", 1 << 10: "1KiB", 1025: "1.0KiB", 144 << 20: "144MiB", 1196484 << 10: "1.1GiB",
		23592991: "22.5MiB", 4162 << 20: "4162MiB", 24683656 << 10: "23.5GiB", 1<<40 + 1: "1.0TiB", 1<<30 - 1: "1.0GiB", 64 << 30: "64GiB", math.MaxUint64: "16384.0PiB",
	} {
		if got := AboutSize(n); got != want {
			t.Errorf("%d is shown as %q, want %q", n, got, want)
		}
	}
}
