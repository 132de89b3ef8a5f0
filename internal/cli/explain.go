package cli

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/xcena-dev/maru/internal/base"
)

// explainLimits bound what is read: the connector keeps to less.
const (
	explainFileBytes = 8 << 20
	explainLineBytes = 1 << 20
	explainFiles     = 256
)

// explainHeader is the first line of an engine's file of records.
type explainHeader struct {
	Engine    string         `json:"engine"`
	Server    string         `json:"server"`
	PID       int            `json:"pid"`
	Namespace map[string]any `json:"namespace"`
}

// explainRecord is what became of a request; python/maru_vllm/scheduler.py writes it.
// Counts are tokens.
type explainRecord struct {
	Request     string           `json:"request"`
	Engine      string           `json:"engine"`
	Time        float64          `json:"time"`
	Prompt      int64            `json:"prompt"`
	Local       int64            `json:"local"`
	Asked       int64            `json:"asked"`
	Found       int64            `json:"found"`
	Hit         map[string]int64 `json:"hit,omitempty"`
	Loaded      int64            `json:"loaded"`
	LoadMS      float64          `json:"load_ms"`
	Failed      int64            `json:"failed"`
	Code        int64            `json:"code,omitempty"`
	Miss        map[string]int64 `json:"miss,omitempty"`
	Bypass      string           `json:"bypass,omitempty"`
	Stored      int64            `json:"stored"`
	Prefix      string           `json:"prefix"`
	Unscheduled bool             `json:"unscheduled,omitempty"`
	Done        bool             `json:"done"`
	// Elsewhere names engines of other namespaces that had stored this prefix.
	Elsewhere []explainElsewhere `json:"elsewhere,omitempty"`

	header *explainHeader
}

// explainElsewhere is an engine that stored the same first tokens under another namespace.
type explainElsewhere struct {
	Engine  string   `json:"engine"`
	Differs []string `json:"differs"`
}

func (t *tool) explainCommand() *cobra.Command {
	var (
		dir    string
		last   int
		asJSON bool
	)
	cmd := &cobra.Command{
		Use: "explain [REQUEST_ID]", Short: "Say which tokens of recent requests were hits, and why the rest was not", Args: cobra.MaximumNArgs(1),
		Long: "Reads the records of the vLLM connectors of this host and user, also of engines that have ended. A request is named\n" +
			"by its id or the beginning of it: engines append to the id that a client gave.",
		RunE: func(cmd *cobra.Command, args []string) error {
			if last < 1 {
				return fmt.Errorf("%w: --last is %d, allowed: 1 and more", base.ErrInvalid, last)
			}
			if dir == "" {
				dir = runDirectory()
			}
			records, err := readExplanations(dir)
			if err != nil {
				return err
			}
			chosen := records
			if len(args) == 1 {
				chosen = slices.DeleteFunc(slices.Clone(records), func(r *explainRecord) bool { return !strings.HasPrefix(r.Request, args[0]) })
				if len(chosen) == 0 {
					return fmt.Errorf("%w: no record of request %q in %s among %d; the oldest are forgotten, and a request is recorded when it is first scheduled",
						base.ErrNotFound, args[0], dir, len(records))
				}
			}
			if len(chosen) == 0 {
				return fmt.Errorf("%w: no records in %s: no engine of this user has served a request with the connector, or maru_run_dir says otherwise (--dir)",
					base.ErrNotFound, dir)
			}
			chosen = chosen[max(0, len(chosen)-last):]
			for _, r := range chosen {
				r.lookElsewhere(records)
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), chosen)
			}
			for _, r := range chosen {
				r.print(cmd.OutOrStdout())
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "directory of the records: the connector's maru_run_dir (default: its default)")
	cmd.Flags().IntVar(&last, "last", 10, "at most so many requests, the newest")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON array")
	return cmd
}

// runDirectory is the connector's default of maru_run_dir.
func runDirectory() string {
	if d := os.Getenv("MARU_RUN_DIR"); d != "" {
		return d
	}
	if d := os.Getenv("XDG_RUNTIME_DIR"); d != "" {
		return filepath.Join(d, "maru")
	}
	return filepath.Join(os.TempDir(), "maru-"+strconv.Itoa(os.Getuid()))
}

// readExplanations reads the last record of every request, oldest first. Errors:
// ErrNotFound without a directory.
func readExplanations(dir string) ([]*explainRecord, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s is not there: no engine of this user has run with the connector, or maru_run_dir says otherwise (--dir)", base.ErrNotFound, dir)
	}
	if err != nil {
		return nil, err
	}
	found := map[string]*explainRecord{}
	// The older file of an engine first.
	for _, suffix := range []string{".jsonl.1", ".jsonl"} {
		files := 0
		for _, e := range entries {
			name := e.Name()
			if !strings.HasPrefix(name, "explain-") || !strings.HasSuffix(name, suffix) || files == explainFiles {
				continue
			}
			files++
			if err := readExplainFile(filepath.Join(dir, name), found); err != nil {
				return nil, err
			}
		}
	}
	records := slices.Collect(maps.Values(found))
	slices.SortFunc(records, func(a, b *explainRecord) int {
		return cmp.Or(cmp.Compare(a.Time, b.Time), cmp.Compare(a.Request, b.Request))
	})
	return records, nil
}

