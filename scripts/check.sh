#!/bin/bash
# check.sh [PART...]: the fast lane, for every change before it is committed. Under
# 3 minutes with warm caches. The parts, by default all of them:
#   lint    format, vet, linters, generated code, shell scripts, Python
#   go      the Go tests that -short leaves; SHORT= (empty) runs the slow ones too
#   sim     the simulator's, in the same way
#   python  the Python tests without an engine
# GO_TEST_FLAGS is added to both runs of go test.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
trap report_step EXIT

gofmt_clean() {
  local bad
  bad=$(sources '*.go' | xargs -0 -r gofmt -l)
  [[ -z $bad ]] || die "not formatted (run 'make fmt'):"$'\n'"$bad"
}

vet() {
  go vet ./...
  go vet -tags invariants ./...
  go vet -tags vmlab,vmguest ./test/vmlab/...
}

shell_clean() {
  sources '*.sh' .ci/run | xargs -0 -r "$PY_VENV/bin/shellcheck" -x
}

python_lint() {
  (
    cd python
    "$PY_VENV/bin/ruff" check .
    "$PY_VENV/bin/ruff" format --check --quiet .
    # The oldest Python that the wheel promises, whatever runs here. The engines
    # are not installed in this environment: what is imported from them is Any.
    "$PY_VENV/bin/mypy" --strict --ignore-missing-imports --allow-subclassing-any --no-warn-unused-ignores --python-version 3.10 maru maru_vllm
  )
}

lint() {
  step "gofmt" gofmt_clean
  step "go vet" vet
  step "staticcheck" "$STATICCHECK" -tags invariants ./...
  step "golangci-lint" "$GOLANGCI_LINT" run --allow-parallel-runners ./...
  step "generated code" bash scripts/generate.sh --check
step "GPU kernels" bash scripts/ptx.sh --check
  step "shellcheck" shell_clean
  step "ruff and mypy" python_lint
}

go_tests() {
  # shellcheck disable=SC2086 # flags, split on purpose
  step "go test" go test -race -tags invariants ${SHORT--short} ${GO_TEST_FLAGS:-} ./...
}

sim() {
  # A simulated run has one goroutine, so that the race detector only slows it: the Go
  # tests play 500 seeds with it (20 with -short), this plays 20 000 (400) without, as
  # many at once as there are processors, and looks for every planted error.
  # Seven minutes of one processor: the limit ends what hangs, also beside other steps on a
  # machine of half the speed.
  # shellcheck disable=SC2086 # flags, split on purpose
  step "simulator" go test -tags invariants ${SHORT--short} ${GO_TEST_FLAGS:-} -timeout 30m ./internal/sim
}

python_tests() {
  step "pytest" env PYTHONPATH=python "$PY_VENV/bin/python" -m pytest -q --timeout 300 python/tests -m 'not vllm'
}

(($# > 0)) || set -- lint go sim python
step "install" bash scripts/install.sh go python
step "build" bash scripts/build.sh
for part in "$@"; do
  case $part in
  lint | sim) "$part" ;;
  go) go_tests ;;
  python) python_tests ;;
  *) die "check.sh: no part is called $part; there are lint, go, sim and python" ;;
  esac
done
