package settings

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/xcena-dev/maru/internal/base"
)

// DefaultEnvPrefix begins the names of variables.
const DefaultEnvPrefix = "MARU_"

// configFlag names the YAML file; its variable is MARU_CONFIG.
const configFlag = "config"

// Source says where a setting's value came from.
type Source uint8

// Sources, the weakest first.
const (
	FromDefault Source = iota
	FromEnvironment
	FromFile
	FromFlag
)

func (s Source) String() string {
	switch s {
	case FromDefault:
		return "default"
	case FromEnvironment:
		return "environment"
	case FromFile:
		return "file"
	case FromFlag:
		return "flag"
	}
	return fmt.Sprintf("source(%d)", uint8(s))
}

// Options of a set.
type Options struct {
	// EnvPrefix begins the names of variables; empty means MARU_.
	EnvPrefix string
	// Help gives texts by yaml key, for fields without a help tag.
	Help map[string]string
	// NoFile leaves --config out.
	NoFile bool
	// Environ is os.Environ outside tests.
	Environ func() []string
}

// Set is the settings of one program.
type Set struct {
	o       Options
	fs      *pflag.FlagSet
	fields  []*field
	flags   map[*field]*flagValue
	sources map[*field]Source
	config  string
}

// Bind makes a flag for each setting of the struct that cfg points to; what it holds now
// are the defaults. [Set.Load] fills it after the flags were parsed. Errors: ErrInternal
// (a field that cannot be a setting: a bug of the program).
func Bind(fs *pflag.FlagSet, cfg any, o Options) (*Set, error) {
	if o.EnvPrefix == "" {
		o.EnvPrefix = DefaultEnvPrefix
	}
	if o.Environ == nil {
		o.Environ = os.Environ
	}
	v := reflect.ValueOf(cfg)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		return nil, fmt.Errorf("%w: settings need a pointer to a struct, not %T", base.ErrInternal, cfg)
	}
	fields, err := fieldsOf(v.Elem(), nil)
	if err != nil {
		return nil, err
	}
	s := &Set{o: o, fs: fs, fields: fields, flags: map[*field]*flagValue{}, sources: map[*field]Source{}}
	if !o.NoFile {
		fs.StringVar(&s.config, configFlag, "", "YAML file with settings ("+s.env(configFlag)+")")
	}
	for _, f := range fields {
		if fs.Lookup(f.flag()) != nil {
			return nil, fmt.Errorf("%w: two settings have the flag --%s", base.ErrInternal, f.flag())
		}
		help := f.help
		if help == "" {
			help = o.Help[f.key()]
		}
		fv := &flagValue{f: f, initial: f.text()}
		fl := fs.VarPF(fv, f.flag(), "", strings.TrimSpace(help+" ("+f.env(o.EnvPrefix)+")"))
		if f.isBool() {
			fl.NoOptDefVal = "true"
		}
		s.flags[f] = fv
	}
	return s, nil
}

func (s *Set) env(name string) string { return s.o.EnvPrefix + strings.ToUpper(name) }

// flagValue keeps what the command line said until Load looks at it, so that a bad flag is
// reported together with all other problems.
type flagValue struct {
	f       *field
	initial string
	parts   []string
}

func (v *flagValue) String() string {
	if v.f == nil {
		return "" // pflag asks a zero value
	}
	if v.parts != nil {
		return strings.Join(v.parts, ",")
	}
	return v.initial
}

func (v *flagValue) Type() string { return v.f.typeName() }

func (v *flagValue) Set(s string) error {
	if v.f.isList() {
		v.parts = append(v.parts, splitList(s)...)
		return nil
	}
	v.parts = []string{s}
	return nil
}

// splitList cuts a list at commas; blanks around parts go, empty parts stay (they are
// refused by whoever knows what the list is for).
func splitList(s string) []string {
	if strings.TrimSpace(s) == "" {
		return []string{}
	}
	parts := strings.Split(s, ",")
	for i := range parts {
		parts[i] = strings.TrimSpace(parts[i])
	}
	return parts
}

// Load fills the struct: variables, then the YAML file over them, then flags over both.
// A setting that is in none keeps its default. validate, if not nil, runs after that, and
// its problems come in the same error. Errors: ErrInvalid for each problem, all joined;
// ErrNotFound, ErrDenied for the file.
func (s *Set) Load(validate func() error) error {
	var problems []error
	report := func(err error) {
		if err != nil {
			problems = append(problems, err)
		}
	}
	environ := s.environment()
	for _, f := range s.fields {
		name := f.env(s.o.EnvPrefix)
		if raw, ok := environ[name]; ok {
			report(s.apply(f, f.parts(raw), FromEnvironment, name))
		}
	}
	path, from := s.config, "--"+configFlag
	if raw, ok := environ[s.env(configFlag)]; ok && path == "" && !s.o.NoFile {
		path, from = raw, s.env(configFlag)
	}
	if path != "" {
		values, fileProblems := readFile(path, from, s.fields)
		problems = append(problems, fileProblems...)
		for _, v := range values {
			report(s.apply(v.f, v.parts, FromFile, v.place))
		}
	}
	for _, f := range s.fields {
		if fv := s.flags[f]; fv.parts != nil {
			report(s.apply(f, fv.parts, FromFlag, "--"+f.flag()))
		}
	}
	if validate != nil {
		report(validate())
	}
	return errors.Join(problems...)
}

func (f *field) parts(raw string) []string {
	if f.isList() {
		return splitList(raw)
	}
	return []string{raw}
}

func (s *Set) apply(f *field, parts []string, source Source, place string) error {
	if err := f.set(parts); err != nil {
		return fmt.Errorf("%s: %w", place, err)
	}
	s.sources[f] = source
	return nil
}

func (s *Set) environment() map[string]string {
	out := map[string]string{}
	for _, kv := range s.o.Environ() {
		if k, v, ok := strings.Cut(kv, "="); ok && strings.HasPrefix(k, s.o.EnvPrefix) {
			out[k] = v
		}
	}
	return out
}

// Suspects returns variables that begin with the prefix, are no setting, and differ from
// one by a slip of the pen, each with that one. Variables cannot be refused, since other
// programs have some too; a line in the log is what a program makes of these.
func (s *Set) Suspects() map[string]string {
	names := make([]string, 0, len(s.fields)+1)
	for _, f := range s.fields {
		names = append(names, f.env(s.o.EnvPrefix))
	}
	names = append(names, s.env(configFlag))
	out := map[string]string{}
	for k := range s.environment() {
		if slices.Contains(names, k) {
			continue
		}
		if near, distance := nearest(k, names); distance <= 2 {
			out[k] = near
		}
	}
	return out
}

// Setting is one setting as it is now.
type Setting struct {
	Key, Flag, Variable string
	Value               string
	Source              Source
}

// Settings lists all settings, for a log line at the start and for --help of programs.
func (s *Set) Settings() []Setting {
	out := make([]Setting, len(s.fields))
	for i, f := range s.fields {
		out[i] = Setting{Key: f.key(), Flag: f.flag(), Variable: f.env(s.o.EnvPrefix), Value: f.text(), Source: s.sources[f]}
	}
	return out
}

// SourceOf returns where the setting with a yaml key got its value.
func (s *Set) SourceOf(key string) Source {
	for _, f := range s.fields {
		if f.key() == key {
			return s.sources[f]
		}
	}
	return FromDefault
}
