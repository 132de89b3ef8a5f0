#!/bin/bash
# test.sh: everything that CI runs; it installs what is missing. What scripts/check.sh
# does, with the slow Go tests in it and no cached result, and what needs more: fuzz
# targets, the engine, the VM lab, the demos.
#
# Most of it keeps one core busy at a time (a machine of the lab, an engine, a linker),
# so as many steps run beside each other as there are cores. The longest come first.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
trap report_step EXIT

step "install everything" bash scripts/install.sh go python vllm vmlab
# Before all the others: they lean on bin/.
step "build" bash scripts/build.sh

export SHORT='' GO_TEST_FLAGS='-count=1 -timeout 15m'
beside "VM lab" bash scripts/vmlab.sh
beside "torture" bin/maru torture --minutes 1
beside "lint" bash scripts/check.sh lint
beside "Go tests" bash scripts/check.sh go
beside "pytest with vLLM" env PYTHONPATH=python "$VLLM_VENV/bin/python" -m pytest -q --timeout 900 python/tests -m vllm
beside "fuzz" bash scripts/fuzz.sh 5000x
beside "demo with vLLM" env ENGINE=vllm bash scripts/demo.sh
beside "simulator" bash scripts/check.sh sim
beside "pytest" bash scripts/check.sh python
beside "demo without an engine" env ENGINE=none bash scripts/demo.sh
cores=$(nproc)
run_beside $((cores < 2 ? 2 : cores > 4 ? 4 : cores))
say "test: everything passed ($SECONDS s)"
