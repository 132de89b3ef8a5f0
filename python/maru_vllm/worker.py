"""The worker's half: moves whole blocks between the engine's tensors and Maru.

It submits the orders of a step to the library, polls without blocking, and reports
every request exactly once (R10, R19). Copying runs in the library's threads,
outside the interpreter lock. A step with nothing under way does not enter the library, and one
with something does when a job has ended: entering it after a rest costs as much as
the rest of a step's work here.

Loads and stores have budgets of their own: bytes that the library has at a time.
What is over waits here, chunk by chunk, over as many steps as it takes, so that
staging does not grow with a prompt's length; stores that would wait behind too many
are dropped and counted. A step's stores are one call; a load is a call of its own,
since its request waits for its end alone.

Invariants:
  W1  A load's request is reported once, in the step after its last chunk ended, with
      every block of every chunk that failed (R13).
  W2  A store's source blocks are not reported as free before each of its chunks has
      been copied or given up.
  W3  A preempted request's chunks that are not submitted are dropped; those that are
      submitted are copied before before_overwrite returns (R18). Their commit may be
      under way then.
  W4  What waits for its budget, or for room in the library's queue, waits behind a job
      under way, so that trying again when a job has ended is enough.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from maru.errors import Code
from maru.keys import DIGEST_BYTES, KEY_BYTES
from maru_vllm.chain import with_shard
from maru_vllm.geometry import LayerRuns, block_bytes
from maru_vllm.messages import BlockLoad, BlockStore, StepOrders, StepReport
from maru_vllm.stats import Tally

__all__ = ["Budgets", "Counters", "Transfers", "WorkerRole"]

logger = logging.getLogger("maru.vllm")

# One log line of a kind in so many seconds, with the count of those left out.
_LOG_EVERY_S = 30.0

# Chunks of one call of the library.
_MAX_ITEMS = 4096


class Transfers(Protocol):
    """What the worker needs of the library; see maru.api.Client.

    A job is a positive int. Blocks are array('I'), ends array('Q') of where each
    object's blocks end, offsets array('Q') of bytes into each object. Submitting
    raises maru.MaruError when the queue is full or the client is closed; nothing is
    queued then. Copies of device memory are ordered behind what the engine has put on
    its stream.
    """

    def register_layout(self, layers: Sequence[LayerRuns], block_count: int) -> int: ...

    def submit_store(self, layout: int, keys: bytes, parents: bytes, blocks: array[int], ends: array[int]) -> int: ...

    def submit_load(self, layout: int, keys: bytes, blocks: array[int], ends: array[int], offsets: array[int]) -> int: ...

    def ready(self) -> bool:
        """Whether a job has ended that completed() did not hand out, or a store was copied since
        it was asked last. Does not enter the library."""

    def completed(self) -> list[int]:
        """Jobs that have ended, each once; maybe some of them, the others at the next call."""

    def copied(self, job: int) -> bool:
        """Whether a store that was not handed out as ended has read its blocks; wait() returns then too."""

    def job_codes(self, job: int) -> Sequence[int]:
        """Outcome of each object of an ended job; 0 is success. Once per job."""

    def wait(self, timeout_s: float) -> None:
        """Returns when a job has ended, a store was copied, or the time is over."""

    def close(self, timeout_s: float) -> None: ...


@dataclass
class Counters:
    """Since start: objects and bytes, loads that failed, stores dropped."""

    loaded: int = 0
    loaded_bytes: int = 0
    load_failures: int = 0
    stored: int = 0
    stored_bytes: int = 0
    already: int = 0
    dropped: int = 0
    failures: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Budgets:
    """Bytes that the library has at a time, for each direction. Stores of more than
    waiting_bytes behind them are dropped."""

    load_bytes: int = 1 << 30
    store_bytes: int = 1 << 30
    waiting_bytes: int = 4 << 30


@dataclass(eq=False)
class _Load:
    order: BlockLoad
    keys: bytes
    ends: list[int]  # of each chunk's blocks, a 0 before them
    at: float
    next: int = 0  # first chunk that is not submitted
    running: int = 0  # chunks submitted and not ended
    code: int = 0  # of a chunk that failed
    bad: set[int] = field(default_factory=set)  # blocks of chunks that failed


@dataclass(eq=False)
class _Store:
    order: BlockStore
    keys: bytes
    mine: list[int]  # chunks that this rank stores
    at: float
    next: int = 0  # index into mine
    running: int = 0


class WorkerRole:
    """One per engine worker; called from its thread only.

    submit_error: the exception that a refused submission raises. already_code: the code
    of a store whose key was there. shard: of this rank's keys; replica of replicas: the
    ranks with the same shard share its stores, when stripe says that each of them
    reads what another one stored.
    """

    def __init__(
        self,
        transfers: Transfers,
        *,
        chunk_blocks: int,
        submit_error: type[Exception],
        already_code: int,
        async_store: bool = True,
        budgets: Budgets | None = None,
        shard: int = 0,
        replica: int = 0,
        replicas: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transfers = transfers
        self._chunk_blocks = chunk_blocks
        self._submit_error = submit_error
        self._already_code = already_code
        self._async_store = async_store
        self._budgets = budgets or Budgets()
        self._shard, self._replica, self._replicas = shard, replica, replicas
        self._clock = clock
        self._layout = 0
        self._block_bytes = 0
        self._load_queue: deque[_Load] = deque()
        self._store_queue: deque[_Store] = deque()
        self._load_jobs: dict[int, tuple[_Load, int, int]] = {}  # first chunk and the one behind the last
        self._store_jobs: dict[int, list[tuple[_Store, int]]] = {}  # with the count of chunks
        self._load_bytes = self._store_bytes = self._waiting_bytes = 0
        self._storing: dict[str, int] = {}  # store orders under way, by request
        self._finishing: set[str] = set()
        self._recving: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._report = StepReport()
        self._moved = True  # something that the gauges say
        self._said: dict[str, tuple[float, int]] = {}
        self.counters = Counters()
        self.tally = Tally()

    def register(self, layers: Sequence[LayerRuns], block_count: int) -> None:
        """Gives the tensors' geometry to the library. The tensors outlive this object."""
        self._layout = self._transfers.register_layout(layers, block_count)
        self._block_bytes = block_bytes(layers)

    def _say(self, kind: str, text: str, *args: object) -> None:
        """A warning, rate-limited by kind."""
        last, left_out = self._said.get(kind, (-_LOG_EVERY_S, 0))
        now = self._clock()
        if now - last < _LOG_EVERY_S:
            self._said[kind] = (last, left_out + 1)
            return
        self._said[kind] = (now, 0)
        more = f" ({left_out} more like this since the last line)" if left_out else ""
        logger.warning(text + "%s", *args, more)

    # -- loads ------------------------------------------------------------

    def start_loads(self, orders: StepOrders) -> None:
        """Submits the loads of the step, as far as the budget goes, and returns.

        This runs in every step; start_stores does not in steps without tokens (0.26), and
        a request may end in the last step that has some. Its stores came with earlier ones.
        """
        if orders.finishing:
            self._finishing.update(orders.finishing)
        if not orders.loads:
            return
        now = self._clock()
        for order in orders.loads:
            self._load_queue.append(_Load(order, with_shard(order.keys, self._shard), [0, *accumulate(order.counts)], now))
        self._moved = True
        self._pump_loads()

    def _pump_loads(self) -> None:
        while self._load_queue:
            load = self._load_queue[0]
            first, stop, size = load.next, load.next, 0
            while stop < len(load.order.counts) and stop - first < _MAX_ITEMS:
                more = load.order.counts[stop] * self._block_bytes
                if self._load_bytes + size + more > self._budgets.load_bytes and (size or self._load_bytes):
                    break
                size += more
                stop += 1
            if stop == first and first < len(load.order.counts):
                return
            try:
                job = self._submit_load(load, first, stop)
            except self._submit_error as e:
                if self._will_have_room(e):
                    return
                self._say("load", "a load was not submitted and its request is computed instead: %s", e)
                self._fail(load, range(first, len(load.order.counts)), int(getattr(e, "code", 0)) or 1)
                load.next = len(load.order.counts)
            else:
                self._load_jobs[job] = (load, first, stop)
                self._load_bytes += size
                load.running += stop - first
                load.next = stop
            if load.next == len(load.order.counts):
                self._load_queue.popleft()
                self._end_load_if_done(load)

    def _will_have_room(self, refusal: Exception) -> bool:
        """The library's queue is full, and a job of ours that ends makes room in it: try again next step."""
        return getattr(refusal, "code", Code.BUSY) == Code.BUSY and bool(self._load_jobs or self._store_jobs)

    def _submit_load(self, load: _Load, first: int, stop: int) -> int:
        begin = load.ends[first]
        return self._transfers.submit_load(
            self._layout,
            load.keys[first * KEY_BYTES : stop * KEY_BYTES],
            array("I", load.order.blocks[begin : load.ends[stop]]),
            array("Q", (end - begin for end in load.ends[first + 1 : stop + 1])),
            array("Q", (skip * self._block_bytes for skip in load.order.skips[first:stop])),
        )

    def _end_load_part(self, load: _Load, first: int, stop: int, codes: Sequence[int]) -> None:
        counts = load.order.counts
        load.running -= stop - first
        self._load_bytes -= sum(counts[first:stop]) * self._block_bytes
        bad = [i for i, code in enumerate(codes) if code != 0]
        for i in bad:
            self.counters.failures[codes[i]] = self.counters.failures.get(codes[i], 0) + 1
        if bad:
            self._fail(load, (first + i for i in bad), codes[bad[0]])
            self._say(
                "lost",
                "%d of %d chunks of request %s were not there or not right any more (code %d); it computes them itself. "
                "Now and then this is eviction between lookup and load: give the pool more room if it is often",
                len(bad),
                len(codes),
                load.order.request_id,
                codes[bad[0]],
            )
        good = len(codes) - len(bad)
        size = sum(n for n, c in zip(counts[first:stop], codes) if c == 0) * self._block_bytes
        self.counters.loaded += good
        self.counters.loaded_bytes += size
        if size:
            self.tally.add("load_bytes", size)
        self._end_load_if_done(load)

    def _end_load_if_done(self, load: _Load) -> None:
        if load.running or load.next < len(load.order.counts):
            return
        if load.code:
            self._report.load_codes[load.order.request_id] = load.code
        self._bad_blocks |= load.bad
        self._recving.add(load.order.request_id)

    def _fail(self, load: _Load, chunks: Iterable[int], code: int) -> None:
        load.code = load.code or code
        for i in chunks:
            self.counters.load_failures += 1
            load.bad.update(load.order.blocks[load.ends[i] : load.ends[i + 1]])

    # -- stores -----------------------------------------------------------

    def before_overwrite(self, orders: StepOrders) -> None:
        """Waits for the copies of preempted requests' stores: their blocks are about to be overwritten (W3).

        A copy always ends: the calls before it have deadlines, and it is a matter of memory speed.
        """
        if not orders.preempted:
            return
        preempted = set(orders.preempted)
        for store in [s for s in self._store_queue if s.order.request_id in preempted]:
            self._drop_rest(store, "dropped")
        since = self._clock()
        reading = [j for j, parts in self._store_jobs.items() if any(s.order.request_id in preempted for s, _ in parts)]
        while reading := [j for j in reading if j in self._store_jobs and not self._transfers.copied(j)]:
            self._transfers.wait(0.1)
            self._poll()
            if self._clock() - since > 5.0:
                self._say("preempt", "stores of preempted requests take more than 5 s; the engine waits for them")

    def start_stores(self, orders: StepOrders) -> None:
        """Submits the chunks that this step made final, as far as the budget goes; without async_store waits for them."""
        if not orders.stores:
            return
        self._moved = True
        now = self._clock()
        size = self._chunk_blocks * self._block_bytes
        for order in orders.stores:
            store = _Store(order, with_shard(order.keys, self._shard), self._mine(order.keys), now)
            self._storing[order.request_id] = self._storing.get(order.request_id, 0) + 1
            self._waiting_bytes += len(store.mine) * size
            self._store_queue.append(store)
            if not store.mine:
                self._end_store_if_done(store)
        self._pump_stores()
        while self._waiting_bytes > self._budgets.waiting_bytes and self._store_queue:
            # The newest go: what waits longest holds blocks of a request that may have ended.
            self._drop_rest(self._store_queue[-1], "dropped")
            self._say(
                "pressure",
                "stores are dropped, more than %d bytes wait to be copied: the pool or the copy threads are too slow for this "
                "engine; raise maru_copy_threads or maru_store_inflight_size",
                self._budgets.waiting_bytes,
            )
        if not self._async_store:
            ids = [s.request_id for s in orders.stores]
            while any(r in self._storing for r in ids):
                self._transfers.wait(0.1)
                self._poll()

    def _mine(self, keys: bytes) -> list[int]:
        chunks = range(len(keys) // KEY_BYTES)
        if self._replicas == 1:
            return list(chunks)
        return [i for i in chunks if keys[i * KEY_BYTES] % self._replicas == self._replica]

    def _pump_stores(self) -> None:
        size = self._chunk_blocks * self._block_bytes
        while self._store_queue:
            room = max(self._budgets.store_bytes - self._store_bytes, 0) // max(size, 1)
            if room == 0 and self._store_bytes == 0:
                room = 1
            room = min(room, _MAX_ITEMS)
            parts: list[tuple[_Store, int]] = []
            for store in self._store_queue:
                if room == 0:
                    break
                count = min(room, len(store.mine) - store.next)
                parts.append((store, count))
                room -= count
            if not parts or not any(count for _, count in parts):
                break
            try:
                job = self._submit_stores(parts)
            except self._submit_error as e:
                if self._will_have_room(e):
                    break
                self._say("store", "stores are dropped, the library does not take them: %s", e)
                for store in list(self._store_queue):
                    self._drop_rest(store, "dropped")
                break
            self._store_jobs[job] = parts
            for store, count in parts:
                store.next += count
                store.running += count
                self._store_bytes += count * size
                self._waiting_bytes -= count * size
            while self._store_queue and self._store_queue[0].next == len(self._store_queue[0].mine):
                self._store_queue.popleft()

    def _submit_stores(self, parts: Sequence[tuple[_Store, int]]) -> int:
        keys, parents, blocks = bytearray(), bytearray(), array("I")
        n = self._chunk_blocks
        for store, count in parts:
            for i in store.mine[store.next : store.next + count]:
                keys += store.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
                parents += store.order.parents[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]
                blocks.extend(store.order.blocks[i * n : (i + 1) * n])
        ends = array("Q", range(n, len(blocks) + 1, n))
        return self._transfers.submit_store(self._layout, bytes(keys), bytes(parents), blocks, ends)

    def _drop_rest(self, store: _Store, outcome: str) -> None:
        """Gives up the chunks of a store that are not submitted."""
        self._moved = True
        left = len(store.mine) - store.next
        self.counters.dropped += left
        self.tally.add("store_chunks", left, outcome)
        self._waiting_bytes -= left * self._chunk_blocks * self._block_bytes
        del store.mine[store.next :]
        if store in self._store_queue:
            self._store_queue.remove(store)
        self._end_store_if_done(store)

    def _end_store_part(self, store: _Store, codes: Sequence[int]) -> None:
        store.running -= len(codes)
        size = self._chunk_blocks * self._block_bytes
        self._store_bytes -= len(codes) * size
        for code in codes:
            if code == 0:
                self.counters.stored += 1
                self.counters.stored_bytes += size
                self.tally.add("store_chunks", 1, "stored")
                self.tally.add("store_bytes", size)
            elif code == self._already_code:
                self.counters.already += 1
                self.tally.add("store_chunks", 1, "already")
            else:
                self.counters.dropped += 1
                self.counters.failures[code] = self.counters.failures.get(code, 0) + 1
                self.tally.add("store_chunks", 1, "failed")
                self._say(
                    "unstored",
                    "a chunk was not stored (code %d: 4 is a full pool, 11 a server that is away); nothing waits for it. "
                    "A pool that is full for long is too small, see `maru usage`",
                    code,
                )
        self._end_store_if_done(store)

    def _end_store_if_done(self, store: _Store) -> None:
        if store.running or store.next < len(store.mine):
            return
        if store in self._store_queue:
            self._store_queue.remove(store)
        if store.mine:
            self.tally.sample("store_seconds", self._clock() - store.at)
        request_id = store.order.request_id
        left = self._storing[request_id] - 1
        if left:
            self._storing[request_id] = left
        else:
            del self._storing[request_id]
        self._report.stored[request_id] = self._report.stored.get(request_id, 0) + 1

    # -- results ----------------------------------------------------------

    def _poll(self) -> None:
        if not self._transfers.ready():
            return
        jobs = self._transfers.completed()
        if not jobs:
            return  # a store was copied, and its commit is under way
        self._moved = True
        for job in jobs:
            codes = self._transfers.job_codes(job)
            if job in self._load_jobs:
                self._end_load_part(*self._load_jobs.pop(job), codes)
            elif job in self._store_jobs:
                at = 0
                for store, count in self._store_jobs.pop(job):
                    self._end_store_part(store, codes[at : at + count])
                    at += count
        self._pump_loads()
        self._pump_stores()

    def finished(self) -> tuple[set[str], set[str]]:
        """(sent, received) since the last call: requests whose stores, and whose load, have ended."""
        if self._load_jobs or self._store_jobs:
            self._poll()
        sent: set[str] = set()
        if self._finishing:
            sent.update(r for r in self._finishing if r not in self._storing)
            self._finishing -= sent
        received, self._recving = self._recving, set()
        if self._moved:
            self._moved = False
            self._gauges()
        return sent, received

    def bad_blocks(self) -> set[int]:
        """Blocks of loads that failed, for the requests of the last finished()."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self, step: int = 0) -> StepReport | None:
        """News for the scheduler, or None."""
        report = self._report
        if not (step or report.stored or report.load_codes):
            return None
        report.step, self._report = step, StepReport()
        return report

    def _gauges(self) -> None:
        self.tally.gauge("loads_in_flight_bytes", self._load_bytes)
        self.tally.gauge("loads_waiting_chunks", sum(len(x.order.counts) - x.next for x in self._load_queue))
        self.tally.gauge("stores_in_flight_bytes", self._store_bytes)
        self.tally.gauge("stores_waiting_chunks", sum(len(x.mine) - x.next for x in self._store_queue))

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way or waits."""
        return bool(self._load_jobs or self._store_jobs or self._load_queue or self._store_queue)

    def shutdown(self, timeout_s: float) -> None:
        """Ends the client; transfers under way end first, within the time. What waits is dropped."""
        for store in list(self._store_queue):
            self._drop_rest(store, "dropped")
        end = self._clock() + timeout_s / 2
        while self._store_jobs and self._clock() < end:
            self._transfers.wait(0.05)
            self._poll()
        self._transfers.close(max(0.1, timeout_s / 2))
