"""What became of each recent request, for ``maru explain``: a bounded file in a directory of its own.

One line of JSON a record, written by one background thread, so that a step costs a
queue's put. A request has up to two records, when it is first scheduled and when it
ends; the last one counts. The file is begun anew at a size, one older one is kept,
and so are the files of a few engines that were here before. It outlives the engine:
a killed one can be explained.

Directory 0700 and files 0600, of the engine's user; a directory that others may
write is refused. Records have counts, no tokens; ``prefix`` is a digest of the first
64 tokens, by which two engines whose namespaces differ are found.

Invariants: at most _QUEUE records wait (more are dropped and counted), at most two
files of _FILE_BYTES an engine, at most _ENGINES engines' files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any

__all__ = ["Journal", "default_directory"]

logger = logging.getLogger("maru.vllm")

_FILE_BYTES = 1 << 20
_QUEUE = 4096
_ENGINES = 16
_NAME = re.compile(r"[^A-Za-z0-9._-]")


def default_directory() -> Path:
    """MARU_RUN_DIR, or maru in XDG_RUNTIME_DIR, or maru-UID in the directory for temporary files."""
    if named := os.environ.get("MARU_RUN_DIR"):
        return Path(named)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "maru"
    return Path(tempfile.gettempdir()) / f"maru-{os.getuid()}"


class Journal:
    """The records of one engine's scheduler. header: written at the start of each file.

    Raises OSError when the directory cannot be made or is not this user's alone.
    """

    def __init__(self, directory: Path, engine_id: str, header: dict[str, Any]) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise PermissionError(f"{directory} is not this user's alone (mode {stat.S_IMODE(found.st_mode):o})")
        self.path = directory / f"explain-{_NAME.sub('_', engine_id)[:100]}.jsonl"
        self._old = self.path.with_suffix(".jsonl.1")
        self._header = json.dumps({"header": header}, separators=(",", ":"))
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_QUEUE)
        self.dropped = 0
        _remove_old(directory, self.path)
        self._fd, self._bytes = self._begin()
        self._thread = threading.Thread(target=self._run, name="maru-journal", daemon=True)
        self._thread.start()

    def put(self, record: dict[str, Any]) -> None:
        """Hands over a record, which nobody changes any more. Never waits."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 1.0) -> None:
        """Writes what waits, within the time."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _begin(self) -> tuple[int, int]:
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.path, self._old)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path, flags, 0o600)
        return fd, os.write(fd, self._header.encode() + b"\n")

    def _run(self) -> None:
        while True:
            records = [self._queue.get()]
            while len(records) < 64:
                try:
                    records.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            lines = b"".join(json.dumps(r, separators=(",", ":")).encode() + b"\n" for r in records if r is not None)
            try:
                if self._bytes + len(lines) > _FILE_BYTES:
                    os.close(self._fd)
                    self._fd, self._bytes = self._begin()
                self._bytes += os.write(self._fd, lines)
            except OSError as e:
                # Explaining is a comfort: an engine never ends for it.
                logger.warning("records for `maru explain` end here: %s: %s; give maru_run_dir a place with room", self.path, e)
                return
            if records[-1] is None or None in records:
                os.close(self._fd)
                return


def _remove_old(directory: Path, keep: Path) -> None:
    files = []
    for entry in os.scandir(directory):
        if entry.name.startswith("explain-") and entry.name.endswith(".jsonl") and entry.path != str(keep):
            with contextlib.suppress(FileNotFoundError):
                files.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    for _, path in sorted(files)[: max(0, len(files) - (_ENGINES - 1))]:
        for name in (path, path + ".1"):
            with contextlib.suppress(OSError):
                os.unlink(name)
