#!/bin/bash
# soak.sh: what takes longer than CI may. ROUNDS rounds (default 5) of the whole
# Go test suite, each with new random seeds and many more simulator seeds and
# kill -9 rounds, then every fuzz target for FUZZTIME (default 2m).
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
trap report_step EXIT

export MARU_SIM_SEEDS=${MARU_SIM_SEEDS:-20000} MARU_KILL_ROUNDS=${MARU_KILL_ROUNDS:-200}
for ((i = 1; i <= ${ROUNDS:-5}; i++)); do
  step "round $i: go test" go test -race -tags invariants -count=1 -timeout 4h ./...
done
step "VM lab" bash scripts/vmlab.sh -count=10 -timeout 1h
step "fuzz" bash scripts/fuzz.sh "${FUZZTIME:-2m}"
