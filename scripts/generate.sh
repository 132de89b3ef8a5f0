#!/bin/bash
# generate.sh           writes the Go code of api/**/*.proto
# generate.sh --check   fails when that code is not what would be written now,
#                       and lints the protocol
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

bash scripts/install.sh go
# buf finds its plugins on PATH.
PATH=$(dirname "$PROTOC_GEN_GO"):$(dirname "$PROTOC_GEN_GO_GRPC"):$PATH

runtime=$(go list -m -f '{{.Version}}' google.golang.org/protobuf)
[[ $runtime == "$PROTOC_GEN_GO_VERSION" ]] ||
  die "go.mod has google.golang.org/protobuf $runtime, scripts/versions.env has protoc-gen-go $PROTOC_GEN_GO_VERSION: make them equal and run 'make generate'"

case ${1:-} in
'') "$BUF" generate ;;
--check)
  "$BUF" lint
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
  "$BUF" generate -o "$out"
  # Both ways: a file that nothing generates any more is as wrong as a stale one.
  list() { (cd "$1" && find api -name '*.pb.go' | LC_ALL=C sort); }
  diff <(list .) <(list "$out") || die "the generated files under api are not those of the .proto files: run 'make generate'"
  while read -r f; do
    diff -u "$f" "$out/$f" >&2 || die "$f is not what its .proto file gives: run 'make generate'"
  done < <(list "$out")
  ;;
*) die "usage: generate.sh [--check]" ;;
esac
