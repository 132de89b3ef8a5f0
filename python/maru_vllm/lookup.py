"""Lookups of the scheduler role over the library: one background thread, one client.

The engine's thread puts tasks and reads answers; only this thread waits for the
server. Its queue is bounded by what the engine has: at most a probe a request and
change, an end a request, one refresh at a time. While the server is away probes are
answered at once, and asked again once a second.

The thread needs the interpreter lock between two calls of the library, and an engine's
thread that computes gives it away after 5 ms at the earliest. So it takes all that is
queued at once, and asks for all of those requests in one call: requests that come
together are answered together, in the time of one.

Invariants:
  L1  Each probe is answered exactly once, whatever happens to the others of its call.
  L2  A request's leases are ended after the last call that could take some; a request
      that never had any is not ended at the server.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from maru import _lib
from maru.api import Client, Mode, Verdict
from maru.errors import MaruError
from maru.keys import KEY_BYTES, root
from maru_vllm.chain import PrefixChain, library_hasher

__all__ = ["ClientLookup", "lease_id"]

logger = logging.getLogger("maru.vllm")

# Request leases last tens of seconds at the server; refreshing each few seconds
# survives a lost call.
_REFRESH_S = 3.0
_AWAY_S = 1.0
_MEDIA = {1: "cpu", 2: "cxl", 3: "ssd"}
_CALL_BYTES = 4096 * KEY_BYTES  # of keys of several requests; the library makes calls of as many
_STATUS = bytes(verdict & 3 for verdict in range(256))
_HIT, _PENDING = bytes((Verdict.HIT,)), bytes((Verdict.PENDING,))


class _Probe:
    """The result of one lookup; written by the lookup thread, once.

    leased: the server may keep leases for its request, set before the result is done.
    """

    __slots__ = ("_at", "_leading", "_reason", "_verdicts", "leased")

    def __init__(self, leased: bool) -> None:
        self.leased = leased
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
        self._tasks: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._last: dict[str, _Probe] = {}  # of each request that end() was not called for; the engine's thread
        self._refreshed = time.monotonic()
        self._away_until = 0.0
        self._away_said = False
        self._thread = threading.Thread(target=self._run, name="maru-lookup", daemon=True)
        self._thread.start()

    def new_chain(self, salt: bytes, chunk_tokens: int) -> PrefixChain:
        return PrefixChain(root(self._namespace_id, salt), chunk_tokens, self._hasher)

    def probe(self, request_id: str, keys: Callable[[], bytes]) -> _Probe:
        before = self._last.get(request_id)
        result = self._last[request_id] = _Probe(before is not None and (before.leased or not before.done()))
        if time.monotonic() < self._away_until:
            result.finish(0, b"", "unreachable")
            return result
        self._tasks.put((self._probe, (result, request_id, keys)))
        return result

    def keep_due(self) -> bool:
        return time.monotonic() - self._refreshed >= _REFRESH_S

    def keep(self, request_ids: Iterable[str]) -> None:
        self._refreshed = time.monotonic()
        ids = [lease_id(r) for r in request_ids]
        if ids:
            self._tasks.put((self._refresh, ids))

    def end(self, request_id: str) -> None:
        last = self._last.pop(request_id, None)
        # In this order: whoever is done was said to be leased before.
        if last is not None and (not last.done() or last.leased):
            self._tasks.put((self._end, request_id))

    def close(self) -> None:
        """Ends the thread and the session."""
        self._tasks.put((None, None))
        self._thread.join(timeout=2.0)
        self.client.close(2.0)

    def _run(self) -> None:
        while True:
            tasks = [self._tasks.get()]
            while not self._tasks.empty():
                tasks.append(self._tasks.get())
            for function, group in groupby(tasks, lambda task: task[0]):
                if function is None:
                    return
                try:
                    function([argument for _, argument in group])
                except MaruError as e:
                    # A failed refresh or end costs at most an early eviction.
                    logger.debug("lookup thread: %s", e)
                except Exception:
                    # A thread that ended would leave every later lookup open for ever.
                    logger.exception("lookup failed; its request is computed")

    def _refresh(self, lists: Sequence[list[int]]) -> None:
        self.client.refresh_requests(lists[-1])

    def _end(self, request_ids: Sequence[str]) -> None:
        self.client.end_requests([lease_id(r) for r in request_ids])

    def _probe(self, asked: Sequence[tuple[_Probe, str, Callable[[], bytes]]]) -> None:
        """Answers probes that were queued together."""
        leases: list[tuple[bytes, int]] = []
        targets, away = b"", True
        try:
            if time.monotonic() < self._away_until:  # it became so while these waited
                return
            targets = self.client.targets()
            if len(targets) != 16 * self._world_size:
                return
            for group in self._hashed(asked):
                taken = self._answer(group, targets)
                if taken is None:
                    return
                leases += taken
            away = False
        finally:
            self._note(away)
            for result, _, _ in asked:
                if not result.done():
                    result.finish(0, b"", "unreachable")
        for keys, lease in leases:
            self._ask(keys, targets, Mode.PREFIX, lease)

    @staticmethod
    def _hashed(asked: Sequence[tuple[_Probe, str, Callable[[], bytes]]]) -> Iterator[list[tuple[_Probe, str, bytes]]]:
        """Those with keys, as many at a time as one call takes: prompts in front do not wait for all the others."""
        group: list[tuple[_Probe, str, bytes]] = []
        size = 0
        for result, request_id, keys_of in asked:
            try:
                keys = keys_of()
            except Exception:
                logger.exception("a prompt was not hashed; its request is computed")
                result.finish(0, b"", "not_stored")
                continue
            if group and size + len(keys) > _CALL_BYTES:
                yield group
                group, size = [], 0
            group.append((result, request_id, keys))
            size += len(keys)
        if group:
            yield group

    def _answer(self, waiting: Sequence[tuple[_Probe, str, bytes]], targets: bytes) -> list[tuple[bytes, int]] | None:
        """Asks for all of them at once; None: the server is away.

        One alone takes its leases by the same call. Of several it returns what to take after
        the answers, as (keys, lease): a chunk that is evicted in this moment is a load that
        fails, as others are, and the engine does not wait for a call a request.
        """
        alone = len(waiting) == 1
        began = time.monotonic()
        if alone:
            waiting[0][0].leased = True
            verdicts = self._ask(waiting[0][2], targets, Mode.PREFIX, lease_id(waiting[0][1]))
        else:
            verdicts = self._ask(b"".join(keys for _, _, keys in waiting), targets, Mode.EACH, 0)
        status = verdicts.translate(_STATUS)
        if _HIT not in status and (time.monotonic() - began >= self._timeout_s or not self.client.connected):
            return None  # a server that hangs is a miss to the library until the session ends
        leases, at = [], 0
        for result, request_id, keys in waiting:
            end = at + len(keys) // KEY_BYTES
            behind = status[at:end].lstrip(_HIT)
            leading = end - at - len(behind)
            if alone:
                result.leased = bool(leading)
            elif leading:
                result.leased = True
                leases.append((keys[: leading * KEY_BYTES], lease_id(request_id)))
            result.finish(leading, verdicts[at:end], "pending" if behind.startswith(_PENDING) else "not_stored")
            at = end
        return leases

    def _ask(self, keys: bytes, targets: bytes, mode: Mode, lease: int) -> bytes:
        """A verdict a key. Shard s is read by ranks s * replicas and on; a hit is one for all of them."""
        answer = b""
        for r in range(self._replicas):
            mine = b"".join(targets[16 * i : 16 * i + 16] for i in range(r, self._world_size, self._replicas))
            verdicts = bytes(self.client.probe(keys, mode, targets=mine, request_id=lease, timeout=self._timeout_s)[1])
            answer = bytes(b if a & 3 == Verdict.HIT else a for a, b in zip(answer, verdicts)) if r else verdicts
            if _HIT not in answer.translate(_STATUS):
                break
        return answer

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
