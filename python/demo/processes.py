"""Child processes of the demo and of the engine tests: engines, `maru up`, and the daemons one by one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.engine import environment

__all__ = ["ROOT", "ChildError", "Daemon", "EngineProcess", "daemons", "maru_up"]

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


def binary(name: str) -> str:
    """Path of a built program. Raises ChildError when it is not there."""
    path = ROOT / "bin" / name
    if not path.exists():
        raise ChildError(f"{path.relative_to(ROOT)} is missing: run make build")
    return str(path)


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback that nobody has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]


class Daemon:
    """maru-resource-manager or maru-server: what an operator runs, which can be killed and started again.

    http_port is where it answers /readyz.
    """

    def __init__(self, name: str, directory: Path, http_port: int, *args: str) -> None:
        self._command = [binary(name), "--http-port", str(http_port), *args]
        self._ready = f"http://127.0.0.1:{http_port}/readyz"
        self._log = directory / f"{name}.log"
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, limit_s: float = 30.0) -> None:
        """Starts it and waits until it is ready. Raises ChildError."""
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                with urllib.request.urlopen(self._ready, timeout=1) as answer:
                    if "degraded" not in answer.read().decode():
                        return
            if self._child.poll() is not None or time.monotonic() > end:
                raise ChildError(f"{self._command[0]} is not ready:\n{self._log.read_text(errors='replace')}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL: it has no time for anything."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def stop(self, limit_s: float = 30.0) -> None:
        """SIGTERM, and the end. Raises ChildError when there is none."""
        if self._child is None or self._child.poll() is not None:
            return
        self._child.terminate()
        try:
            self._child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ChildError(f"{self._command[0]} did not stop within {limit_s:.0f} s of SIGTERM") from None


@contextlib.contextmanager
def daemons(directory: Path, pool_size: str) -> Iterator[tuple[str, Daemon, Daemon]]:
    """A resource manager on a pool file and a server: (the server's address, resource manager, server).

    The pool is on /dev/shm where there is one, and goes with them.
    """
    port, hot, http, rm, rm_http = free_ports(5)
    shm = Path("/dev/shm")
    pool = (shm if shm.is_dir() else directory) / f"maru-demo-{os.getpid()}.pool"
    manager = Daemon(
        "maru-resource-manager", directory, rm_http, "--port", str(rm), "--state-dir", str(directory / "rm"),
        "--unix-socket", str(directory / "rm.sock"), "--pool", f"file:{pool},size={pool_size},name=demo",
    )  # fmt: skip
    server = Daemon(
        "maru-server", directory, http, "--port", str(port), "--hot-port", str(hot), "--state-dir", str(directory / "server"),
        "--unix-socket", str(directory / "server.sock"), "--hot-unix-socket", str(directory / "hot.sock"),
        "--rm-address", f"unix:{directory / 'rm.sock'}",
    )  # fmt: skip
    try:
        manager.start()
        server.start()
        yield f"127.0.0.1:{port}", manager, server
    finally:
        server.stop()
        manager.stop()
        pool.unlink(missing_ok=True)


@contextlib.contextmanager
def maru_up(directory: Path, *args: str) -> Iterator[dict[str, Any]]:
    """`maru up` on an emulated pool; yields its addresses and stops it in the end."""
    with (directory / "maru-up.log").open("wb") as log:
        child = subprocess.Popen(
            [binary("maru"), "up", "--json", "--listen", "127.0.0.1:0", "--dir", str(directory / "maru"), *args],
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
