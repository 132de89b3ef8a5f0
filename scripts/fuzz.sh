#!/bin/bash
# fuzz.sh [FUZZTIME]: runs every fuzz target of the tree for FUZZTIME, which is a
# count (5000x) or a duration (1m). A count is the default: it does the same work
# on every machine, and a loaded one does not fail it.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

fuzztime=${1:-5000x}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
corpus=$(go env GOCACHE)/fuzz
module=$(go list -m)

count=0
built=
while IFS=: read -r file target; do
  dir=$(dirname "$file")
  # One build for all targets of a package, which come one after the other.
  if [[ $dir != "$built" ]]; then
    # A stack trace needs no DWARF, and linking it takes as long as the rest.
    go test -c -vet=off -tags invariants -ldflags '-s -w' -fuzz . -o "$out/test" "./$dir"
    built=$dir
  fi
  say "fuzz $dir $target $fuzztime"
  # A failing input is left in testdata/fuzz of the package, as by go test.
  # Every input that reaches new code is made shorter first, by default for a
  # minute and at the cost of the executions of FUZZTIME. So short of time, they
  # are for new inputs.
  (cd "$dir" && "$out/test" -test.run '^$' -test.fuzz "^$target\$" -test.fuzztime "$fuzztime" \
    -test.fuzzminimizetime 100x -test.fuzzcachedir "$corpus/$module/$dir")
  count=$((count + 1))
done < <(sources '*_test.go' | xargs -0 -r grep -oHE '^func Fuzz[A-Za-z0-9_]*' | sed 's/:func /:/')
((count > 0)) || die "no fuzz target found: every decoder has one, so the search is broken"
say "fuzz: $count targets, no failure"
