#!/bin/bash
# build_wheel.sh [OUTDIR]: a wheel of the Python packages that carries libmaru.so,
# into OUTDIR (default dist/ of the tree). It needs Go, gcc and the Python named in
# MARU_PYTHON (default python3), and no build front end: a wheel is a zip file with
# three files of metadata.
#
# The tag is py3-none-PLATFORM: the library is loaded by ctypes and works with every
# Python; the platform carries the glibc of the machine that linked it, so build for
# others on the oldest one. (musl cannot load a Go library.)
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
OUT=$(mkdir -p "${1:-$ROOT/dist}" && cd "${1:-$ROOT/dist}" && pwd)
PYTHON=${MARU_PYTHON:-python3}
LIB=$(mktemp -d)
trap 'rm -rf "$LIB"' EXIT

cd "$ROOT"
CGO_ENABLED=1 GOTOOLCHAIN=local go build -buildvcs=false -trimpath -ldflags='-s -w' -buildmode=c-shared -o "$LIB/libmaru.so" ./cmd/libmaru
"$PYTHON" - "$ROOT/python" "$LIB/libmaru.so" "$OUT" <<'PY'
import base64
import hashlib
import pathlib
import platform
import re
import sys
import zipfile

source, library, out = map(pathlib.Path, sys.argv[1:])
project = (source / "pyproject.toml").read_text()


def field(name):
    return re.search(rf'^{name} = "(.*)"$', project, re.M).group(1)


version = field("version")
stated = re.search(r'^__version__ = "(.*)"$', (source / "maru/__init__.py").read_text(), re.M).group(1)
header = re.search(r'^#define MARU_VERSION "(.*)"$', (source.parent / "include/maru.h").read_text(), re.M).group(1)
if not version == stated == header:
    sys.exit(f"versions differ: pyproject.toml {version}, maru/__init__.py {stated}, include/maru.h {header}")

libc, glibc = platform.libc_ver()
if libc != "glibc":
    sys.exit(f"this machine has {libc or 'no'} glibc; a Go library needs glibc to be loaded")
# What the library asks for, not what this machine has.
needs = [tuple(map(int, v)) for v in re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())]
major, minor = max(needs)
tag = f"py3-none-manylinux_{major}_{minor}_{platform.machine()}"

files = {}
for package in sorted(p.parent for p in source.glob("maru*/__init__.py")):
    for f in sorted(package.rglob("*")):
        if f.suffix in (".py", ".typed") or f.name == "py.typed":
            files[str(f.relative_to(source))] = f.read_bytes()
files["maru/lib/libmaru.so"] = library.read_bytes()
info = f"maru-{version}.dist-info"
files[f"{info}/METADATA"] = (
    f"Metadata-Version: 2.4\nName: maru\nVersion: {version}\nSummary: {field('description')}\n"
    f"Requires-Python: {field('requires-python')}\nLicense-Expression: {field('license')}\n"
    "License-File: LICENSE\n"
).encode()
files[f"{info}/licenses/LICENSE"] = (source / "LICENSE").read_bytes()
files[f"{info}/WHEEL"] = (
    f"Wheel-Version: 1.0\nGenerator: build_wheel.sh\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
)
record = ""
for name, data in files.items():
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    record += f"{name},sha256={digest},{len(data)}\n"
record += f"{info}/RECORD,,\n"
files[f"{info}/RECORD"] = record.encode()

wheel = out / f"maru-{version}-{tag}.whl"
with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as z:
    for name, data in files.items():
        entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))  # the same bytes from the same tree
        entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
        entry.compress_type = zipfile.ZIP_DEFLATED
        z.writestr(entry, data)
print(wheel)
PY
