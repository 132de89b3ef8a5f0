package bench

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// Variables of the environment that say where the Python side is.
const (
	pythonVariable  = "MARU_PYTHON"
	libraryVariable = "MARU_LIBRARY"
)

// pythonSide is an interpreter, the script, and what it needs to find the package.
type pythonSide struct {
	interpreter string
	script      string
	path        string // for PYTHONPATH; empty: the package is installed
}

func (p pythonSide) String() string {
	from := "the installed package maru"
	if p.path != "" {
		from = p.path
	}
	return fmt.Sprintf("%s with %s, %s", p.interpreter, from, p.script)
}

// findPython finds everything that the Python rows need, or says what to do.
// Errors: ErrUnsupported.
func findPython(ctx context.Context) (pythonSide, error) {
	var p pythonSide
	name := os.Getenv(pythonVariable)
	if name == "" {
		name = "python3"
	}
	var err error
	if p.interpreter, err = exec.LookPath(name); err != nil {
		return p, fmt.Errorf("%w: this benchmark calls the library from Python, and there is no %s: %w; install Python 3.11 or later, or name one in %s",
			base.ErrUnsupported, name, err, pythonVariable)
	}
	tree := sourceTree()
	if tree == "" {
		return p, fmt.Errorf("%w: python/bench/data.py is neither above this program nor above the current directory; run it in the source tree",
			base.ErrUnsupported)
	}
	p.script = filepath.Join(tree, "python", "bench", "data.py")
	_, libraryMissing := os.Stat(filepath.Join(tree, "python", "maru", "lib", "libmaru.so"))
	if libraryMissing == nil || os.Getenv(libraryVariable) != "" {
		p.path = filepath.Join(tree, "python")
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.interpreter, "-P", "-c", "import maru._lib as l; l.load()") //nolint:gosec // the user's interpreter
	cmd.Env = p.environment()
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(said.String()), "\n")
		return p, fmt.Errorf("%w: %s cannot load the package maru with libmaru.so (%s; %w); run `make build` in the source tree, or install the wheel",
			base.ErrUnsupported, p.interpreter, lines[len(lines)-1], err)
	}
	return p, nil
}

// sourceTree is the nearest directory with the script, above the program or above the
// current directory.
func sourceTree() string {
	var from []string
	if program, err := os.Executable(); err == nil {
		from = append(from, filepath.Dir(program))
	}
	if dir, err := os.Getwd(); err == nil {
		from = append(from, dir)
	}
	for _, dir := range from {
		for {
			if _, err := os.Stat(filepath.Join(dir, "python", "bench", "data.py")); err == nil {
				return dir
			}
			parent := filepath.Dir(dir)
			if parent == dir {
				break
			}
			dir = parent
		}
	}
	return ""
}

func (p pythonSide) environment() []string {
	env := os.Environ()
	if p.path != "" {
		path := p.path
		if old := os.Getenv("PYTHONPATH"); old != "" {
			path += string(os.PathListSeparator) + old
		}
		env = append(env, "PYTHONPATH="+path)
	}
	return append(env, "PYTHONDONTWRITEBYTECODE=1")
}

// start starts the script; it obeys from then on.
func (p pythonSide) start(ctx context.Context) (*process, error) {
	cmd := exec.CommandContext(ctx, p.interpreter, "-P", p.script) //nolint:gosec // our script
	cmd.Env = p.environment()
	return startProcess("python", cmd, nil)
}
