"""The scheduler's half: which prefix is in Maru, what to load where, what to store.

It imports nothing of vLLM and takes requests as they are, so the rare
interleavings are tested without an engine. It holds metadata only; the engine's
thread never waits for the network: a lookup runs in the background, and until it
is done the answer is "ask again".

State lives as long as its request: what the engine or the server already knows is
not kept here (VL-09). A step costs nothing for a request whose next chunk is not
complete yet: when the engine schedules the same requests again, as it does while they
decode, it is known how many such steps have nothing to order, and they are not looked
through.

Invariants:
  S1  A hit counts whole blocks that were proved for every worker, and leaves at
      least one token to compute (R2..R4).
  S2  A chunk whose load failed for a request is not offered to it again, at any
      time before its end; to others it is (R14, VL-16).
  S3  A lookup is made once a request and change of its chunks (R1).
  S4  Two requests do not load one chunk at once: the second waits, for a bounded
      time, until the first one's blocks are in the engine's own cache.
  S5  A request with stores that are not reported by every worker has its blocks
      held (R18, R19).
  S6  _idle_steps counts further steps of exactly _scheduled in which no request of
      them completes a chunk or ends a lease. A request that is new (under an old id,
      too) or looked up again sets it to 0; one that is loading or preempted is not in it.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from maru_vllm.chain import PrefixChain
from maru_vllm.content import ContentRules, bypass_reason, chunk_extras, salt_of
from maru_vllm.cost import CostModel
from maru_vllm.messages import BlockLoad, BlockStore, StepOrders, StepReport
from maru_vllm.stats import Tally

__all__ = ["Lookup", "LookupResult", "SchedulerRole", "bypass_reason"]

# Longer prompts are hashed by the lookup's thread, not by the engine's. Here 1024 tokens take 20 us, less than
# a thousandth of what computing them takes; a thread would need the interpreter lock for most of it, too.
_HASH_HERE_TOKENS = 32768

# A request waits at most so long for another one's load of its prefix.
_WAIT_S = 10.0

# Chunks that are remembered as stored, and how much of their keys.
_STORED_COUNT = 1 << 15
_STORED_BYTES = 12

# Steps with fewer new tokens are timed now and then only.
_TIMED_TOKENS = 64
_TIMED_EVERY = 32

_FAR = 1 << 30  # more tokens than a request has


class LookupResult(Protocol):
    """A probe under way, and its answer."""

    def done(self) -> bool:
        """Whether the rest is known."""

    def answered_at(self) -> float | None:
        """When it became done, in seconds of the scheduler's clock; None: not known."""

    def leading(self) -> int:
        """Leading chunks that every target worker can read; 0 when the server is away."""

    def media(self, start: int, stop: int) -> Mapping[str, int]:
        """How many of the leading chunks start to stop lie on which medium."""

    def reason(self) -> str:
        """Why the chunk behind the leading ones is no hit; one of stats.MISS_REASONS."""


class Lookup(Protocol):
    """Metadata client of the scheduler. No call waits for the network."""

    def new_chain(self, salt: bytes, chunk_tokens: int) -> PrefixChain:
        """The chain of a request."""

    def probe(self, request_id: str, keys: bytes | Callable[[], bytes]) -> LookupResult:
        """Asks for a prefix of chunks and keeps its hits from eviction for this request.
        Keys that are to be computed first are asked for once, in another thread."""

    def keep_due(self) -> bool:
        """Whether it is time for keep()."""

    def keep(self, request_ids: Iterable[str]) -> None:
        """Refreshes what probe keeps."""

    def end(self, request_id: str) -> None:
        """Ends what probe keeps."""


@dataclass
class _Request:
    request: Any
    bypass: str | None
    chain: PrefixChain | None
    lookup: LookupResult | None = None
    asked_at: float = 0.0
    looked_up: int = 0  # chunks that the lookup asked for
    answered: bool = False  # the lookup's outcome is counted
    leased: bool = False
    shared: bool = False  # the lookup's thread has the chain
    usable: int | None = None  # chunks offered at most: a load failed behind them (S2)
    local_tokens: int = 0  # of the last question
    load: BlockLoad | None = None  # under way
    load_first: int = 0  # its first chunk
    load_tokens: int = 0
    load_at: float = 0.0
    bad_from: int | None = None  # first chunk of it that failed, counted from its own
    marks: list[bytes] = field(default_factory=list)  # its keys in _loading (S4)
    waits_since: float | None = None
    judged: tuple[int, bool] | None = None  # external tokens, and whether they are worth a load
    known: int = 0  # leading chunks that Maru has: loaded, or stored by this request
    next_store: int = 0  # tokens that must be final before there is something to do
    stores: int = 0  # orders not reported back, times workers
    settled: bool = False  # scheduled once, its tokens are accounted for
    record: dict[str, Any] = field(default_factory=dict)


