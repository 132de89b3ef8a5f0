"""Lookups of the scheduler role over the library: jobs of one client.

The engine's thread submits a lookup and looks for its answer later; the library asks the
server on threads of its own, which need no interpreter lock. Nothing waits, and nothing
is raised. While the server is away, and for a second after each call without an answer,
lookups are answered at once. The keys of a long prompt are hashed by a thread of this
module, which then submits the lookup.

Invariants:
  L1  Each probe is answered exactly once, whatever happens to others.
  L2  A request's leases are ended after the last call that could take some (the library
      keeps that order); a request that surely has none is not ended at the server.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from maru import _lib
from maru.api import LOOKUP_AWAY, Client, Verdict
from maru.errors import MaruError
from maru.keys import root
from maru_vllm.chain import PrefixChain, library_hasher

__all__ = ["ClientLookup", "lease_id"]

logger = logging.getLogger("maru.vllm")

# Request leases last tens of seconds at the server; refreshing each few seconds
# survives a lost call.
_REFRESH_S = 3.0
# A look for answers gives the interpreter lock away, which may take a while to come back
# from a thread that computes; an answer comes in as much time at the earliest.
_LOOK_S = 100e-6
_MEDIA = {1: "cpu", 2: "cxl", 3: "ssd"}
_STATUS = bytes(verdict & 3 for verdict in range(256))
_HIT, _PENDING = bytes((Verdict.HIT,)), bytes((Verdict.PENDING,))


class _Probe:
    """The result of one lookup, finished once, by the engine's thread or the hashing one.

    leased: the server may keep leases for its request.
    """

    __slots__ = ("_asked", "_at", "_collect", "_leading", "_reason", "_verdicts", "ended", "leased")

    def __init__(self, collect: Callable[[], None], leased: bool) -> None:
        self.leased = leased
        self.ended = False  # its request needs no answer any more
        self._collect = collect
        self._asked = time.monotonic()
        self._at: float | None = None
        self._leading: int | None = None
        self._reason = "not_stored"
        self._verdicts = b""

    def done(self) -> bool:
        if self._leading is None:
            self._collect()
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

    def finish(self, reason: str, verdicts: bytes = b"", seconds: float = 0.0) -> None:
        """seconds: from the question to the answer."""
        behind = verdicts.translate(_STATUS).lstrip(_HIT)
        self._verdicts, self._at = verdicts, self._asked + seconds
        self._reason = "pending" if behind.startswith(_PENDING) else reason
        leading = len(verdicts) - len(behind)
        self.leased = self.leased or leading > 0
        self._leading = leading  # last: another thread may look


class ClientLookup:
    """Lookups of one scheduler. world_size: workers of the engine; replicas: as many
    neighbouring ranks hold one shard, and each of them must be able to read it.

    Concurrency: the engine's thread calls it. Locks: _lock, for a submission and for
    taking what is answered.
    """

    def __init__(self, client: Client, namespace_id: bytes, world_size: int, replicas: int, timeout_s: float) -> None:
        self.client = client
        self._namespace_id = namespace_id
        self._world_size = world_size
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._hasher = library_hasher(_lib.load())
        self._ready = select.poll()
        self._ready.register(client.event_fd, select.POLLIN)
        self._lock = threading.Lock()
        self._asked: dict[int, _Probe] = {}  # by job
        self._last: dict[str, _Probe] = {}  # of each request that end() was not called for
        self._refreshed = time.monotonic()
        self._looked = 0.0
        self._closed = False
        self._away_said = False
        self._refusal_said = ""
        self._to_hash: queue.SimpleQueue[tuple[_Probe, str, Callable[[], bytes]] | None] = queue.SimpleQueue()
        self._hashing: threading.Thread | None = None  # from the first long prompt on

    def new_chain(self, salt: bytes, chunk_tokens: int) -> PrefixChain:
        return PrefixChain(root(self._namespace_id, salt), chunk_tokens, self._hasher)

    def probe(self, request_id: str, keys: bytes | Callable[[], bytes]) -> _Probe:
        before = self._last.get(request_id)
        leased = False
        if before is not None:
            leased = not before.done() or before.leased
            with self._lock:
                before.ended = True
        result = self._last[request_id] = _Probe(self._collect, leased)
        if isinstance(keys, bytes) or self._closed:
            self._submit(result, request_id, keys if isinstance(keys, bytes) else b"")
            return result
        self._to_hash.put((result, request_id, keys))
        if self._hashing is None:
            thread = threading.Thread(target=self._hash, name="maru-hash", daemon=True)
            try:
                thread.start()
                self._hashing = thread
            except RuntimeError:
                logger.exception("no thread for long prompts; their requests are computed")
                self._to_hash.get()
                result.finish("not_stored")
        return result

    def keep_due(self) -> bool:
        return time.monotonic() - self._refreshed >= _REFRESH_S

    def keep(self, request_ids: Iterable[str]) -> None:
        self._refreshed = time.monotonic()
        if ids := [lease_id(r) for r in request_ids]:
            self._quietly(lambda: self.client.refresh_requests(ids, wait=False))

    def end(self, request_id: str) -> None:
        last = self._last.pop(request_id, None)
        if last is None:
            return
        with self._lock:
            last.ended = True  # one that is being hashed is not asked for
        if not last.done() or last.leased:  # done() takes all answers, also those that nobody asks for
            self._quietly(lambda: self.client.end_requests([lease_id(request_id)], wait=False))

    def close(self) -> None:
        """Ends the thread and the session. What is asked later is a miss."""
        if self._hashing is not None:
            self._to_hash.put(None)
            self._hashing.join(timeout=2.0)
        with self._lock:
            self._closed = True
            self._give_up()
        self.client.close(2.0)

    @staticmethod
    def _quietly(call: Callable[[], None]) -> None:
        try:
            call()
        except MaruError as e:
            # A failed refresh or end costs at most an early eviction.
            logger.debug("leases of requests: %s", e)

    def _submit(self, result: _Probe, request_id: str, keys: bytes) -> None:
        result._asked = time.monotonic()
        with self._lock:
            if result.ended or self._closed:
                result.finish("unreachable" if self._closed else "not_stored")
                return
            try:
                job = self.client.submit_lookup(keys, self._world_size, self._replicas, lease_id(request_id), self._timeout_s)
            except MaruError as e:
                result.finish("unreachable")
                if str(e) != self._refusal_said:
                    self._refusal_said = str(e)
                    logger.warning("a lookup was refused, its request is computed: %s", e)
                return
            self._asked[job] = result

    def _hash(self) -> None:
        while (task := self._to_hash.get()) is not None:
            result, request_id, keys_of = task
            try:
                self._submit(result, request_id, b"" if result.ended else keys_of())
            except Exception:
                # A thread that ended would leave every later lookup open for ever.
                logger.exception("a prompt was not hashed; its request is computed")
                result.finish("not_stored")

    def _collect(self) -> None:
        """Takes the answers that have come."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        with self._lock:
            if not self._asked or not self._ready.poll(0):
                self._looked = now
                return
            try:
                for job in self.client.completed():
                    self._take(job)
            except Exception:
                logger.exception("answers of lookups are lost; their requests are computed")
                self._give_up()

    def _take(self, job: int) -> None:
        codes, result = self.client.job_result(job), self._asked.pop(job)
        assert codes is not None, "a completed job has a result"
        seconds = codes.pop() / 1e6
        away = codes[0] == LOOKUP_AWAY
        if away:
            result.leased = True  # the server may have heard the question
            result.finish("unreachable", b"", seconds)
        else:
            result.finish("not_stored", bytes(codes.tolist()), seconds)
        self._note(away)

    def _give_up(self) -> None:
        for result in self._asked.values():
            result.leased = True
            result.finish("unreachable")
        self._asked.clear()

    def _note(self, away: bool) -> None:
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