func readExplainFile(path string, found map[string]*explainRecord) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // begun anew, or an old engine's, removed
	}
	if err != nil {
		return fmt.Errorf("explain: %w", err)
	}
	defer func() { _ = f.Close() }()
	var header *explainHeader
	lines := bufio.NewScanner(io.LimitReader(f, explainFileBytes))
	lines.Buffer(nil, explainLineBytes)
	for lines.Scan() {
		// A line that is being written, or was cut off when the engine was killed, is no record.
		line := bytes.TrimSpace(lines.Bytes())
		if header == nil {
			var first struct {
				Header *explainHeader `json:"header"`
			}
			if json.Unmarshal(line, &first) != nil || first.Header == nil {
				return nil // no file of ours
			}
			header = first.Header
			continue
		}
		var r explainRecord
		if json.Unmarshal(line, &r) == nil && r.Request != "" {
			r.Engine, r.header = header.Engine, header
			found[header.Engine+"\x00"+r.Request] = &r
		}
	}
	if err := lines.Err(); err != nil && !errors.Is(err, bufio.ErrTooLong) {
		return fmt.Errorf("explain: %s: %w", path, err)
	}
	return nil
}

// lookElsewhere finds who stored the same first tokens where this engine does not look.
func (r *explainRecord) lookElsewhere(all []*explainRecord) {
	if r.Miss["not_stored"] == 0 || r.Prefix == "" {
		return
	}
	seen := map[string]bool{}
	for _, o := range all {
		if o.Prefix != r.Prefix || o.Stored == 0 || o.Engine == r.Engine || o.Time > r.Time || seen[o.Engine] {
			continue
		}
		if differs := differences(r.header.Namespace, o.header.Namespace); len(differs) > 0 {
			seen[o.Engine] = true
			r.Elsewhere = append(r.Elsewhere, explainElsewhere{Engine: o.Engine, Differs: differs})
		}
	}
}

// differences names fields of two namespaces that are not equal, with both values.
func differences(mine, theirs map[string]any) []string {
	keys := map[string]bool{}
	for k := range mine {
		keys[k] = true
	}
	for k := range theirs {
		keys[k] = true
	}
	var out []string
	for _, k := range slices.Sorted(maps.Keys(keys)) {
		a, b := fmt.Sprint(mine[k]), fmt.Sprint(theirs[k])
		if a != b {
			out = append(out, fmt.Sprintf("%s %.60s here, %.60s there", k, a, b))
		}
	}
	return out
}

// missTexts explain reasons; the words are those of the metric vllm:maru_miss_tokens.
var missTexts = map[string]string{
	"not_stored":  "nobody had stored them in this namespace",
	"evicted":     "this engine had stored them, and they were evicted or deleted: give the pool more room",
	"pending":     "they were being written at that moment",
	"unreachable": "the server did not answer, or not every worker of the engine had a session: see the engine's log and `maru usage`",
	"timeout":     "the lookup had no answer in time (maru_lookup_timeout_ms)",
	"too_short":   "behind the last whole chunk, or the token that is always computed",
	"not_worth":   "a load was expected to take longer than computing (maru_min_hit_tokens)",
	"failed":      "they were found, and lost or not right when they were loaded",
	"no_read":     "the request must not read a cache (prompt logprobs)",
	"bypass":      "the request neither reads nor writes",
}

func (r *explainRecord) print(w io.Writer) {
	state := ""
	switch {
	case r.Unscheduled:
		state = ", ended before it was scheduled"
	case !r.Done:
		state = ", running or cut off"
	}
	at := time.Unix(0, int64(r.Time*1e9)).UTC().Format(time.RFC3339)
	_, _ = fmt.Fprintf(w, "request %s  engine %s  %s  prompt %d tokens%s\n", printable(r.Request), printable(r.Engine), at, r.Prompt, state)
	row := func(name string, tokens int64, text string) {
		_, _ = fmt.Fprintf(w, "  %-8s %8d  %s\n", name, tokens, text)
	}
	if r.Local > 0 {
		row("local", r.Local, "from the engine's own prefix cache")
	}
	row("asked", r.Asked, fmt.Sprintf("in whole chunks, %d of them found", r.Found))
	if len(r.Hit) > 0 {
		var parts []string
		total := int64(0)
		for _, medium := range slices.Sorted(maps.Keys(r.Hit)) {
			parts = append(parts, fmt.Sprintf("%s %d", printable(medium), r.Hit[medium]))
			total += r.Hit[medium]
		}
		row("hit", total, strings.Join(parts, ", "))
		text := fmt.Sprintf("in %.1f ms", r.LoadMS)
		if r.Failed > 0 {
			text += fmt.Sprintf(", %d failed (code %d: %s)", r.Failed, r.Code, base.Code(r.Code)) //nolint:gosec // a code, or an unknown one
		}
		row("loaded", r.Loaded, text)
	}
	for _, reason := range slices.Sorted(maps.Keys(r.Miss)) {
		text := missTexts[reason]
		if reason == "bypass" && r.Bypass != "" {
			text += ": " + printable(r.Bypass)
		}
		row("missed", r.Miss[reason], printable(reason)+": "+text)
	}
	for _, e := range r.Elsewhere {
		_, _ = fmt.Fprintf(w, "           engine %s had stored this prefix in another namespace: %s\n", printable(e.Engine), printable(strings.Join(e.Differs, "; ")))
	}
	row("stored", r.Stored, "ordered to be stored since")
}

// printable keeps what others wrote from steering a terminal.
func printable(s string) string {
	if q := strconv.Quote(s); q != `"`+s+`"` {
		return q
	}
	return s
}
