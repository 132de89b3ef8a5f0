#!/bin/bash
# soak.sh: what takes longer than CI may. SOAK_OPERATIONS (default 10 million) through
# one client, TORTURE_MINUTES (default 30) of the torture and SOAK_VLLM_SECONDS (default
# 1800) of random traffic through vLLM and a small pool; then ROUNDS rounds (default
# 5) of the whole Go test suite, with KILL_ROUNDS (default 100) kill -9 rounds of each
# program and every error of every call that can be injected, and of SIM_SEEDS (default
# 50000) simulator seeds that no other round plays; then the VM lab ten times and every
# fuzz target for FUZZTIME (default 2m).
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
trap report_step EXIT

export MARU_KILL_ROUNDS=${KILL_ROUNDS:-100}
export MARU_INJECT_ALL=1
step "build" bash scripts/build.sh
step "10 million operations" env MARU_SOAK_OPERATIONS="${SOAK_OPERATIONS:-10000000}" \
  go test -tags invariants -count=1 -timeout 1h ./client -run NothingGrows
step "torture" bin/maru torture --minutes "${TORTURE_MINUTES:-30}"
bash scripts/install.sh python vllm
step "traffic with vLLM" env PYTHONPATH=python MARU_SOAK_SECONDS="${SOAK_VLLM_SECONDS:-1800}" \
  "$VLLM_VENV/bin/python" -m pytest -q --timeout $((${SOAK_VLLM_SECONDS:-1800} + 900)) python/tests -m vllm -k random_traffic_over_a_pool

for ((i = 1; i <= ${ROUNDS:-5}; i++)); do
  step "round $i: go test" go test -race -tags invariants -count=1 -timeout 4h ./...
  step "round $i: simulator" go test -tags invariants -count=1 -timeout 4h ./internal/sim -run Seeds -args \
    -sim.seeds "${SIM_SEEDS:-50000}" -sim.first $((1 + i * 1000000))
done
step "VM lab" bash scripts/vmlab.sh -count=10 -timeout 1h
step "fuzz" bash scripts/fuzz.sh "${FUZZTIME:-2m}"
