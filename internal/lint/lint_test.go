package lint

import (
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

// root is the root of the tree, seen from this package.
const root = "../.."

// treeFiles returns the files of the tree by path: those that git tracks or would
// track, or, where there is no git (a release archive), all that are there.
func treeFiles(t *testing.T) []string {
	t.Helper()
	var names []string
	cmd := exec.Command("git", "ls-files", "-z", "-co", "--exclude-standard")
	cmd.Dir = root
	if out, err := cmd.Output(); err == nil {
		for _, name := range strings.Split(string(out), "\x00") {
			if info, err := os.Lstat(filepath.Join(root, name)); name != "" && err == nil && info.Mode().IsRegular() {
				names = append(names, name)
			}
		}
		return names
	}
	skip := map[string]bool{".git": true, ".cache": true, "bin": true, "build": true, "dist": true}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		switch {
		case d.IsDir() && skip[name]:
			return fs.SkipDir
		case d.Type().IsRegular():
			names = append(names, filepath.ToSlash(name))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// TestTree holds every file of the tree to the rules of the package comment.
func TestTree(t *testing.T) {
	names := treeFiles(t)
	goCount := 0
	for _, name := range names {
		src, err := os.ReadFile(filepath.Join(root, name))
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		problems := checkText(name, src)
		problems = append(problems, checkLength(name, src)...)
		if path.Ext(name) == ".go" && !strings.Contains(name, "/testdata/") {
			goCount++
			problems = append(problems, checkGo(name, src)...)
		}
		for _, p := range problems {
			t.Error(p)
		}
	}
	// A walk that finds nothing would hold every rule.
	if goCount < 20 {
		t.Errorf("only %d Go files of %d files found: the walk is broken", goCount, len(names))
	}
}

// TestRules shows that each rule can fail, and that what is near it passes.
func TestRules(t *testing.T) {
	long := strings.Repeat("// line\n", maxFileLines)
	cases := []struct {
		what, name, src string
		want            string // part of the only problem; "" for none
	}{
		{"a core importing a shell", "internal/extent/x.go", "package extent\nimport _ \"" + module + "/internal/store/bolt\"", "imports point down"},
		{"a word importing a core", "internal/base/x.go", "package base\nimport _ \"" + module + "/internal/keys\"", "imports point down"},
		{"the core of a service importing the service", "internal/rm/core/x.go", "package core\nimport _ \"" + module + "/internal/rm\"", "imports point down"},
		{"a service importing its core", "internal/rm/x.go", "package rm\nimport _ \"" + module + "/internal/rm/core\"", ""},
		{"a core importing a core", "internal/directory/x.go", "package directory\nimport _ \"" + module + "/internal/keys\"", ""},
		{"a test importing upwards", "internal/extent/x_test.go", "package extent\nimport _ \"" + module + "/internal/server\"", ""},
		{"a package without a place", "internal/novel/x.go", "package novel", "has no place"},
		{"a core with files", "internal/policy/x.go", "package policy\nimport _ \"os\"", "may not import os"},
		{"a core with a network", "internal/policy/x.go", "package policy\nimport _ \"net/http\"", "may not import net/http"},
		{"a core with a system call", "internal/policy/x.go", "package policy\nimport _ \"golang.org/x/sys/unix\"", "may not import golang.org/x/sys/unix"},
		{"a core with a clock", "internal/session/x.go", "package session\nimport \"time\"\nvar _ = time.Now()", "may not use time.Now"},
		{"a core with a clock by another name", "internal/session/x.go", "package session\nimport clock \"time\"\nvar now = clock.Now", "may not use time.Now"},
		{"a core with a duration", "internal/session/x.go", "package session\nimport \"time\"\nvar _ time.Duration = time.Second", ""},
		{"a core with a goroutine", "internal/transfer/x.go", "package transfer\nfunc f() { go f() }", "starts no goroutine"},
		{"a shell with a goroutine and a clock", "internal/store/bolt/x.go", "package bolt\nimport \"time\"\nfunc f() { go f(); time.Sleep(1) }", ""},
		{"cgo elsewhere", "internal/media/dax/x.go", "package dax\nimport \"C\"", "cgo is allowed in"},
		{"cgo below a package that may", "cmd/libmaru/deeper/x.go", "package deeper\nimport \"C\"", "cgo is allowed in"},
		{"cgo in the exports", "cmd/libmaru/x.go", "package main\nimport \"C\"", ""},
		{"unsafe elsewhere", "internal/media/x.go", "package media\nimport \"unsafe\"\nvar _ unsafe.Pointer", "unsafe is allowed"},
		{"unsafe in its file", "internal/media/x_unsafe.go", "package media\nimport \"unsafe\"\nvar _ unsafe.Pointer", ""},
		{"unsafe in its test", "internal/media/x_unsafe_test.go", "package media\nimport \"unsafe\"\nvar _ unsafe.Pointer", ""},
		{"a raw atomic", "internal/obs/x.go", "package obs\nimport \"sync/atomic\"\nvar n int64\nfunc f() { atomic.AddInt64(&n, 1) }", "atomic.AddInt64"},
		{"a typed atomic", "internal/obs/x.go", "package obs\nimport \"sync/atomic\"\nvar n atomic.Int64\nfunc f() { n.Add(1) }", ""},
		{"a name that says nothing", "internal/obs/util/x.go", "package util", "says nothing"},
		{"a parent that says nothing", "internal/obs/common/names/x.go", "package names", "says nothing"},
		{"a long main", "cmd/maru/main.go", "package main\n" + strings.Repeat("\n", maxMainLines), "a main parses"},
		{"a long file", "internal/obs/x.go", "package obs\n" + long, "split it by idea"},
		{"a long generated file", "internal/obs/x.go", "// Code generated by x. DO NOT EDIT.\npackage obs\n" + long, ""},
		{"a registry", "docs/x.md", "see https://" + registries[0] + "/x", "names the package registry"},
		{"a path of a machine", "docs/x.md", "cd /wor" + "k/main", "names a path of one machine"},
		{"a home of a machine", "docs/x.md", "`/roo" + "t/x`", "names a path of one machine"},
		{"a path with such a folder inside", "docs/x.md", "lib/" + "work/x and ~/" + "root/x", ""},
		{"a file that does not parse", "internal/obs/x.go", "packag obs", "does not parse"},
	}
	for _, c := range cases {
		t.Run(c.what, func(t *testing.T) {
			problems := checkText(c.name, []byte(c.src))
			problems = append(problems, checkLength(c.name, []byte(c.src))...)
			if path.Ext(c.name) == ".go" {
				problems = append(problems, checkGo(c.name, []byte(c.src))...)
			}
			switch {
			case c.want == "" && len(problems) > 0:
				t.Errorf("want no problem, got %q", problems)
			case c.want != "" && (len(problems) != 1 || !strings.Contains(problems[0], c.want)):
				t.Errorf("want one problem with %q, got %q", c.want, problems)
			}
		})
	}
}

// TestLayerTable: an entry for a package that does not exist is allowed (the
// layout is drawn before it is built), an entry that can never apply is not.
func TestLayerTable(t *testing.T) {
	for dir, l := range layers {
		if got, ok := layerOf(dir + "/deeper"); !ok || got != l {
			if _, own := layers[dir+"/deeper"]; !own {
				t.Errorf("layerOf(%s/deeper) = %v, %v; want %v", dir, got, ok, l)
			}
		}
		if path.Clean(dir) != dir || strings.HasPrefix(dir, "/") {
			t.Errorf("entry %q is not a clean path in the tree", dir)
		}
	}
	if got, _ := layerOf("internal/rm/core/deeper"); got != cores {
		t.Errorf("internal/rm/core is one of the %s, want cores: the longest entry counts", got)
	}
	if _, ok := layerOf("internal"); ok {
		t.Error("internal itself has a layer")
	}
}
