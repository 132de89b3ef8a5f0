"""Child processes of the demo and of the engine tests: engines and `maru up`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.engine import environment

__all__ = ["ROOT", "ChildError", "EngineProcess", "maru_up"]

ROOT = Path(__file__).resolve().parents[2]


class ChildError(RuntimeError):
    """A child process failed; the text has the end of its log."""


class EngineProcess:
    """An engine in a process of its own. Calls block; the log goes to a file."""

    def __init__(self, log: Path, *, env: dict[str, str] | None = None, module: str = "demo.engine") -> None:
        read, write = os.pipe()
        self.log = log
        python_path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("wb") as out:
            self._child = subprocess.Popen(
                [sys.executable, "-m", module, "--answers", str(write)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                env={**os.environ, **environment(), "PYTHONPATH": python_path, **(env or {})},
                start_new_session=True,
            )
        os.close(write)
        self._answers = os.fdopen(read)
        self.pid = self._child.pid

    def ready(self) -> dict[str, Any]:
        """Waits until vLLM is imported."""
        return self._answer()

    def __call__(self, do: str, **command: Any) -> dict[str, Any]:
        """One command and its answer; ChildError when the engine says an error or ends."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": do, **command}).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer tells more
        answer = self._answer()
        if "error" in answer:
            raise ChildError(f"engine: {answer['error']}\n{self.tail()}")
        return answer

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            code = self._child.wait()
            raise ChildError(f"engine process ended with status {code}\n{self.tail()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tail(self, lines: int = 25) -> str:
        """The end of the engine's log."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    def stop(self) -> None:
        """Stops the engine in order, then makes sure of its end."""
        if self._child.poll() is None:
            with contextlib.suppress(ChildError, ValueError):
                self("stop")
        self.kill()

    def kill(self, sig: int = signal.SIGKILL) -> None:
        """Ends the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, sig)
        self._child.wait()
        if self._child.stdin is not None and not self._child.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()
        self._answers.close()


@contextlib.contextmanager
def maru_up(directory: Path, *args: str) -> Iterator[dict[str, Any]]:
    """`maru up` on an emulated pool; yields its addresses and stops it in the end."""
    binary = ROOT / "bin" / "maru"
    if not binary.exists():
        raise ChildError(f"{binary.relative_to(ROOT)} is missing: run make build")
    with (directory / "maru-up.log").open("wb") as log:
        child = subprocess.Popen(
            [str(binary), "up", "--json", "--listen", "127.0.0.1:0", "--dir", str(directory / "maru"), *args],
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line:
            child.wait()
            raise ChildError(f"maru up ended with status {child.returncode}:\n{(directory / 'maru-up.log').read_text()}")
        drain = threading.Thread(target=child.stdout.read, daemon=True)
        drain.start()
        yield json.loads(line)
    finally:
        child.terminate()
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise ChildError("maru up did not stop within 30 s of SIGTERM") from None
