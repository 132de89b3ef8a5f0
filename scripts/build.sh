#!/bin/bash
# build.sh: the programs into bin/, and the client library into bin/ and beside
# the Python package that loads it.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

command -v go >/dev/null || die "go is not on PATH: install Go 1.26"
command -v gcc >/dev/null || die "gcc is not on PATH, and libmaru.so needs it (Debian: apt-get install gcc libc6-dev)"

version=$(sed -n 's/^#define MARU_VERSION "\(.*\)"$/\1/p' include/maru.h)
[[ -n $version ]] || die "include/maru.h names no MARU_VERSION"

mkdir -p bin python/maru/lib
say "build bin/maru-resource-manager bin/maru-server bin/maru-remote-cxl-agent bin/maru"
go build -trimpath -ldflags "-X main.version=$version" -o bin/ ./cmd/maru-resource-manager ./cmd/maru-server ./cmd/maru-remote-cxl-agent ./cmd/maru

say "build bin/libmaru.so"
CGO_ENABLED=1 go build -trimpath -buildmode=c-shared -o bin/libmaru.so ./cmd/libmaru
# The contract is include/maru.h, written by hand; what cgo derives is noise.
rm -f bin/libmaru.h
# A process may have the old library mapped: it is replaced whole, never
# overwritten in place. An equal one stays, for whoever compares times.
if ! cmp -s bin/libmaru.so python/maru/lib/libmaru.so; then
  cp bin/libmaru.so "python/maru/lib/.libmaru.so.$$"
  mv "python/maru/lib/.libmaru.so.$$" python/maru/lib/libmaru.so
fi
