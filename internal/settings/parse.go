package settings

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"time"

	"github.com/xcena-dev/maru/internal/base"
)

const sizeAllowed = `allowed: bytes as a number, or a number with K, M, G or T (1024-based; "KiB", "MiB" ... mean the same)`

// ParseSize reads a size: "4G", "500M", "1.5GiB", "4096". K, M, G, T and P are powers of
// 1024, with or without iB or B. Errors: ErrInvalid.
func ParseSize(s string) (uint64, error) {
	bad := func(why string) (uint64, error) {
		return 0, fmt.Errorf("%w: size %.64q %s; %s", base.ErrInvalid, s, why, sizeAllowed)
	}
	t := strings.TrimSpace(s)
	end := len(t)
	for end > 0 && (t[end-1] < '0' || t[end-1] > '9') && t[end-1] != '.' {
		end--
	}
	number, unit := t[:end], strings.ToUpper(strings.TrimSpace(t[end:]))
	unit = strings.TrimSuffix(strings.TrimSuffix(unit, "B"), "I")
	shift := strings.Index("KMGTP", unit)
	switch {
	case unit == "":
		shift = 0
		if u := strings.ToUpper(strings.TrimSpace(t[end:])); u != "" && u != "B" {
			return bad("has no known unit")
		}
	case len(unit) != 1 || shift < 0:
		return bad("has no known unit")
	default:
		shift = 10 * (shift + 1)
	}
	whole, fraction, dot := strings.Cut(number, ".")
	if whole == "" || dot && fraction == "" || len(number) > 32 || !digits(whole) || !digits(fraction) {
		return bad("is no number")
	}
	r, ok := new(big.Rat).SetString(number)
	if !ok {
		return bad("is no number")
	}
	r.Mul(r, new(big.Rat).SetInt(new(big.Int).Lsh(big.NewInt(1), uint(shift))))
	if !r.IsInt() {
		return bad("is no whole number of bytes")
	}
	if !r.Num().IsUint64() {
		return bad("is too large")
	}
	return r.Num().Uint64(), nil
}

func digits(s string) bool {
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return true
}

// FormatSize shows a size so that [ParseSize] reads the same: "4GiB", "1536MiB", "1000".
func FormatSize(n uint64) string {
	units := "KMGTP"
	unit := -1
	for n != 0 && n%1024 == 0 && unit < len(units)-1 {
		n /= 1024
		unit++
	}
	if unit < 0 {
		return strconv.FormatUint(n, 10)
	}
	return strconv.FormatUint(n, 10) + units[unit:unit+1] + "iB"
}

// AboutSize shows a size as a person reads it: exact where that is short, else with
// one decimal and "B" for the smallest, so that a column of them is understood.
func AboutSize(n uint64) string {
	switch {
	case n == 0:
		return "0"
	case n < 1024:
		return strconv.FormatUint(n, 10) + "B"
	}
	exact := FormatSize(n)
	if len(exact) <= len("1023GiB") && strings.HasSuffix(exact, "iB") {
		return exact
	}
	units := "KMGTP"
	value, unit := float64(n)/1024, 0
	for ; value >= 1023.95 && unit < len(units)-1; unit++ { // it would be shown as 1024.0
		value /= 1024
	}
	return fmt.Sprintf("%.1f%ciB", value, units[unit])
}

// ParseBool reads 1, true, yes, on and 0, false, no, off, in any case. Errors: ErrInvalid.
func ParseBool(s string) (bool, error) {
	switch strings.ToLower(strings.TrimSpace(s)) {
	case "1", "true", "yes", "on":
		return true, nil
	case "0", "false", "no", "off":
		return false, nil
	}
	return false, fmt.Errorf("%w: %.64q is neither true nor false; allowed: 1, true, yes, on, 0, false, no, off", base.ErrInvalid, s)
}

// ParseDuration reads a duration with its unit: "500ms", "10s", "1h30m"; 0 needs none.
// Errors: ErrInvalid.
func ParseDuration(s string) (time.Duration, error) {
	t := strings.TrimSpace(s)
	d, err := time.ParseDuration(t)
	if err == nil {
		return d, nil
	}
	if _, numErr := strconv.ParseFloat(t, 64); numErr == nil {
		return 0, fmt.Errorf("%w: duration %.64q has no unit; allowed: for instance 500ms, 10s, 1h30m", base.ErrInvalid, s)
	}
	return 0, fmt.Errorf("%w: duration %.64q; allowed: for instance 500ms, 10s, 1h30m", base.ErrInvalid, s)
}

func parseInt(s string, bits int) (int64, error) {
	n, err := strconv.ParseInt(strings.TrimSpace(s), 0, bits)
	if err != nil {
		return 0, fmt.Errorf("%w: %.64q is no whole number between %d and %d", base.ErrInvalid, s,
			-(int64(1) << (bits - 1)), int64(math.MaxInt64>>(64-bits)))
	}
	return n, nil
}

func parseUint(s string, bits int) (uint64, error) {
	n, err := strconv.ParseUint(strings.TrimSpace(s), 0, bits)
	if err != nil {
		return 0, fmt.Errorf("%w: %.64q is no whole number between 0 and %d", base.ErrInvalid, s, uint64(math.MaxUint64>>(64-bits)))
	}
	return n, nil
}

func parseFloat(s string, bits int) (float64, error) {
	f, err := strconv.ParseFloat(strings.TrimSpace(s), bits)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		return 0, fmt.Errorf("%w: %.64q is no finite number", base.ErrInvalid, s)
	}
	return f, nil
}
