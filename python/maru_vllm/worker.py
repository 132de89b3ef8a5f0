"""The worker's half: moves whole blocks between the engine's tensors and Maru.

It submits the orders of a step to the library in one call each, polls without
blocking, and reports every request exactly once (R10, R19). Copying runs in the
library's threads, outside the interpreter lock.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from maru_vllm.geometry import LayerRuns, block_bytes
from maru_vllm.messages import BlockLoad, BlockStore, StepOrders, StepReport

__all__ = ["Transfers", "WorkerRole"]

logger = logging.getLogger("maru.vllm")


class Transfers(Protocol):
    """What the worker needs of the library; see maru.api.Client.

    A job is a positive int. Blocks are array('I'), ends array('Q') of where each
    object's blocks end, offsets array('Q') of bytes into each object. Submitting raises maru.MaruError when the queue is full
    or the client is closed; nothing is queued then.
    """

    def register_layout(self, layers: Sequence[LayerRuns], block_count: int) -> int: ...

    def submit_store(self, layout: int, keys: bytes, parents: bytes, blocks: array[int], ends: array[int]) -> int: ...

    def submit_load(
        self, layout: int, keys: bytes, blocks: array[int], ends: array[int], offsets: array[int]
    ) -> int: ...

    def completed(self) -> list[int]:
        """Jobs that have ended, each once."""

    def job_codes(self, job: int) -> Sequence[int]:
        """Outcome of each object of an ended job; 0 is success. Once per job."""

    def wait(self, timeout_s: float) -> None:
        """Returns when a job has ended or the time is over."""

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


class WorkerRole:
    """One per engine worker; called from its thread only.

    submit_error: the exception that a refused submission raises. already_code: the code
    of a store whose key was there.
    """

    def __init__(
        self,
        transfers: Transfers,
        *,
        chunk_blocks: int,
        submit_error: type[Exception],
        already_code: int,
        async_store: bool = True,
    ) -> None:
        self._transfers = transfers
        self._chunk_blocks = chunk_blocks
        self._submit_error = submit_error
        self._already_code = already_code
        self._async_store = async_store
        self._layout = 0
        self._block_bytes = 0
        self._loads: dict[int, BlockLoad] = {}
        self._stores: dict[int, BlockStore] = {}
        self._store_jobs: dict[str, int] = {}  # jobs under way, by request
        self._finishing: set[str] = set()
        self._recving: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._report = StepReport()
        self.counters = Counters()

    def register(self, layers: Sequence[LayerRuns], block_count: int) -> None:
        """Gives the tensors' geometry to the library. The tensors outlive this object."""
        self._layout = self._transfers.register_layout(layers, block_count)
        self._block_bytes = block_bytes(layers)

    # -- orders -----------------------------------------------------------

    def before_overwrite(self, orders: StepOrders) -> None:
        """Waits for the stores of preempted requests, whose blocks are about to be overwritten (R18).

        A job always ends: its calls have deadlines and its copy is a matter of memory speed.
        """
        self._wait_for(orders.preempted)

    def _wait_for(self, request_ids: Iterable[str]) -> None:
        wanted = set(request_ids)
        while any(r in self._store_jobs for r in wanted):
            self._transfers.wait(0.1)
            self._poll()

    def start_loads(self, orders: StepOrders) -> None:
        """Submits every load of the step and returns."""
        for load in orders.loads:
            offsets = array("Q", (skip * self._block_bytes for skip in load.skips))
            try:
                job = self._transfers.submit_load(
                    self._layout, load.keys, array("I", load.blocks), array("Q", accumulate(load.counts)), offsets
                )
            except self._submit_error as e:
                logger.warning("load of %s was not submitted and is computed instead: %s", load.request_id, e)
                self._fail(load, range(len(load.counts)))
                self._recving.add(load.request_id)
                continue
            self._loads[job] = load

    def start_stores(self, orders: StepOrders) -> None:
        """Submits the chunks that this step made final; without async_store waits for them."""
        for store in orders.stores:
            count = len(store.keys) // 32
            ends = array("Q", range(self._chunk_blocks, len(store.blocks) + 1, self._chunk_blocks))
            try:
                job = self._transfers.submit_store(
                    self._layout, store.keys, store.parents, array("I", store.blocks), ends
                )
            except self._submit_error as e:
                # Under pressure a store is dropped and counted, never waited for.
                logger.debug("store of %s dropped: %s", store.request_id, e)
                self.counters.dropped += count
                self._count_report(store.request_id)
                continue
            self._stores[job] = store
            self._store_jobs[store.request_id] = self._store_jobs.get(store.request_id, 0) + 1
        self._finishing.update(orders.finishing)
        if not self._async_store:
            self._wait_for([s.request_id for s in orders.stores])

    # -- results ----------------------------------------------------------

    def _poll(self) -> None:
        for job in self._transfers.completed():
            codes = self._transfers.job_codes(job)
            if job in self._loads:
                self._end_load(self._loads.pop(job), codes)
            elif job in self._stores:
                self._end_store(self._stores.pop(job), codes)

    def _end_load(self, load: BlockLoad, codes: Sequence[int]) -> None:
        bad = [i for i, code in enumerate(codes) if code != 0]
        for i in bad:
            self.counters.failures[codes[i]] = self.counters.failures.get(codes[i], 0) + 1
        self._fail(load, bad)
        self._recving.add(load.request_id)
        good = len(codes) - len(bad)
        self.counters.loaded += good
        self.counters.loaded_bytes += sum(n for n, c in zip(load.counts, codes, strict=True) if c == 0) * self._block_bytes

    def _fail(self, load: BlockLoad, chunks: Iterable[int]) -> None:
        ends = [0, *accumulate(load.counts)]
        for i in chunks:
            self.counters.load_failures += 1
            self._bad_blocks.update(load.blocks[ends[i] : ends[i + 1]])

    def _end_store(self, store: BlockStore, codes: Sequence[int]) -> None:
        for code in codes:
            if code == 0:
                self.counters.stored += 1
                self.counters.stored_bytes += self._chunk_blocks * self._block_bytes
            elif code == self._already_code:
                self.counters.already += 1
            else:
                self.counters.dropped += 1
                self.counters.failures[code] = self.counters.failures.get(code, 0) + 1
        left = self._store_jobs[store.request_id] - 1
        if left:
            self._store_jobs[store.request_id] = left
        else:
            del self._store_jobs[store.request_id]
        self._count_report(store.request_id)

    def _count_report(self, request_id: str) -> None:
        self._report.stored[request_id] = self._report.stored.get(request_id, 0) + 1

    def finished(self) -> tuple[set[str], set[str]]:
        """(sent, received) since the last call: requests whose stores, and whose load, have ended."""
        self._poll()
        sent = {r for r in self._finishing if r not in self._store_jobs}
        self._finishing -= sent
        received, self._recving = self._recving, set()
        return sent, received

    def bad_blocks(self) -> set[int]:
        """Blocks of loads that failed, for the requests of the last finished()."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def report(self) -> StepReport | None:
        """News for the scheduler, or None."""
        if not self._report.stored:
            return None
        report, self._report = self._report, StepReport()
        return report

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self._loads or self._stores)

    def shutdown(self, timeout_s: float) -> None:
        """Ends the client; transfers under way end first, within the time."""
        self._transfers.close(timeout_s)
