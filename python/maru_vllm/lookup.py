"""Lookups of the scheduler role over the library: one background thread, one client.

The engine's thread puts tasks and reads answers; only this thread waits for the
server. Its queue is bounded by what the engine has: at most a probe a request and
change, an end a request, one refresh at a time. While the server is away probes are
answered at once, and asked again once a second.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from maru import _lib
from maru.api import Client, Mode, Verdict
from maru.errors import MaruError
from maru.keys import root
from maru_vllm.chain import PrefixChain, library_hasher

__all__ = ["ClientLookup", "lease_id"]

logger = logging.getLogger("maru.vllm")

# Request leases last tens of seconds at the server; refreshing each few seconds
# survives a lost call.
_REFRESH_S = 3.0
_AWAY_S = 1.0
_MEDIA = {1: "cpu", 2: "cxl", 3: "ssd"}


class _Probe:
    """The result of one lookup; written by the lookup thread, once."""

    __slots__ = ("_at", "_leading", "_reason", "_verdicts")

    def __init__(self) -> None:
        self._leading: int | None = None
        self._at: float | None = None
        self._reason = "not_stored"
        self._verdicts = b""

    def done(self) -> bool:
        return self._leading is not None

    def answered_at(self) -> float | None:
        return self._at

    def leading(self) -> int:
        assert self._leading is not None
        return self._leading

    def reason(self) -> str:
        return self._reason

    def media(self, start: int, stop: int) -> Mapping[str, int]:
        out: dict[str, int] = {}
        for verdict in self._verdicts[start:stop]:
            medium = _MEDIA.get(verdict >> 2 & 7, "other")
            out[medium] = out.get(medium, 0) + 1
        return out

    def finish(self, leading: int, verdicts: bytes, reason: str) -> None:
        self._verdicts, self._reason, self._at = verdicts, reason, time.monotonic()
        self._leading = leading  # last: done() is read by another thread


class ClientLookup:
    """Lookups of one scheduler. world_size: workers of the engine; replicas: as many
    neighbouring ranks hold one shard, and each of them must be able to read it."""

    def __init__(self, client: Client, namespace_id: bytes, world_size: int, replicas: int, timeout_s: float) -> None:
        self.client = client
        self._namespace_id = namespace_id
        self._world_size = world_size
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._hasher = library_hasher(_lib.load())
        self._tasks: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._refreshed = time.monotonic()
        self._away_until = 0.0
        self._away_said = False
        self._thread = threading.Thread(target=self._run, name="maru-lookup", daemon=True)
        self._thread.start()

    def new_chain(self, salt: bytes, chunk_tokens: int) -> PrefixChain:
        return PrefixChain(root(self._namespace_id, salt), chunk_tokens, self._hasher)

    def probe(self, request_id: str, keys: Callable[[], bytes]) -> _Probe:
        result = _Probe()
        if time.monotonic() < self._away_until:
            result.finish(0, b"", "unreachable")
            return result
        self._tasks.put((self._probe, result, request_id, keys))
        return result

    def keep_due(self) -> bool:
        return time.monotonic() - self._refreshed >= _REFRESH_S

    def keep(self, request_ids: Iterable[str]) -> None:
        self._refreshed = time.monotonic()
        ids = [lease_id(r) for r in request_ids]
        if ids:
            self._tasks.put((self.client.refresh_requests, ids))

    def end(self, request_id: str) -> None:
        self._tasks.put((self.client.end_requests, [lease_id(request_id)]))

    def close(self) -> None:
        """Ends the thread and the session."""
        self._tasks.put((None,))
        self._thread.join(timeout=2.0)
        self.client.close(2.0)

    def _run(self) -> None:
        while True:
            function, *args = self._tasks.get()
            if function is None:
                return
            try:
                function(*args)
            except MaruError as e:
                # A failed refresh or end costs at most an early eviction.
                logger.debug("lookup thread: %s", e)
            except Exception:
                # A thread that ended would leave every later lookup open for ever.
                logger.exception("lookup failed; its request is computed")

    def _probe(self, result: _Probe, request_id: str, keys: Callable[[], bytes]) -> None:
        leading, verdicts, reason = 0, bytearray(), "unreachable"
        try:
            packed = keys()
            if time.monotonic() >= self._away_until:  # else it became so while this one waited
                targets, began = self.client.targets(), time.monotonic()
                if len(targets) == 16 * self._world_size:
                    leading, verdicts = self._ask(packed, targets, lease_id(request_id))
                    reason = "not_stored"
                    if leading < len(verdicts) and verdicts[leading] & 3 == Verdict.PENDING:
                        reason = "pending"
                    # A server that hangs is a miss to the library until the session ends.
                    hung = time.monotonic() - began >= self._timeout_s
                    if not leading and (hung or not self.client.connected):
                        reason = "unreachable"
        finally:
            self._note(reason == "unreachable")
            result.finish(leading, bytes(verdicts), reason)

    def _ask(self, keys: bytes, targets: bytes, lease: int) -> tuple[int, bytearray]:
        """Shard s is read by ranks s * replicas and on; the answer counts what all of them can read."""
        best: tuple[int, bytearray] | None = None
        for r in range(self._replicas):
            mine = b"".join(targets[16 * i : 16 * i + 16] for i in range(r, self._world_size, self._replicas))
            answer = self.client.probe(keys, Mode.PREFIX, targets=mine, request_id=lease, timeout=self._timeout_s)
            if best is None or answer[0] < best[0]:
                best = answer
            if best[0] == 0:
                break
        assert best is not None
        return best

    def _note(self, away: bool) -> None:
        if away:
            self._away_until = time.monotonic() + _AWAY_S
        if away and not self._away_said:
            logger.warning(
                "no hits for now: the server %s does not answer, or not all workers of this engine have a session there; "
                "the engine runs on and the cache comes back by itself",
                self.client.config.server_address,
            )
        elif not away and self._away_said:
            logger.warning("the server %s answers again, hits are back", self.client.config.server_address)
        self._away_said = away


def lease_id(request_id: str) -> int:
    """The 64-bit id under which the server keeps a request's leases; never 0."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little") or 1
