package inject

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
	"github.com/xcena-dev/maru/internal/leak"
)

const (
	variable  = "MARU_TEST_INJECT" // stage:subject:options
	armSocket = 3                  // in the first stage: where the listener goes
	// settle is how long descriptors, mappings and goroutines may take to go.
	settle = 3 * time.Second
)

// Subject is the body of a process that is failed. What it starts runs until in ends;
// then it stops it. Its error is printed and is the process's status 1.
type Subject func(ctx context.Context, options json.RawMessage, in io.Reader, say func(v any)) error

// End is what a subject says last.
type End struct {
	Start string   `json:"start,omitempty"` // why it did not start
	Close string   `json:"close,omitempty"` // why it did not stop in order
	Left  []string `json:"left,omitempty"`  // descriptors, mappings, goroutines
}

// Ready is what a subject says when it serves.
type Ready struct {
	Ready bool `json:"ready"`
	End
}

// Run is a subject's usual way: start, serve until in ends, stop; and tell what was left
// open, also by a start that failed.
func Run(in io.Reader, say func(v any), start func() (stop func() error, err error)) error {
	before, err := leak.Take()
	if err != nil {
		return err
	}
	stop, startErr := start()
	if startErr != nil {
		say(Ready{End: End{Start: startErr.Error(), Left: before.Left(settle)}})
		return nil //nolint:nilerr // it was said
	}
	say(Ready{Ready: true})
	_, _ = io.Copy(io.Discard, in)
	e := End{}
	if err := stop(); err != nil {
		e.Close = err.Error()
	}
	e.Left = before.Left(settle)
	say(Ready{End: e})
	return nil
}

// Main is for TestMain: in a process that Start made it does not return.
func Main(subjects map[string]Subject) {
	stage, rest, ok := strings.Cut(os.Getenv(variable), ":")
	if !ok {
		return
	}
	if err := stageOf(stage, rest, subjects); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func stageOf(stage, rest string, subjects map[string]Subject) error {
	if stage == "arm" {
		return arm(rest)
	}
	name, options, _ := strings.Cut(rest, ":")
	run := subjects[name]
	if run == nil {
		return fmt.Errorf("%w: no subject is called %q", base.ErrInvalid, name)
	}
	encode := json.NewEncoder(os.Stdout)
	return run(context.Background(), json.RawMessage(options), os.Stdin, func(v any) { _ = encode.Encode(v) })
}

// arm filters this thread, sends the listener to the test and becomes the subject: what is
// executed has the filter in all its threads from its first call on.
func arm(rest string) error {
	runtime.LockOSThread()
	fd, err := install()
	if err != nil {
		return err
	}
	if err := unix.Sendmsg(armSocket, []byte{0}, unix.UnixRights(fd), nil, 0); err != nil {
		return fmt.Errorf("send the listener: %w", err)
	}
	unix.CloseOnExec(armSocket)
	var env []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, variable+"=") {
			env = append(env, e)
		}
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	return errors.Join(errors.New("execute the subject"), unix.Exec(program, os.Args, append(env, variable+"=run:"+rest)))
}
