#!/bin/bash
# fuzz.sh [FUZZTIME]: runs every fuzz target of the tree for FUZZTIME, which is a
# count (5000x) or a duration (1m). A count is the default: it does the same work
# on every machine, and a loaded one does not fail it.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

fuzztime=${1:-5000x}
count=0
while IFS=: read -r file target; do
  pkg=./$(dirname "$file")
  say "fuzz $pkg $target $fuzztime"
  go test -tags invariants -run '^$' -fuzz "^$target\$" -fuzztime "$fuzztime" "$pkg"
  count=$((count + 1))
done < <(git ls-files -co --exclude-standard '*_test.go' | LC_ALL=C sort | xargs -r grep -oHE '^func Fuzz[A-Za-z0-9_]*' | sed 's/:func /:/')
((count > 0)) || die "no fuzz target found: every decoder has one, so the search is broken"
say "fuzz: $count targets, no failure"
