#!/bin/bash
# bundle.sh: what a GPU machine without Go and network needs, into .gpu/maru.tar.xz:
# the programs, libmaru.so and the Python package. Carry .gpu there with the tree and
# run test/gpu/run.sh.
set -euo pipefail
# shellcheck source=scripts/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/env.sh"

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mkdir -p "$out/maru/bin" .gpu
flags=(-trimpath -ldflags=-s\ -w)
# With cgo, so that `maru bench copy` finds the driver.
CGO_ENABLED=1 go build "${flags[@]}" -o "$out/maru/bin/" ./cmd/maru
cp -r python "$out/maru/python"
rm -rf "$out/maru/python/tests" "$out/maru/python/maru/lib"
find "$out/maru/python" -name __pycache__ -prune -exec rm -rf {} +
mkdir -p "$out/maru/python/maru/lib"
CGO_ENABLED=1 go build "${flags[@]}" -buildmode=c-shared -o "$out/maru/python/maru/lib/libmaru.so" ./cmd/libmaru
rm -f "$out/maru/python/maru/lib/libmaru.h"
tar --sort=name --mtime=@0 --owner=0 --group=0 -C "$out" -cf - maru | xz -T0 -4 >.gpu/maru.tar.xz
say ".gpu/maru.tar.xz: $(wc -c <.gpu/maru.tar.xz) bytes"
