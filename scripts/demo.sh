#!/bin/bash
# demo.sh [ARGS]: builds what is missing and runs a demonstration.
#   ENGINE=vllm   (default) two real vLLM engines, the second of which reads the
#                 prefix that the first one stored; installs vLLM once (5.9 GB)
#   ENGINE=none   worker processes instead of an engine: no Python needed
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case ${ENGINE:=vllm} in
none)
  bash scripts/build.sh
  exec bin/maru demo "$@"
  ;;
vllm)
  bash scripts/install.sh python vllm
  bash scripts/build.sh
  exec env PYTHONPATH=python "$VLLM_VENV/bin/python" -m demo.vllm_demo --cache "$MARU_CACHE" "$@"
  ;;
*) die "ENGINE=$ENGINE: there are 'vllm' and 'none'" ;;
esac
