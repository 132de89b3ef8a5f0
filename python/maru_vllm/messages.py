"""What the two roles of the connector tell each other each step: plain data, pickled by the engine (R23)."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BlockLoad", "BlockStore", "StepOrders", "StepReport"]


@dataclass
class BlockLoad:
    """Load parts of chunks into engine blocks, for one waiting request.

    keys: 32 bytes a chunk, of shard 0; a worker puts its own shard in. blocks:
    destination block ids of all chunks, one after the other. counts: blocks of each
    chunk. skips: blocks of each chunk's object that are left out at its start (a
    local hit ended inside the chunk).
    """

    request_id: str
    keys: bytes
    blocks: list[int]
    counts: list[int]
    skips: list[int]


@dataclass
class BlockStore:
    """Store whole chunks whose KV is final after this step.

    keys and parents: 32 and 28 bytes a chunk, of shard 0. blocks: source block ids,
    the same count for each chunk.
    """

    request_id: str
    keys: bytes
    parents: bytes
    blocks: list[int]


@dataclass
class StepOrders:
    """From the scheduler to every worker.

    finishing: requests whose blocks are held until their stores are done; preempted:
    requests whose blocks are about to be overwritten. step: number of this step when
    its time is wanted, else 0.
    """

    loads: list[BlockLoad] = field(default_factory=list)
    stores: list[BlockStore] = field(default_factory=list)
    finishing: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    step: int = 0


@dataclass
class StepReport:
    """From the workers to the scheduler.

    stored: for each request, how many store orders have ended since the last report,
    whatever their outcome, added up over the workers. load_codes: for each request
    whose load failed somewhere, the code of a chunk that failed. step: as ordered.
    """

    stored: dict[str, int] = field(default_factory=dict)
    load_codes: dict[str, int] = field(default_factory=dict)
    step: int = 0

    def add(self, other: StepReport) -> StepReport:
        """The report of two workers."""
        total = dict(self.stored)
        for request_id, count in other.stored.items():
            total[request_id] = total.get(request_id, 0) + count
        return StepReport(total, {**other.load_codes, **self.load_codes}, max(self.step, other.step))

    def __bool__(self) -> bool:
        return bool(self.stored or self.load_codes or self.step)