class SchedulerRole:
    """Answers the engine's scheduler. One per engine; called from its thread only.

    block_tokens: tokens of an engine block. chunk_blocks: blocks of an object.
    worker_count: every worker reports each store order. min_hit_tokens: None learns
    it. lookup_timeout_s: a lookup without an answer is a miss. journal: takes a record
    of each request. waits: a request waits while another loads its prefix; of no use
    in an engine without a prefix cache of its own. clock: seconds, monotonic.
    """

    def __init__(
        self,
        lookup: Lookup,
        *,
        block_tokens: int,
        chunk_blocks: int,
        min_hit_tokens: int | None = None,
        worker_count: int = 1,
        rules: ContentRules | None = None,
        lookup_timeout_s: float = 2.0,
        journal: Callable[[dict[str, Any]], None] | None = None,
        waits: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup = lookup
        self._worker_count = worker_count
        self._block_tokens = block_tokens
        self._chunk_blocks = chunk_blocks
        self._chunk_tokens = block_tokens * chunk_blocks
        self._rules = rules or ContentRules()
        self._timeout_s = lookup_timeout_s
        self._journal = journal
        self._waits = waits
        self._clock = clock
        self._generation = b""  # of a reset; part of every salt after it
        self.cost = CostModel(min_hit_tokens)
        self.tally = Tally()
        self._requests: dict[str, _Request] = {}
        self._loading: dict[bytes, str] = {}  # keys that are being loaded, by whom (S4)
        self._loads: list[BlockLoad] = []
        self._finishing: list[str] = []
        self._held: dict[str, int] = {}  # finished requests whose blocks wait for stores
        # What this engine stored lately, to tell "evicted" from "not stored"; nothing else believes it.
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        self._scheduled: dict[str, int] = {}  # of the last step that was looked through
        self._idle_steps = 0
        self._asked_again = False  # in this step, by a request whose lookup is under way
        self._new_tokens = 0  # of such a step, beyond one a request
        self._step = 0
        self._timed: dict[int, tuple[float, int]] = {}  # steps whose time is wanted: begin, new tokens
        self._last_output = 0.0
        self._say_minimum()

    # -- requests ---------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Starts the lookup as early as the request is known."""
        self._refresh_lookup(self._state(request))

    def _state(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            reason = bypass_reason(request, self._rules)
            chain = None if reason else self._new_chain(request)
            state = _Request(request, reason, chain, next_store=self._chunk_tokens)
            if reason is not None:
                self.tally.add("bypassed_requests", label=reason)
            self._requests[request.request_id] = state
            self._idle_steps = 0
        return state

    def _new_chain(self, request: Any) -> PrefixChain:
        return self._lookup.new_chain(self._generation + salt_of(request), self._chunk_tokens)

    def reset(self) -> None:
        """Nothing that is stored now is offered again, and nothing that is computed until now is stored.

        Requests that live go on without the cache: their KV may be of both sides of the
        reset. Later ones have keys of their own.
        """
        self._generation = b"maru-reset-v1" + os.urandom(16)
        for state in self._requests.values():
            if state.chain is not None:
                self._unmark(state)
                state.chain, state.bypass = None, "reset"
                self.tally.add("bypassed_requests", label="reset")

    def _extend_chain(self, state: _Request, tokens: int) -> None:
        """Hashes the whole chunks of the first `tokens` tokens; incremental."""
        assert state.chain is not None
        first, stop = len(state.chain), tokens // self._chunk_tokens
        if stop > first:
            size = self._chunk_tokens
            extras = chunk_extras(state.request, self._rules, size, first, stop)
            state.chain.extend(state.request.all_token_ids[first * size : stop * size], extras)

    def _refresh_lookup(self, state: _Request) -> None:
        """One probe per request and change: again only when it has more chunks than last time (S3)."""
        request, chain = state.request, state.chain
        if chain is None or getattr(request, "skip_reading_prefix_cache", False):
            return
        chunks = request.num_tokens // self._chunk_tokens
        if chunks == 0 or (state.lookup is not None and (chunks <= state.looked_up or not state.lookup.done())):
            return
        if state.lookup is not None:
            self._answer(state)
        first = len(chain)
        state.shared = False
        if (chunks - first) * self._chunk_tokens <= _HASH_HERE_TOKENS:
            self._extend_chain(state, request.num_tokens)
            keys: bytes | Callable[[], bytes] = chain.keys()
        else:
            # Nothing else touches the chain until the lookup is done.
            state.shared = True
            tokens = request.all_token_ids[first * self._chunk_tokens : chunks * self._chunk_tokens]
            extras = chunk_extras(request, self._rules, self._chunk_tokens, first, chunks)

            def hashed() -> bytes:
                chain.extend(tokens, extras)
                return chain.keys()

            keys = hashed
        state.lookup = self._lookup.probe(request.request_id, keys)
        state.asked_at = self._clock()
        self._idle_steps = 0
        state.looked_up, state.answered, state.leased = chunks, False, True

    def _answer(self, state: _Request) -> None:
        """Counts a lookup's answer, once."""
        if state.answered or state.lookup is None:
            return
        state.answered = True
        found, reason = state.lookup.leading(), state.lookup.reason()
        chain = state.chain
        if reason == "not_stored" and chain is not None and chain.key(found)[:_STORED_BYTES] in self._stored:
            reason = "evicted"
        outcome = "hit" if found else reason if reason in ("unreachable", "timeout") else "miss"
        self.tally.add("lookups", label=outcome)
        self.tally.add("lookup_tokens", state.looked_up * self._chunk_tokens)
        # When the answer came, not when the engine asked for it in a later step.
        at = state.lookup.answered_at()
        self.tally.sample("lookup_seconds", max(0.0, (self._clock() if at is None else at) - state.asked_at))
        state.record.update(asked=state.looked_up * self._chunk_tokens, found=found * self._chunk_tokens, reason=reason)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the local hit that Maru has; None: ask again (R1..R6)."""
        state = self._state(request)
        self._unmark(state)  # asked again: what was loaded is not there, or lost
        state.local_tokens = num_computed_tokens
        if state.chain is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        # At least one token is left to compute, and whole blocks only (R4).
        most = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        if most - num_computed_tokens < self._block_tokens:
            return 0, False
        self._refresh_lookup(state)
        if state.lookup is None:
            return 0, False
        if not state.lookup.done():
            if self._clock() - state.asked_at < self._timeout_s:
                self._asked_again = True
                return None, False
            if state.shared:
                state.chain = self._new_chain(request)
            state.lookup, state.shared = _TIMED_OUT, False
        self._answer(state)
        external = min(self._offer(state) * self._chunk_tokens, most) - num_computed_tokens
        if external < self._block_tokens:
            return 0, False
        if state.judged is None or state.judged[0] != external:
            # Once for a hit: a request that waits for room is asked again each step.
            state.judged = external, self.cost.worth(external)
        if not state.judged[1]:
            state.record["reason"] = "not_worth"
            return 0, False
        if self._other_loads(state, request.request_id, num_computed_tokens):
            return None, False
        return external, True

    def _other_loads(self, state: _Request, request_id: str, local_tokens: int) -> bool:
        """Whether another request is loading the next chunk, and it is still worth waiting for it (S4)."""
        assert state.chain is not None
        if not self._waits or not self._loading:
            return False
        if self._loading.get(state.chain.key(local_tokens // self._chunk_tokens), request_id) == request_id:
            return False
        now = self._clock()
        if state.waits_since is None:
            state.waits_since = now
            self.tally.add("load_waits")
        return now - state.waits_since < _WAIT_S

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
        if state.chain is None or state.lookup is None:
            return
        size = self._chunk_blocks
        first = state.local_tokens // self._block_tokens
        end = first + num_external_tokens // self._block_tokens
        chunks = range(first // size, -(-end // size))
        load = BlockLoad(request.request_id, state.chain.keys(chunks.start, chunks.stop), list(block_ids[first:end]), [], [])
        for c in chunks:
            low, high = max(first, c * size), min(end, (c + 1) * size)
            load.counts.append(high - low)
            load.skips.append(low - c * size)
        state.load, state.load_first, state.load_tokens, state.bad_from = load, chunks.start, num_external_tokens, None
        state.load_at = self._clock()
        state.waits_since = None
        for c in chunks:
            key = state.chain.key(c)
            if key not in self._loading:
                self._loading[key] = request.request_id
                state.marks.append(key)
        self._loads.append(load)
        left = num_external_tokens
        media = dict(state.lookup.media(chunks.start, chunks.stop))
        for i, (medium, count) in enumerate(sorted(media.items())):
            tokens = left if i == len(media) - 1 else min(left, count * self._chunk_tokens)
            left -= tokens
            self.tally.add("hit_tokens", tokens, medium)
            hits = state.record.setdefault("hit", {})
            hits[medium] = hits.get(medium, 0) + tokens

    def _unmark(self, state: _Request) -> None:
        for key in state.marks:
            self._loading.pop(key, None)
        state.marks.clear()

    # -- steps ------------------------------------------------------------

    def build_orders(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        table_of: Callable[[str], Sequence[int] | None],
    ) -> StepOrders:
        """Orders of one step. scheduled: tokens computed in it, by request; table_of: the whole
        block table of one of those requests, asked for only when it is needed."""
        orders = StepOrders(loads=self._loads, finishing=self._finishing)
        self._loads, self._finishing = [], []
        requests = self._requests
        for request_id in preempted:
            orders.preempted.append(request_id)
            state = requests.get(request_id)
            if state is not None:
                # It is asked for again from its first token, maybe much later.
                self._unmark(state)
                state.judged = state.waits_since = None
                if state.lookup is not None and state.lookup.done():
                    state.lookup, state.looked_up = None, 0
        if self._idle_steps > 0 and scheduled == self._scheduled:
            self._idle_steps -= 1
        else:
            self._look_through(scheduled, table_of, orders)
        if scheduled:
            self._time_step(orders, self._new_tokens)
        elif self._asked_again:
            # The engine has nothing to do but to ask again. Its thread keeps the interpreter lock
            # until it sleeps at the end of the step; a thread that hashes a prompt may have it now.
            time.sleep(0)
        self._asked_again = False
        if self._lookup.keep_due():
            self._lookup.keep([r for r, s in requests.items() if s.leased])
        return orders

    def _look_through(
        self, scheduled: Mapping[str, int], table_of: Callable[[str], Sequence[int] | None], orders: StepOrders
    ) -> None:
        """Orders what this step makes final, and finds how many equal ones will have nothing to order."""
        requests = self._requests
        most, total, left = 1, 0, _FAR
        for request_id, tokens in scheduled.items():
            total += tokens
            if tokens > most:
                most = tokens
            state = requests.get(request_id)
            if state is None:
                continue
            if not state.settled or state.leased:
                self._settle(state)
            if state.chain is None:
                continue
            final = state.request.num_computed_tokens + tokens
            if final >= state.next_store:
                self._store_order(state, final, table_of, orders)
            if state.next_store - final < left:
                left = state.next_store - final
        # The engine keeps its mapping, and some releases change it.
        self._scheduled = dict(scheduled)
        self._idle_steps = (left - 1) // most
        self._new_tokens = total - len(scheduled)

    def _time_step(self, orders: StepOrders, new_tokens: int) -> None:
        """Asks for the time of steps that say what computing costs."""
        self._step += 1
        if new_tokens >= _TIMED_TOKENS or self._step % _TIMED_EVERY == 0:
            if len(self._timed) >= 8:  # reports that never came
                self._timed.clear()
            orders.step = self._step
            self._timed[self._step] = (self._clock(), max(new_tokens, 1))

    def _store_order(
        self, state: _Request, final_tokens: int, table_of: Callable[[str], Sequence[int] | None], orders: StepOrders
    ) -> None:
        """Orders the chunks that are final after this step and that Maru does not have from this request (R16, VL-17)."""
        assert state.chain is not None
        if state.shared and state.lookup is not None and not state.lookup.done():
            return  # next step
        table = table_of(state.request.request_id)
        if table is None:
            return
        final_tokens = min(final_tokens, state.request.num_tokens, len(table) * self._block_tokens)
        first, end = state.known, final_tokens // self._chunk_tokens
        if end > first:
            self._extend_chain(state, final_tokens)
            self._know(state, end)
            size = self._chunk_blocks
            orders.stores.append(
                BlockStore(
                    state.request.request_id,
                    state.chain.keys(first, end),
                    state.chain.parents(first, end),
                    list(table[first * size : end * size]),
                )
            )
            state.stores += self._worker_count
            for chunk in range(first, end):
                self._stored[state.chain.key(chunk)[:_STORED_BYTES]] = None
            while len(self._stored) > _STORED_COUNT:
                self._stored.popitem(last=False)
            state.record["stored"] = state.record.get("stored", 0) + (end - first) * self._chunk_tokens

    def _know(self, state: _Request, chunks: int) -> None:
        state.known = chunks
        state.next_store = (chunks + 1) * self._chunk_tokens

    def _settle(self, state: _Request) -> None:
        """A request runs: what it needed of Maru is over."""
        request = state.request
        self._unmark(state)
        if state.leased:
            self._lookup.end(request.request_id)
            state.leased = False
            if state.lookup is not None and state.lookup.done():
                self._answer(state)
                if self._offer(state) > state.known:
                    self._know(state, self._offer(state))
        if state.settled:
            return
        state.settled = True
        prompt = request.num_tokens
        computed = prompt - int(request.num_computed_tokens)
        loaded = int(state.record.get("loaded", 0))
        self.tally.add("requests", label="bypass" if state.bypass else "hit" if loaded else "miss")
        for reason, tokens in self._misses(state, computed).items():
            self.tally.add("miss_tokens", tokens, reason)
            state.record.setdefault("miss", {})[reason] = tokens
        state.record.update(
            request=request.request_id,
            time=time.time(),
            prompt=prompt,
            local=max(0, prompt - computed - loaded),
        )
        if state.bypass:
            state.record["bypass"] = state.bypass
        self._write(state)

    def _misses(self, state: _Request, computed: int) -> dict[str, int]:
        """Why so many tokens of a prompt are computed; the counts add up to them."""
        request = state.request
        if computed <= 0:
            return {}
        if state.bypass:
            return {"bypass": computed}
        if getattr(request, "skip_reading_prefix_cache", False):
            return {"no_read": computed}
        # Behind the last whole chunk nothing can be stored; and of a whole prompt one block is left.
        most = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        reach = min(request.num_tokens // self._chunk_tokens * self._chunk_tokens, most)
        short = min(computed, request.num_tokens - reach)
        out = {"too_short": short} if short else {}
        rest = computed - short
        if rest:
            reason = str(state.record.get("reason") or "not_stored")
            failed = min(rest, int(state.record.get("failed", 0)))
            if failed:
                out["failed"] = failed
                rest -= failed
            if rest:
                out[reason] = out.get(reason, 0) + rest
        return out

    def _write(self, state: _Request) -> None:
        if self._journal is not None and state.record:
            # The journal's thread reads it later, while this request may go on.
            record = {k: dict(v) if isinstance(v, dict) else v for k, v in state.record.items()}
            if isinstance(record.get("prompt"), int):
                record["prefix"] = _prefix_digest(state.request)
            self._journal(record)

    # -- news -------------------------------------------------------------

    def update_output(
        self, recving: Collection[str], invalid_blocks: set[int], report: StepReport | None, failed: Collection[str] = ()
    ) -> None:
        """Takes the workers' news, before the engine acts on them.

        recving: requests whose load every worker has ended; failed: those of them whose
        load counts as failed as a whole.
        """
        now = 0.0
        if self._timed or recving:
            now = self._clock()
        if self._timed:
            if report is not None and report.step:
                begin = self._timed.pop(report.step, None)
                if begin is not None:
                    self.cost.step(begin[1], now - max(begin[0], self._last_output))
                    self._say_minimum()
            # A step that is timed begins behind the outputs of those before it. One that came
            # when none was timed is older than any that will be.
            self._last_output = now
        if invalid_blocks:
            # Workers end at different steps; what one of them lost is remembered until all have.
            for loading in self._requests.values():
                if loading.load is not None:
                    self._mark_bad(loading, loading.load, invalid_blocks)
        whole = set(failed) if failed else ()
        for request_id in recving:
            state = self._requests.get(request_id)
            if state is not None and state.load is not None:
                if request_id in whole:
                    state.bad_from = 0
                self._end_load(state, now, report)
        if report is None:
            return
        for request_id, count in report.stored.items():
            state = self._requests.get(request_id)
            if state is not None:
                state.stores -= count
            elif request_id in self._held:
                self._held[request_id] -= count
                if self._held[request_id] <= 0:
                    del self._held[request_id]

    @staticmethod
    def _mark_bad(state: _Request, load: BlockLoad, invalid_blocks: set[int]) -> None:
        at = 0
        for i, count in enumerate(load.counts):
            if not invalid_blocks.isdisjoint(load.blocks[at : at + count]):
                state.bad_from = i if state.bad_from is None else min(i, state.bad_from)
                return
            at += count

    def _end_load(self, state: _Request, now: float, report: StepReport | None) -> None:
        load, state.load = state.load, None
        assert load is not None
        seconds = now - state.load_at
        self.tally.sample("load_seconds", seconds)
        good = len(load.counts) if state.bad_from is None else state.bad_from
        tokens = sum(load.counts[:good]) * self._block_tokens
        lost = state.load_tokens - tokens
        record = state.record
        record["loaded"] = record.get("loaded", 0) + tokens
        record["load_ms"] = round(record.get("load_ms", 0) + 1e3 * seconds, 3)
        self.tally.add("loads", label="ok" if not lost else "failed")
        self.tally.add("loaded_tokens", tokens)
        self.tally.add("prefill_seconds_saved", tokens * self.cost.seconds_per_token)
        if not lost:
            self.cost.load(tokens, seconds)
            self._say_minimum()
            # A chunk that was loaded in part is whole in Maru all the same.
            self._know(state, max(state.known, state.load_first + good))
            return
        self.tally.add("load_failed_tokens", lost)
        record["failed"] = record.get("failed", 0) + lost
        if report is not None and load.request_id in report.load_codes:
            record["code"] = report.load_codes[load.request_id]
        state.usable = state.load_first + good if state.usable is None else min(state.usable, state.load_first + good)
        if state.known > state.usable:
            self._know(state, state.usable)

    def request_finished(self, request: Any) -> bool:
        """True: the blocks stay held until the worker reports the request as sent (R19)."""
        # A load that is ordered stays ordered: the engine holds its blocks until it is
        # reported, aborted or not (R11).
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False
        self._unmark(state)
        if state.leased:
            self._lookup.end(request.request_id)
        if not state.settled:
            state.record.update(request=request.request_id, time=time.time(), prompt=request.num_tokens, unscheduled=True)
        state.record["done"] = True
        self._write(state)
        if state.stores <= 0 or state.load is not None:
            # With a load under way its stores are of blocks that a preemption took, after
            # their copies; the engine holds the new blocks until the load is reported.
            return False
        self._held[request.request_id] = state.stores
        self._finishing.append(request.request_id)
        return True

    def stats(self) -> dict[str, Any] | None:
        """What was counted since the last call."""
        return self.tally.take()

    def _say_minimum(self) -> None:
        """The gauge of what was learned; whenever something was."""
        self.tally.gauge("min_hit_tokens", self.cost.min_hit_tokens)

    @property
    def live(self) -> int:
        """Requests with state here; 0 when the engine is idle."""
        return len(self._requests) + len(self._held)

    @property
    def kept(self) -> int:
        """Everything that is kept here, of any kind; bounded by the engine's live requests."""
        return self.live + len(self._loading) + len(self._loads) + len(self._finishing) + len(self._timed)


class _TimedOut:
    """The answer of a lookup that took too long."""

    def done(self) -> bool:
        return True

    def answered_at(self) -> float | None:
        return None

    def leading(self) -> int:
        return 0

    def media(self, start: int, stop: int) -> Mapping[str, int]:
        return {}

    def reason(self) -> str:
        return "timeout"


_TIMED_OUT = _TimedOut()


def _prefix_digest(request: Any) -> str:
    try:
        return hashlib.sha256(array("I", request.all_token_ids[:64]).tobytes()).hexdigest()[:16]
    except OverflowError:
        return ""
