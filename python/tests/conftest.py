"""A whole system for the tests: ``maru up`` on a pool of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(os.environ.get("MARU_TEST_BIN", ROOT / "bin"))

CHUNK = 4096
POOL = 64 * CHUNK


def built(name: str) -> Path:
    """The path of something that 'make build' makes; its absence is a failure."""
    path = BIN / name
    if not path.exists():
        pytest.fail(f"{path} is not there: run 'make build' first (or name its folder in MARU_TEST_BIN)", pytrace=False)
    return path


class System:
    """A running ``maru up``."""

    def __init__(self, directory: Path, listen: str = "127.0.0.1:0") -> None:
        self.directory = directory
        self.log = directory.with_suffix(".log")
        self.process = subprocess.Popen(
            [
                built("maru"),
                "up",
                "--json",
                "--dir",
                directory,
                "--cxl-size",
                "256M",
                "--cpu-size",
                "256M",
                "--listen",
                listen,
            ],
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(f"maru up ended with {self.process.returncode}:\n{self.log.read_text()}")
        self.addresses = json.loads(line)
        self.url: str = self.addresses["server"]

    def stop(self) -> None:
        """Ends it as an operator would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture(scope="session", autouse=True)
def library() -> None:
    """The library under test, for this process and its children."""
    os.environ.setdefault("MARU_LIBRARY", str(built("libmaru.so")))


@pytest.fixture
def new_system() -> Iterator[Callable[[], System]]:
    """Starts systems of a test's own."""
    made: list[System] = []
    base = Path(tempfile.mkdtemp(prefix="maru-test-", dir="/dev/shm"))

    def start() -> System:
        made.append(System(base / f"up{len(made)}"))
        return made[-1]

    yield start
    for s in made:
        s.stop()
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="session")
def system() -> Iterator[System]:
    """One system that the tests share; keys are apart by :func:`key`."""
    base = Path(tempfile.mkdtemp(prefix="maru-test-", dir="/dev/shm"))
    s = System(base / "up")
    yield s
    s.stop()
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def key() -> Callable[[object], str]:
    """Makes keys that no other test uses."""
    prefix = uuid.uuid4().hex

    def make(name: object) -> str:
        return f"{prefix}/{name}"

    return make


Child = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def child(system: System) -> Iterator[Child]:
    """Runs Python code in a process of its own; ``url`` and ``args`` are defined there,
    stdin and stdout are pipes."""
    running: list[subprocess.Popen[str]] = []

    def run(code: str, *args: str, url: str | None = None) -> subprocess.Popen[str]:
        env = dict(os.environ, PYTHONPATH=str(ROOT / "python"), PYTHONUNBUFFERED="1")
        head = "import sys\nurl, args = sys.argv[1], sys.argv[2:]\n"
        p = subprocess.Popen(
            [sys.executable, "-c", head + code, url or system.url, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
        )
        running.append(p)
        return p

    yield run
    for p in running:
        if p.poll() is None:
            p.kill()
        p.communicate()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's directory; made in a process of its own, so that this one stays free of torch's threads."""
    from demo import tiny_model

    cache = os.environ.get("MARU_CACHE")
    directory = (Path(cache) if cache else tmp_path_factory.mktemp("model")) / tiny_model.NAME
    subprocess.run([sys.executable, tiny_model.__file__, str(directory)], check=True, capture_output=True)
    return directory
