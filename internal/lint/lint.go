// Package lint keeps the rules of the house that no ready-made linter knows:
// imports point down, cores stay pure, cgo and unsafe stay where they are
// declared, files stay short. Its tests walk the whole tree, so a new package is
// under the rules from its first commit. It is not a style checker: gofmt, vet,
// staticcheck and golangci-lint do that (scripts/check.sh).
//
// Rules, each with the function that holds it:
//  1. every package has a place in the table of layers.go, and imports nothing
//     above its own layer (checkGo);
//  2. a core has no I/O, clock, randomness or goroutine (checkPure);
//  3. cgo only in the packages named in cgoDirs, unsafe only in files named
//     *_unsafe.go, atomics only by the types of sync/atomic (checkGo);
//  4. mains are under 60 lines, files under 700, no package is named util, common,
//     helpers or pkg (checkGo, checkLength);
//  5. no tracked file names a package registry or a path of somebody's machine
//     (checkText).
//
// Source: docs/ARCHITECTURE.md, section "Layout".
package lint

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// module is the import path of the tree.
const module = "github.com/xcena-dev/maru"

// checkGo returns what is wrong with one Go file. name is its path in the tree,
// with slashes. The layers and the purity of cores are rules for what is
// shipped: tests may reach for anything.
func checkGo(name string, src []byte) []string {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return []string{fmt.Sprintf("%s: does not parse: %v", name, err)}
	}
	var problems []string
	report := func(pos token.Pos, format string, args ...any) {
		p := fset.Position(pos)
		problems = append(problems, fmt.Sprintf("%s:%d: ", name, p.Line)+fmt.Sprintf(format, args...))
	}
	dir, isTest := path.Dir(name), strings.HasSuffix(name, "_test.go")

	pkg := strings.TrimSuffix(file.Name.Name, "_test")
	if bannedNames[pkg] || slices.ContainsFunc(strings.Split(dir, "/"), func(s string) bool { return bannedNames[s] }) {
		report(file.Name.Pos(), "the name of package %s in %s says nothing: name it after the thing that it is", pkg, dir)
	}
	own, placed := layerOf(dir)
	if !placed && !isTest {
		report(file.Name.Pos(), "package %s has no place in the table of internal/lint/layers.go: add it", dir)
	}

	for _, imp := range file.Imports {
		p, err := strconv.Unquote(imp.Path.Value)
		if err != nil {
			continue
		}
		switch {
		case p == "C":
			if !slices.Contains(cgoDirs, dir) {
				report(imp.Pos(), "cgo is allowed in %s only", strings.Join(cgoDirs, ", "))
			}
		case p == "unsafe":
			if !generated.Match(src) && !strings.HasSuffix(name, "_unsafe.go") && !strings.HasSuffix(name, "_unsafe_test.go") {
				report(imp.Pos(), "unsafe is allowed in files named *_unsafe.go only")
			}
		case strings.HasPrefix(p, module+"/") && placed && !isTest:
			target := strings.TrimPrefix(p, module+"/")
			if l, ok := layerOf(target); ok && l > own {
				report(imp.Pos(), "imports point down: %s is one of the %s and imports %s of the %s", dir, own, target, l)
			}
		}
	}
	problems = append(problems, checkAtomics(name, fset, file)...)
	if own == cores && placed && !isTest {
		problems = append(problems, checkPure(name, fset, file)...)
	}
	if strings.HasPrefix(dir, "cmd/") && path.Base(name) == "main.go" {
		if n := lines(src); n >= maxMainLines {
			report(file.Name.Pos(), "a main parses, builds and runs: %d lines, under %d are allowed", n, maxMainLines)
		}
	}
	return problems
}

// checkPure returns what one file of a core does that a core may not.
func checkPure(name string, fset *token.FileSet, file *ast.File) []string {
	var problems []string
	report := func(pos token.Pos, format string, args ...any) {
		problems = append(problems, fmt.Sprintf("%s:%d: a core ", name, fset.Position(pos).Line)+fmt.Sprintf(format, args...))
	}
	for _, imp := range file.Imports {
		p, _ := strconv.Unquote(imp.Path.Value)
		why, bad := impureImports[p]
		if !bad && strings.HasPrefix(p, "net/") {
			why, bad = "I/O", true
		}
		if bad {
			report(imp.Pos(), "may not import %s: %s", p, why)
		}
	}
	clock := localName(file, "time")
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			report(n.Pos(), "starts no goroutine")
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && clock != "" && x.Name == clock && clockCalls[n.Sel.Name] {
				report(n.Pos(), "may not use time.%s: the time comes in with the request", n.Sel.Name)
			}
		}
		return true
	})
	return problems
}

// checkAtomics returns the uses of the functions of sync/atomic. The types say at
// their declaration that a field is shared; the functions leave it to each use.
func checkAtomics(name string, fset *token.FileSet, file *ast.File) []string {
	local := localName(file, "sync/atomic")
	if local == "" {
		return nil
	}
	var problems []string
	ast.Inspect(file, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); ok && x.Name == local && atomicFunction.MatchString(sel.Sel.Name) {
			problems = append(problems, fmt.Sprintf("%s:%d: atomic.%s: use the types of sync/atomic",
				name, fset.Position(sel.Pos()).Line, sel.Sel.Name))
		}
		return true
	})
	return problems
}

var atomicFunction = regexp.MustCompile(`^(Add|And|CompareAndSwap|Load|Or|Store|Swap)(Int|Uint|Pointer)`)

// localName returns the name by which file uses the package at path, "" when it
// does not import it.
func localName(file *ast.File, importPath string) string {
	for _, imp := range file.Imports {
		if p, _ := strconv.Unquote(imp.Path.Value); p == importPath {
			if imp.Name != nil {
				return imp.Name.Name
			}
			return path.Base(importPath)
		}
	}
	return ""
}

// generated matches the mark that generators leave, in any language.
var generated = regexp.MustCompile(`(?m)^(//|#|--) Code generated .*DO NOT EDIT\.?$`)

// checkLength returns a problem when a file that is written by hand is so long
// that it holds more than one idea.
func checkLength(name string, src []byte) []string {
	switch path.Ext(name) {
	case ".go", ".py", ".sh", ".h", ".c", ".cu", ".proto":
	default:
		return nil
	}
	if n := lines(src); n > maxFileLines && !generated.Match(src) {
		return []string{fmt.Sprintf("%s: %d lines, %d are allowed: split it by idea", name, n, maxFileLines)}
	}
	return nil
}

// machinePath matches the home and work folders of the machines that this tree
// is built on.
var machinePath = regexp.MustCompile(`(^|[^A-Za-z0-9_.*~}/-])/(work|root)/[A-Za-z0-9_.]`)

// checkText returns the registries and the paths of a machine that a file names.
func checkText(name string, src []byte) []string {
	if bytes.IndexByte(src, 0) >= 0 {
		return nil
	}
	var problems []string
	for i, line := range strings.Split(string(src), "\n") {
		for _, host := range registries {
			if strings.Contains(line, host) {
				problems = append(problems, fmt.Sprintf("%s:%d: names the package registry %s: use its client and no name", name, i+1, host))
			}
		}
		if m := machinePath.FindString(line); m != "" {
			problems = append(problems, fmt.Sprintf("%s:%d: names a path of one machine (%q)", name, i+1, m))
		}
	}
	return problems
}

func lines(src []byte) int {
	n := bytes.Count(src, []byte("\n"))
	if len(src) > 0 && src[len(src)-1] != '\n' {
		n++
	}
	return n
}
