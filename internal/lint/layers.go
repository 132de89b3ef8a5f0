package lint

import "strings"

// layer is a height in the tree. A package imports packages of its own height
// or below; Go itself refuses a circle among equals.
type layer int

const (
	// words: identifiers, errors, assertions, plain memory. They import nothing
	// above them.
	words layer = iota
	// cores: requests and a time in, effects out. No I/O, clock or goroutine.
	cores
	// shells: one kind of I/O each, around the cores or beside them.
	shells
	// services: what a process is made of: resource manager, server, agent, client.
	services
	// surfaces: what people, other languages and tests see of the services.
	surfaces
	// programs: parse, build and run.
	programs
)

func (l layer) String() string {
	return [...]string{"words", "cores", "shells", "services", "surfaces", "programs"}[l]
}

// layers gives every package of the module its height, by its path in the tree.
// The longest entry that is the path or a parent of it counts. A package without
// an entry is a problem: whoever adds one decides where it stands, here.
var layers = map[string]layer{
	"internal/base":       words,
	"internal/invariants": words,
	"internal/offheap":    words,
	"api":                 words,

	"internal/checksum":  cores,
	"internal/directory": cores,
	"internal/extent":    cores,
	"internal/hot":       cores,
	"internal/keys":      cores,
	"internal/policy":    cores,
	"internal/poolfmt":   cores,
	"internal/rm/core":   cores,
	"internal/session":   cores,
	// The contract alone, which a core fills batches for; who keeps them is a shell.
	"internal/store":    cores,
	"internal/transfer": cores,

	"internal/child":           shells,
	"internal/fabric":          shells,
	"internal/flush":           shells,
	"internal/gpu":             shells,
	"internal/inject":          shells,
	"internal/killtest":        shells,
	"internal/leak":            shells,
	"internal/media":           shells,
	"internal/node":            shells,
	"internal/obs":             shells,
	"internal/statedir":        shells,
	"internal/peer":            shells,
	"internal/rpc":             shells,
	"internal/settings":        shells,
	"internal/store/bolt":      shells,
	"internal/store/etcd":      shells,
	"internal/store/storetest": shells,

	"client":          services,
	"internal/agent":  services,
	"internal/rm":     services,
	"internal/server": services,

	"internal/bench":   surfaces,
	"internal/cabi":    surfaces,
	"internal/cli":     surfaces,
	"internal/demo":    surfaces,
	"internal/doctor":  surfaces,
	"internal/lint":    surfaces,
	"internal/sim":     surfaces,
	"internal/torture": surfaces,
	"internal/tui":     surfaces,
	"internal/up":      surfaces,
	"test":             surfaces,

	"cmd": programs,
}

// layerOf returns the layer of the package in directory dir ("internal/rm/core").
func layerOf(dir string) (layer, bool) {
	for d := dir; d != "."; {
		if l, ok := layers[d]; ok {
			return l, true
		}
		i := strings.LastIndexByte(d, '/')
		if i < 0 {
			break
		}
		d = d[:i]
	}
	return 0, false
}

// cgoDirs are the packages that may speak C: the exports, and the two libraries
// that are opened at run time.
var cgoDirs = []string{"cmd/libmaru", "internal/fabric/verbs", "internal/gpu"}

// impureImports are what a core may not import, and why it would.
var impureImports = map[string]string{
	"crypto/rand":           "randomness comes in with the request, so that a seed replays a run",
	"log":                   "I/O",
	"log/slog":              "I/O",
	"math/rand":             "randomness comes in with the request, so that a seed replays a run",
	"math/rand/v2":          "randomness comes in with the request, so that a seed replays a run",
	"net":                   "I/O",
	"os":                    "I/O",
	"os/exec":               "I/O",
	"os/signal":             "I/O",
	"syscall":               "I/O",
	"golang.org/x/sys/unix": "I/O",
}

// clockCalls are the functions of package time that read or wait for the clock
// of the machine.
var clockCalls = map[string]bool{
	"After": true, "AfterFunc": true, "NewTicker": true, "NewTimer": true, "Now": true,
	"Since": true, "Sleep": true, "Tick": true, "Until": true,
}

// bannedNames are package names that say nothing about what is inside.
var bannedNames = map[string]bool{"common": true, "helper": true, "helpers": true, "pkg": true, "util": true, "utils": true}

// Limits of length, in lines.
const (
	maxMainLines = 60
	maxFileLines = 700
)

// registries are the hosts of package registries. Tools find theirs by their own
// settings, so a name in the tree breaks whoever has a mirror. They are put
// together from parts, so that this file is not its own first finding.
var registries = []string{
	"pypi" + ".org", "python" + "hosted.org", "proxy.golang" + ".org", "sum.golang" + ".org",
	"deb.debian" + ".org", "security.debian" + ".org", "registry.npmjs" + ".org", "crates" + ".io",
	"repo1.maven" + ".org", "repo.maven.apache" + ".org",
}
