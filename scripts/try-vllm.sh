#!/bin/bash
# try-vllm.sh VERSION [TORCH]: the connector on another release of vLLM for CPU: what it
# demands and has (test_vllm_span.py), its scheduler, an engine. The release is
# installed beside the one of CI, about 6 GB. TORCH: the torch that its wheel pins.
set -euo pipefail
if (($# < 1 || $# > 2)); then
  printf 'usage: try-vllm.sh VERSION [TORCH], for example 0.33.0\n' >&2
  exit 2
fi
export MARU_VLLM_VERSION=$1
[[ -z ${2:-} ]] || export MARU_TORCH_VERSION=$2
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
trap report_step EXIT

step "install vLLM $1" bash scripts/install.sh go python vllm
step "build" bash scripts/build.sh
for part in span scheduler rows engines processes; do
  step "test_vllm_$part with vLLM $1" env PYTHONPATH=python \
    "$VLLM_VENV/bin/python" -m pytest -q --timeout 900 "python/tests/test_vllm_$part.py"
done
say "the connector works with vLLM $1 ($SECONDS s)"
