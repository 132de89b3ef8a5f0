#!/bin/bash
# test.sh: everything that CI runs; it installs what is missing. The fast lane
# first, with the slow Go tests in it and no cached result, then what needs more:
# fuzz targets, the engine, the VM lab, the demos.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
trap report_step EXIT

step "install everything" bash scripts/install.sh go python vllm vmlab
step "check, slow tests included" env SHORT= GO_TEST_FLAGS="-count=1 -timeout 15m" bash scripts/check.sh
step "fuzz" bash scripts/fuzz.sh 5000x
step "VM lab" bash scripts/vmlab.sh
step "pytest with vLLM" env PYTHONPATH=python "$VLLM_VENV/bin/python" -m pytest -q --timeout 900 python/tests -m vllm
step "demo without an engine" env ENGINE=none bash scripts/demo.sh
step "demo with vLLM" env ENGINE=vllm bash scripts/demo.sh
say "test: everything passed ($SECONDS s)"
