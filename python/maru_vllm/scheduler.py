"""The scheduler's half: which prefix is in Maru, what to load where, what to store.

It imports nothing of vLLM and takes requests as they are, so the rare
interleavings are tested without an engine. It holds metadata only; the engine's
thread never waits for the network: a lookup runs in the background, and until it
is done the answer is "ask again".

State lives as long as its request: what the engine or the server already knows is
not kept here (VL-09).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from maru.keys import Chain, pack_tokens
from maru_vllm.messages import BlockLoad, BlockStore, StepOrders

__all__ = ["Lookup", "LookupResult", "SchedulerRole", "bypass_reason"]

logger = logging.getLogger("maru.vllm")


class LookupResult(Protocol):
    """A probe under way."""

    def done(self) -> bool:
        """Whether leading() is known."""

    def leading(self) -> int:
        """Leading chunks that every target worker can read; 0 when the server is away."""


class Lookup(Protocol):
    """Metadata client of the scheduler. No call waits for the network."""

    def new_chain(self, salt: bytes) -> Chain:
        """The chain of a request."""

    def probe(self, request_id: str, keys: bytes) -> LookupResult:
        """Asks for a prefix of chunks and keeps its hits from eviction for this request."""

    def keep(self, request_ids: Iterable[str]) -> None:
        """Refreshes what probe keeps."""

    def end(self, request_id: str) -> None:
        """Ends what probe keeps."""


def bypass_reason(request: Any) -> str | None:
    """Why a request neither reads nor writes the cache, or None (section 4.2 of the guide)."""
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompt_embeds"
    if getattr(request, "lora_request", None) is not None:
        return "lora"
    if getattr(request, "mm_features", None):
        return "multimodal"
    if getattr(request, "resumable", False) or getattr(request, "streaming_queue", None) is not None:
        return "streaming"
    if getattr(request, "pooling_params", None) is not None:
        return "pooling"
    return None


@dataclass
class _Request:
    request: Any
    bypass: str | None
    chain: Chain | None
    lookup: LookupResult | None = None
    looked_up: int = 0  # chunks that the lookup asked for
    usable: int | None = None  # chunks offered at most: a load failed behind them (R14)
    local_tokens: int = 0  # of the last offer
    load: BlockLoad | None = None  # under way
    load_first: int = 0  # its first chunk
    known: int = 0  # leading chunks that Maru has: loaded, or stored by this request
    stores: int = 0  # orders not reported back, times workers


class SchedulerRole:
    """Answers the engine's scheduler. One per engine; called from its thread only.

    block_tokens: tokens of an engine block. chunk_blocks: blocks of an object.
    min_hit_tokens: a hit that adds fewer tokens is left to the engine. worker_count:
    every worker reports each store order.
    """

    def __init__(
        self, lookup: Lookup, *, block_tokens: int, chunk_blocks: int, min_hit_tokens: int = 0, worker_count: int = 1
    ) -> None:
        self._lookup = lookup
        self._worker_count = worker_count
        self._block_tokens = block_tokens
        self._chunk_blocks = chunk_blocks
        self._chunk_tokens = block_tokens * chunk_blocks
        self._min_hit_tokens = max(min_hit_tokens, block_tokens)
        self._requests: dict[str, _Request] = {}
        self._loads: list[BlockLoad] = []
        self._finishing: list[str] = []
        self._held: dict[str, int] = {}  # finished requests whose blocks wait for stores
        self.bypassed: dict[str, int] = {}
        self.offered_tokens = 0
        self.failed_loads = 0

    # -- requests ---------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Starts the lookup as early as the request is known."""
        self._refresh_lookup(self._state(request))

    def _state(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            reason = bypass_reason(request)
            if reason is not None:
                self.bypassed[reason] = self.bypassed.get(reason, 0) + 1
            salt = (getattr(request, "cache_salt", None) or "").encode()
            state = _Request(request, reason, None if reason else self._lookup.new_chain(salt))
            self._requests[request.request_id] = state
        return state

    def _extend_chain(self, state: _Request, tokens: int) -> None:
        """Hashes the whole chunks of the first `tokens` tokens; incremental."""
        if state.chain is None:
            return
        start, end = len(state.chain) * self._chunk_tokens, tokens // self._chunk_tokens * self._chunk_tokens
        if end > start:
            state.chain.extend(pack_tokens(state.request.all_token_ids[start:end]), self._chunk_tokens)

    def _refresh_lookup(self, state: _Request) -> None:
        """One probe per request and change: again only when it has more chunks than last time."""
        request = state.request
        if state.chain is None or getattr(request, "skip_reading_prefix_cache", False):
            return
        self._extend_chain(state, request.num_tokens)
        chunks = len(state.chain)
        if chunks > 0 and (state.lookup is None or chunks > state.looked_up):
            state.lookup = self._lookup.probe(request.request_id, state.chain.keys())
            state.looked_up = chunks

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the local hit that Maru has; None: ask again (R1..R6)."""
        state = self._state(request)
        if state.bypass or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        # At least one token is left to compute, and whole blocks only (R4).
        most = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        if most - num_computed_tokens < self._min_hit_tokens:
            return 0, False
        self._refresh_lookup(state)
        if state.lookup is None:
            return 0, False
        if not state.lookup.done():
            return None, False
        external = min(self._offer(state) * self._chunk_tokens, most) - num_computed_tokens
        if external < self._min_hit_tokens:
            return 0, False
        state.local_tokens = num_computed_tokens
        return external, True

    @staticmethod
    def _offer(state: _Request) -> int:
        """Leading chunks of a finished lookup, less what failed to load for this request."""
        assert state.lookup is not None
        chunks = state.lookup.leading()
        return chunks if state.usable is None else min(chunks, state.usable)

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Orders the load once its destination blocks exist (R8, R9)."""
        if num_external_tokens <= 0:
            return
        state = self._state(request)
        if state.chain is None:
            return
        size = self._chunk_blocks
        first = state.local_tokens // self._block_tokens
        end = first + num_external_tokens // self._block_tokens
        load = BlockLoad(request.request_id, b"", list(block_ids[first:end]), [], [])
        chunks = range(first // size, -(-end // size))
        for c in chunks:
            low, high = max(first, c * size), min(end, (c + 1) * size)
            load.counts.append(high - low)
            load.skips.append(low - c * size)
        load.keys = state.chain.keys(chunks.start, chunks.stop)
        state.load, state.load_first = load, chunks.start
        self._loads.append(load)
        self.offered_tokens += num_external_tokens

    # -- steps ------------------------------------------------------------

    def build_orders(
        self,
        scheduled: dict[str, int],
        preempted: Iterable[str],
        block_ids: dict[str, Sequence[int]],
    ) -> StepOrders:
        """Orders of one step. scheduled: tokens computed in it, by request; block_ids: the whole
        block table of each of those requests."""
        orders = StepOrders(loads=self._loads, finishing=self._finishing)
        self._loads, self._finishing = [], []
        for request_id in preempted:
            orders.preempted.append(request_id)
            state = self._requests.get(request_id)
            if state is not None:
                # It is asked for again from its first token, maybe much later.
                state.lookup, state.looked_up = None, 0
        for request_id, tokens in scheduled.items():
            state = self._requests.get(request_id)
            table = block_ids.get(request_id)
            if state is not None and state.chain is not None and table is not None:
                store = self._store_order(state, state.request.num_computed_tokens + tokens, table)
                if store is not None:
                    orders.stores.append(store)
                    state.stores += self._worker_count
        return orders

    def _store_order(self, state: _Request, final_tokens: int, table: Sequence[int]) -> BlockStore | None:
        """The chunks that are final after this step and that Maru does not have from this request (R16, VL-17)."""
        assert state.chain is not None
        final_tokens = min(final_tokens, state.request.num_tokens, len(table) * self._block_tokens)
        self._extend_chain(state, final_tokens)
        if state.lookup is not None and state.lookup.done():
            state.known = max(state.known, self._offer(state))
        first, end = state.known, final_tokens // self._chunk_tokens
        if end <= first:
            return None
        state.known = end
        size = self._chunk_blocks
        return BlockStore(
            state.request.request_id,
            state.chain.keys(first, end),
            state.chain.parents(first, end),
            list(table[first * size : end * size]),
        )

    def update_output(self, recving: Iterable[str], invalid_blocks: set[int], stored: dict[str, int]) -> None:
        """Takes the workers' news, before the engine acts on them."""
        for request_id in recving:
            state = self._requests.get(request_id)
            if state is None or state.load is None:
                continue
            load, state.load = state.load, None
            good = self._good_chunks(load, invalid_blocks)
            if good == len(load.counts):
                # A chunk that was loaded in part is whole in Maru all the same.
                state.known = max(state.known, state.load_first + good)
                continue
            self.failed_loads += 1
            state.usable = state.load_first + good
            state.known = min(state.known, state.usable)
        for request_id, count in stored.items():
            state = self._requests.get(request_id)
            if state is not None:
                state.stores -= count
            elif request_id in self._held:
                self._held[request_id] -= count
                if self._held[request_id] <= 0:
                    del self._held[request_id]

    @staticmethod
    def _good_chunks(load: BlockLoad, invalid_blocks: set[int]) -> int:
        at = 0
        for i, count in enumerate(load.counts):
            if invalid_blocks.intersection(load.blocks[at : at + count]):
                return i
            at += count
        return len(load.counts)

    def request_finished(self, request: Any) -> bool:
        """True: the blocks stay held until the worker reports the request as sent (R19)."""
        # A load that is ordered stays ordered: the engine holds its blocks until it is
        # reported, aborted or not (R11).
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False
        if state.lookup is not None:
            self._lookup.end(request.request_id)
        if state.stores <= 0:
            return False
        self._held[request.request_id] = state.stores
        self._finishing.append(request.request_id)
        return True

    def waiting_ids(self) -> list[str]:
        """Requests whose hits must stay: not finished, and looked up."""
        return [r for r, s in self._requests.items() if s.lookup is not None]

    @property
    def live(self) -> int:
        """Requests with state here; 0 when the engine is idle."""
        return len(self._requests) + len(self._held)
