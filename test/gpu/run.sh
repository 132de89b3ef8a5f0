#!/bin/bash
# run.sh [STEP...]: on a GPU machine, from the root of the tree: unpacks
# .gpu/maru.tar.xz (once) and runs the checks of copy_check.py. OUT is where logs go.
# vllm_check.py, vllm_ttft.py and vllm_mix.py need vLLM too and are started by themselves.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

dst=${MARU_GPU_DIR:-${TMPDIR:-/tmp}/maru-gpu}
if [[ ! -e $dst/.done || .gpu/maru.tar.xz -nt $dst/.done ]]; then
  rm -rf "$dst"
  mkdir -p "$dst"
  xz -dc .gpu/maru.tar.xz | tar -xf - -C "$dst"
  touch "$dst/.done"
fi
export PYTHONPATH=$dst/maru/python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
exec python3 test/gpu/copy_check.py --maru "$dst/maru/bin/maru" --out "${OUT:-$dst}" "$@"
