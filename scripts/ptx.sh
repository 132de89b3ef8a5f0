#!/bin/bash
# ptx.sh           compiles internal/gpu/kernels.cu into internal/gpu/kernels.ptx
# ptx.sh --check   fails when kernels.ptx was made from another source or with
#                  other flags; it needs no compiler
#
# The PTX is committed, because building Maru needs no CUDA. The compiler comes
# from the package index by name, into the cache; no GPU is needed.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

SOURCE=internal/gpu/kernels.cu
PTX=internal/gpu/kernels.ptx
# The oldest GPU with the instructions that are used (A100), and the PTX version of
# the oldest driver that can be meant: the driver compiles for what it finds.
FLAGS=(-ptx -std=c++17 -O3 -arch=compute_80)
ISA=7.4

recipe() {
  printf '%s' "$(sha256sum "$SOURCE" | cut -d' ' -f1) nvcc $CUDA_NVCC_VERSION ${FLAGS[*]} isa $ISA"
}

case ${1:-} in
--check)
  have=$(sed -n 's,^// made from: ,,p' "$PTX")
  [[ $have == "$(recipe)" ]] || die "$PTX was made from another source or with other flags: run scripts/ptx.sh"
  ;;
'')
  bash scripts/install.sh python
  nvcc_home=$TOOLS/nvcc-$CUDA_NVCC_VERSION
  if [[ ! -x $nvcc_home/nvidia/cu13/bin/nvcc ]]; then
    packages=()
    for name in nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl; do
      packages+=("$name==$CUDA_NVCC_VERSION.*")
    done
    "$PY_VENV/bin/uv" pip install --quiet --no-deps --target "$nvcc_home" --python-version 3.12 "${packages[@]}"
  fi
  out=$(mktemp)
  trap 'rm -f "$out"' EXIT
  "$nvcc_home/nvidia/cu13/bin/nvcc" "${FLAGS[@]}" -o "$out" "$SOURCE"
  {
    printf '// made from: %s\n// by scripts/ptx.sh; do not edit\n' "$(recipe)"
    # The pragma is a hint of newer PTX versions about loads of which a part is used.
    sed -e "s/^\.version .*/.version $ISA/" -e '/^\/\//d' -e '/\.pragma "used_bytes_mask/d' "$out"
  } >"$PTX"
  say "$PTX: $(wc -c <"$PTX") bytes"
  ;;
*) die "usage: ptx.sh [--check]" ;;
esac
