"""The boundary itself: layouts of structs, a C program, memory that does not grow."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest

import maru
from conftest import ROOT, System
from maru import MaruConfig, MaruHandler, _lib


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("c") / "abi"
    subprocess.run(
        [
            os.environ.get("CC", "gcc"),
            "-std=gnu99",
            "-Wall",
            "-Werror",
            f"-I{ROOT / 'include'}",
            "-o",
            out,
            ROOT / "cmd/libmaru/testdata/abi.c",
            "-ldl",
            "-lpthread",
        ],
        check=True,
    )
    return out


def test_layouts(program: Path) -> None:
    rows = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    want = {name: int(n) for name, n in (r.split() for r in rows)}
    have: dict[str, int] = {}
    for name, struct in (
        ("maru_page", _lib.Page),
        ("maru_view", _lib.View),
        ("maru_run", _lib.Run),
        ("maru_layer", _lib.Layer),
        ("maru_batch", _lib.Batch),
    ):
        have[name] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            have[f"{name}.{field}"] = getattr(struct, field).offset
    assert have == want


def test_declarations_are_the_headers() -> None:
    header = (ROOT / "include/maru.h").read_text()
    code = header.split('extern "C" {', 1)[1]
    code = re.sub(r"/\*.*?\*/", "", code, flags=re.S)
    found = re.findall(r"^(?:int32_t|uint32_t|const char \*)\s*(maru_\w+)\((.*?)\);", code, re.M | re.S)
    declared = {name: 0 if args.strip() == "void" else args.count(",") + 1 for name, args in found}
    assert declared == {name: len(args) for name, (_, args) in _lib._FUNCTIONS.items()}


def test_versions() -> None:
    """The wheel, the package and the library are one release."""
    project = (ROOT / "python/pyproject.toml").read_text()
    header = (ROOT / "include/maru.h").read_text()
    assert f'\nversion = "{maru.__version__}"\n' in project
    assert f'#define MARU_VERSION "{maru.__version__}"' in header
    assert _lib.load().maru_version_string().decode() == maru.__version__
    assert f"#define MARU_ABI_VERSION {_lib.ABI_VERSION}u" in header


def test_c_program(program: Path, system: System) -> None:
    p = subprocess.run([program, system.url, os.environ["MARU_LIBRARY"]], capture_output=True, text=True, timeout=60, check=False)
    assert (p.stdout, p.returncode) == ("ok\n", 0), p.stderr


def test_memory_stays_flat(system: System) -> None:
    with MaruHandler(MaruConfig(system.url, pool_size=1 << 20, chunk_size_bytes=4096)) as h:
        client = h._client
        assert client is not None
        keys = bytes(32 * 64)

        def work(n: int) -> None:
            for _ in range(n):
                h.free(h.alloc(100))
                client._lib.maru_release_views(client.handle, 0, None)
                client._lib.maru_ping(0, 0)  # an error: its text is allocated
            for _ in range(n // 100):
                client.probe(keys)

        work(2000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work(20_000)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 16 * 1024, f"{grown} KiB more after 20 000 rounds"
