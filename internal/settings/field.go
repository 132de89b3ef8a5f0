package settings

import (
	"encoding"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

// field is one setting of a struct.
type field struct {
	path  []string // yaml names from the root
	help  string
	value reflect.Value
	size  bool
}

func (f *field) key() string  { return strings.Join(f.path, ".") }
func (f *field) flag() string { return strings.ReplaceAll(strings.Join(f.path, "-"), "_", "-") }
func (f *field) env(prefix string) string {
	return prefix + strings.ToUpper(strings.Join(f.path, "_"))
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	textType     = reflect.TypeFor[encoding.TextUnmarshaler]()
)

// fieldsOf walks a struct. A type that it does not know is a bug of the program.
func fieldsOf(v reflect.Value, path []string) ([]*field, error) {
	var out []*field
	t := v.Type()
	for i := range t.NumField() {
		sf := t.Field(i)
		name, options, _ := strings.Cut(sf.Tag.Get("yaml"), ",")
		if !sf.IsExported() || name == "-" {
			continue
		}
		fv := v.Field(i)
		isText := fv.Addr().Type().Implements(textType)
		if sf.Type.Kind() == reflect.Struct && !isText {
			sub := path
			if options != "inline" && !(sf.Anonymous && name == "") {
				if name == "" {
					return nil, fmt.Errorf("%w: field %s.%s has no yaml name", base.ErrInternal, t, sf.Name)
				}
				sub = append(path[:len(path):len(path)], name)
			}
			fields, err := fieldsOf(fv, sub)
			if err != nil {
				return nil, err
			}
			out = append(out, fields...)
			continue
		}
		if name == "" {
			return nil, fmt.Errorf("%w: field %s.%s has no yaml name; leave it out with \"-\"", base.ErrInternal, t, sf.Name)
		}
		f := &field{path: append(path[:len(path):len(path)], name), help: sf.Tag.Get("help"), value: fv}
		f.size = strings.HasSuffix(sf.Name, "Bytes") && (fv.CanInt() || fv.CanUint()) && sf.Type != durationType
		if !isText && !f.supported() {
			return nil, fmt.Errorf("%w: field %s.%s has type %s, which is no setting", base.ErrInternal, t, sf.Name, sf.Type)
		}
		out = append(out, f)
	}
	return out, nil
}

func (f *field) supported() bool {
	t := f.value.Type()
	switch t.Kind() {
	case reflect.String, reflect.Bool, reflect.Float32, reflect.Float64:
		return true
	case reflect.Slice:
		return t.Elem().Kind() == reflect.String
	}
	return f.value.CanInt() || f.value.CanUint()
}

func (f *field) isList() bool { return f.value.Kind() == reflect.Slice && !f.isText() }
func (f *field) isBool() bool { return f.value.Kind() == reflect.Bool && !f.isText() }
func (f *field) isText() bool { return f.value.Addr().Type().Implements(textType) }

// set parses a value. Lists come as parts, everything else as one.
func (f *field) set(parts []string) error {
	if f.isList() {
		list := reflect.MakeSlice(f.value.Type(), 0, len(parts))
		for _, p := range parts {
			list = reflect.Append(list, reflect.ValueOf(p).Convert(f.value.Type().Elem()))
		}
		f.value.Set(list)
		return nil
	}
	if len(parts) != 1 {
		return fmt.Errorf("%w: %d values, one is allowed", base.ErrInvalid, len(parts))
	}
	s := parts[0]
	if f.isText() {
		err := f.value.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(s))
		if err != nil && !errors.Is(err, base.ErrInvalid) {
			err = fmt.Errorf("%w: %.64q: %w", base.ErrInvalid, s, err)
		}
		return err
	}
	return f.setScalar(s)
}

func (f *field) setScalar(s string) error {
	v := f.value
	bits := func() int { return v.Type().Bits() }
	switch {
	case v.Type() == durationType:
		d, err := ParseDuration(s)
		if err == nil {
			v.SetInt(int64(d))
		}
		return err
	case f.size:
		n, err := ParseSize(s)
		switch {
		case err != nil:
			return err
		case v.CanUint() && v.OverflowUint(n), v.CanInt() && (n > 1<<63-1 || v.OverflowInt(int64(n))):
			return fmt.Errorf("%w: size %.64q is too large", base.ErrInvalid, s)
		case v.CanUint():
			v.SetUint(n)
		default:
			v.SetInt(int64(n))
		}
		return nil
	case v.Kind() == reflect.String:
		v.SetString(s)
		return nil
	case v.Kind() == reflect.Bool:
		b, err := ParseBool(s)
		if err == nil {
			v.SetBool(b)
		}
		return err
	case v.CanInt():
		n, err := parseInt(s, bits())
		if err == nil {
			v.SetInt(n)
		}
		return err
	case v.CanUint():
		n, err := parseUint(s, bits())
		if err == nil {
			v.SetUint(n)
		}
		return err
	}
	x, err := parseFloat(s, bits())
	if err == nil {
		v.SetFloat(x)
	}
	return err
}

// text shows the value as set would read it.
func (f *field) text() string {
	v := f.value
	switch {
	case f.isList():
		parts := make([]string, v.Len())
		for i := range parts {
			parts[i] = v.Index(i).String()
		}
		return strings.Join(parts, ",")
	case f.isText():
		if m, ok := v.Addr().Interface().(encoding.TextMarshaler); ok {
			if b, err := m.MarshalText(); err == nil {
				return string(b)
			}
		}
		return fmt.Sprint(v.Interface())
	case v.Type() == durationType:
		return time.Duration(v.Int()).String()
	case f.size && v.CanUint():
		return FormatSize(v.Uint())
	case f.size && v.Int() >= 0:
		return FormatSize(uint64(v.Int()))
	case v.Kind() == reflect.Bool:
		return strconv.FormatBool(v.Bool())
	}
	return fmt.Sprint(v.Interface())
}

// typeName is what --help shows as the kind of value.
func (f *field) typeName() string {
	switch {
	case f.isList():
		return "list"
	case f.isText(), f.value.Kind() == reflect.String:
		return "string"
	case f.value.Type() == durationType:
		return "duration"
	case f.size:
		return "size"
	case f.isBool():
		return "bool"
	case f.value.CanFloat():
		return "float"
	}
	return "int"
}
