package settings

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/xcena-dev/maru/internal/base"
)

// maxFileBytes bounds a YAML file; one with every setting has a few KiB.
const maxFileBytes = 1 << 20

// fileValue is a setting in a file.
type fileValue struct {
	f     *field
	parts []string
	place string // file, line and key, for messages
}

// readFile reads a YAML file; from names the flag or variable that gave its path.
func readFile(path, from string, fields []*field) ([]fileValue, []error) {
	b, err := readBounded(path)
	if err != nil {
		return nil, []error{fmt.Errorf("%s: %w", from, err)}
	}
	return parseFile(path, b, fields)
}

func readBounded(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fileError(path, err)
	}
	defer f.Close() //nolint:errcheck // read only
	if info, err := f.Stat(); err != nil || info.IsDir() {
		return nil, fmt.Errorf("%w: %s is a directory", base.ErrInvalid, path)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, fileError(path, err)
	}
	if len(b) > maxFileBytes {
		return nil, fmt.Errorf("%w: %s has more than %s", base.ErrInvalid, path, FormatSize(maxFileBytes))
	}
	return b, nil
}

func fileError(path string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: file %s does not exist", base.ErrNotFound, path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: file %s cannot be read: %w", base.ErrDenied, path, err)
	}
	return fmt.Errorf("%w: reading %s: %w", base.ErrInvalid, path, err)
}

// parseFile reads nodes instead of decoding, so that sizes, durations and booleans are
// read here as they are in flags, and every problem has its line.
func parseFile(path string, b []byte, fields []*field) ([]fileValue, []error) {
	d := yaml.NewDecoder(bytes.NewReader(b))
	var doc yaml.Node
	if err := d.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, nil // an empty file, or comments only
	} else if err != nil {
		return nil, []error{fmt.Errorf("%w: %s is no YAML: %w", base.ErrInvalid, path, err)}
	}
	p := &fileParser{path: path, fields: fields}
	var second yaml.Node
	if err := d.Decode(&second); !errors.Is(err, io.EOF) {
		p.bad(&second, "has more than one document")
	}
	if len(doc.Content) == 1 {
		p.mapping(doc.Content[0], nil)
	}
	return p.values, p.problems
}

type fileParser struct {
	path     string
	fields   []*field
	values   []fileValue
	problems []error
}

func (p *fileParser) bad(n *yaml.Node, format string, args ...any) {
	p.problems = append(p.problems, fmt.Errorf("%w: %s line %d: %s", base.ErrInvalid, p.path, n.Line, fmt.Sprintf(format, args...)))
}

func (p *fileParser) mapping(n *yaml.Node, prefix []string) {
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return
	}
	if n.Kind != yaml.MappingNode {
		p.bad(n, "%s must be keys with values", orRoot(prefix))
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		// A key may be spelt as its flag is.
		name := strings.ReplaceAll(k.Value, "-", "_")
		if k.Kind != yaml.ScalarNode {
			p.bad(k, "a key must be a name")
			continue
		}
		if line, twice := seen[name]; twice {
			p.bad(k, "key %q is on line %d already", k.Value, line)
			continue
		}
		seen[name] = k.Line
		p.entry(append(prefix[:len(prefix):len(prefix)], name), k, v)
	}
}

func orRoot(prefix []string) string {
	if len(prefix) == 0 {
		return "the file"
	}
	return strings.Join(prefix, ".")
}

func (p *fileParser) entry(path []string, k, v *yaml.Node) {
	key := strings.Join(path, ".")
	var isGroup bool
	for _, f := range p.fields {
		if f.key() == key {
			p.value(f, key, v)
			return
		}
		isGroup = isGroup || strings.HasPrefix(f.key(), key+".")
	}
	if isGroup {
		p.mapping(v, path)
		return
	}
	names := make([]string, len(p.fields))
	for i, f := range p.fields {
		names[i] = f.key()
	}
	near, _ := nearest(key, names)
	p.bad(k, "key %.64q is unknown; the nearest that exists is %q", key, near)
}

func (p *fileParser) value(f *field, key string, v *yaml.Node) {
	place := fmt.Sprintf("%s line %d: %s", p.path, v.Line, key)
	if v.Kind == yaml.AliasNode {
		v = v.Alias
	}
	switch {
	case v.Kind == yaml.ScalarNode && v.Tag == "!!null":
		// A key without a value is the default.
	case v.Kind == yaml.ScalarNode:
		p.values = append(p.values, fileValue{f, f.parts(v.Value), place})
	case v.Kind == yaml.SequenceNode && f.isList():
		parts := make([]string, 0, len(v.Content))
		for _, e := range v.Content {
			if e.Kind == yaml.AliasNode {
				e = e.Alias
			}
			if e.Kind != yaml.ScalarNode {
				p.bad(e, "%s must be a list of plain values", key)
				return
			}
			parts = append(parts, e.Value)
		}
		p.values = append(p.values, fileValue{f, parts, place})
	default:
		p.bad(v, "%s must be one value of kind %s", key, f.typeName())
	}
}

// nearest returns the name with the fewest edits to s.
func nearest(s string, names []string) (string, int) {
	best, distance := "", 1<<30
	if len(s) > 128 {
		s = s[:128] // the distance costs a product of lengths
	}
	for _, n := range names {
		if d := edits(s, n); d < distance {
			best, distance = n, d
		}
	}
	return best, distance
}

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
