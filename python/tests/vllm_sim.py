"""vLLM's real Scheduler, the connector's two roles, and a model that is arithmetic.

KV of a token is a digest of every token before it (and the salt), so that a block
with anything else in it is found at the next step that reads it. The store copies
when a job *ends*, as late as a real one may, so that a block which was given to
somebody else too early is found too. Everything random comes from one seed.
"""

from __future__ import annotations

import os
import pickle
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maru_vllm.stats import merge

BLOCK = 16
CHUNK_BLOCKS = 4
CHUNK = BLOCK * CHUNK_BLOCKS
MISS, CORRUPT, ALREADY, BUSY = 29, 16, 30, 10


class Refused(Exception):
    code = BUSY


class Store:
    """What Maru has: the KV of each key, of every shard."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.objects: dict[bytes, list[Any]] = {}
        self.reachable = True

    def has(self, key: bytes, shards: int) -> bool:
        return all(key[:28] + bytes((s, 0)) + key[30:] in self.objects for s in range(shards))


class Probe:
    def __init__(self, lookup: SimLookup, keys: bytes) -> None:
        self.lookup, self.keys = lookup, keys
        self.left = lookup.store.rng.randrange(lookup.delay + 1)
        self.count = -1

    def done(self) -> bool:
        if self.count < 0:
            if self.left > 0:
                return False
            self.count = 0
            while self.lookup.store.reachable and 32 * self.count < len(self.keys):
                if not self.lookup.store.has(self.keys[32 * self.count : 32 * self.count + 32], self.lookup.shards):
                    break
                self.count += 1
        return True

    def answered_at(self) -> float | None:
        return None

    def leading(self) -> int:
        return self.count

    def media(self, start: int, stop: int) -> Mapping[str, int]:
        return {"cxl": max(0, min(stop, self.count) - start)}

    def reason(self) -> str:
        return "not_stored" if self.lookup.store.reachable else "unreachable"


class SimLookup:
    """Answers a few steps later."""

    def __init__(self, store: Store, shards: int, delay: int = 3) -> None:
        self.store, self.shards, self.delay = store, shards, delay
        self.open: list[Probe] = []
        self.leases: set[str] = set()
        self.count = 0

    def new_chain(self, salt: bytes, chunk_tokens: int) -> Any:
        from maru.keys import Namespace, root
        from maru_vllm.chain import PrefixChain

        return PrefixChain(root(Namespace(weights="sim@1", engine="vllm").id(), salt), chunk_tokens)

    def probe(self, request_id: str, keys: bytes | Callable[[], bytes]) -> Probe:
        p = Probe(self, keys if isinstance(keys, bytes) else keys())
        self.open.append(p)
        self.leases.add(request_id)
        self.count += 1
        return p

    def tick(self) -> None:
        for p in self.open:
            p.left -= 1
        self.open = [p for p in self.open if p.left > 0]

    def keep_due(self) -> bool:
        return True

    def keep(self, request_ids: Iterable[str]) -> None:
        assert set(request_ids) == self.leases, "leases without a request, or the other way round"

    def end(self, request_id: str) -> None:
        self.leases.discard(request_id)

    def close(self) -> None: ...


@dataclass
class _Job:
    kind: str
    keys: bytes
    blocks: list[int]
    ends: list[int]
    offsets: list[int]
    delay: int  # polls until it reads or writes blocks
    commit_delay: int  # polls from there to the end of a store
    content: list[Any] | None = None  # of a store, once it was read

    def items(self) -> list[tuple[bytes, list[int], int]]:
        count, ends = len(self.keys) // 32, self.ends
        offsets = self.offsets or [0] * count
        return [(self.keys[32 * i : 32 * i + 32], self.blocks[ends[i] : ends[i + 1]], offsets[i]) for i in range(count)]


class SimTransfers:
    """Jobs that end a few polls later. A load reads and writes then; a store has read its
    blocks some polls before, as late as copied() may say so."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.m, self.rank = machine, rank
        self.jobs: dict[int, _Job] = {}
        self.codes: dict[int, list[int]] = {}
        self.ended: list[int] = []  # not handed out
        self.event = False
        self.next = 0
        self.uncommitted = 0  # stores that were said to be copied, and were not ended

    def register_layout(self, layers: Any, block_count: int) -> int:
        return 1

    def _submit(self, kind: str, keys: bytes, blocks: array[int], ends: array[int], offsets: Sequence[int]) -> int:
        if self.m.rng.random() < self.m.refuse:
            raise Refused("queue full")
        self.next += 1
        delay = self.m.rng.randrange(self.m.delay + 1)
        job = _Job(kind, keys, list(blocks), [0, *ends], list(offsets), delay, self.m.rng.randrange(self.m.commit_delay + 1))
        self.jobs[self.next] = job
        return self.next

    def submit_store(self, layout: int, keys: bytes, parents: bytes, blocks: array[int], ends: array[int]) -> int:
        return self._submit("store", keys, blocks, ends, ())

    def submit_load(self, layout: int, keys: bytes, blocks: array[int], ends: array[int], offsets: array[int]) -> int:
        return self._submit("load", keys, blocks, ends, offsets)

    def ready(self) -> bool:
        """Time goes on here: nobody asks for jobs that have ended before this says so."""
        for number, job in list(self.jobs.items()):
            if job.delay > 0:
                job.delay -= 1
                continue
            if job.kind == "store" and job.content is None:
                job.content = [self._read(blocks) for _, blocks, _ in job.items()]
                self.event = True
            if job.kind == "store" and job.commit_delay > 0:
                job.commit_delay -= 1
                continue
            del self.jobs[number]
            if job.content is not None:
                self.codes[number] = [self._commit(key, c) for (key, _, _), c in zip(job.items(), job.content, strict=True)]
            else:
                self.codes[number] = [self._load(*item) for item in job.items()]
            self.ended.append(number)
            self.event = True
        return self.event

    def completed(self) -> list[int]:
        assert self.event, "the library was entered and nothing had happened"
        out, self.ended = self.ended[:3], self.ended[3:]
        self.event = bool(self.ended)
        return out

    def copied(self, number: int) -> bool:
        job = self.jobs.get(number)
        if job is None:
            return True  # ended, maybe not handed out
        self.uncommitted += job.content is not None
        return job.content is not None

    def _read(self, blocks: list[int]) -> list[Any]:
        content = [list(self.m.kv[self.rank][b]) for b in blocks]
        assert all(None not in c for c in content), "a block was stored that is not final"
        return content

    def _commit(self, key: bytes, content: list[Any]) -> int:
        if key in self.m.store.objects:
            return ALREADY
        if self.m.rng.random() < self.m.full:
            return 4
        if key[:28] in self.m.content:
            assert content == self.m.content[key[:28]], "one key, two contents: a block was stored too early or too late"
        self.m.content[key[:28]] = content
        self.m.store.objects[key] = content
        return 0

    def _load(self, key: bytes, blocks: list[int], offset: int) -> int:
        content = self.m.store.objects.get(key)
        lost = content is None or self.m.rng.random() < self.m.lose
        first = offset  # a block has one byte in this geometry
        for i, b in enumerate(blocks):
            self.m.kv[self.rank][b] = ["garbage"] * BLOCK if lost else list(content[first + i])  # type: ignore[index]
        return 0 if not lost else CORRUPT if content is not None else MISS

    def job_codes(self, job: int) -> Sequence[int]:
        return self.codes.pop(job)

    def wait(self, timeout_s: float) -> None: ...

    def close(self, timeout_s: float) -> None: ...


def engine_config(model: Path, *, async_scheduling: bool, blocks: int, seqs: int, batched: int, **extra: Any) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    settings = {"maru_cache_namespace": "sim@1", "maru_kv_chunk_tokens": CHUNK, "maru_run_dir": "off", "maru_min_hit_tokens": 0}
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        block_size=32,
        enable_prefix_caching=True,
        async_scheduling=async_scheduling,
        kv_transfer_config=KVTransferConfig(
            kv_connector="MaruKVConnector",
            kv_connector_module_path="maru_vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={**settings, **extra},
        ),
    ).create_engine_config()


def kv_cache_config(blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


class Machine:
    """Scheduler, roles, blocks and store. Faults: shares of jobs that are lost, refused, or find a full store."""

    def __init__(
        self,
        monkeypatch: Any,
        model: Path,
        seed: int,
        *,
        world: int = 1,
        replicas: int = 1,
        blocks: int = 40,
        async_scheduling: bool = False,
        store: Store | None = None,
        delay: int = 4,
        commit_delay: int = 3,
    ) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        import maru_vllm.connector as connector
        from maru_vllm.geometry import LayerRuns
        from maru_vllm.worker import Budgets, WorkerRole

        self.rng = random.Random(seed)
        self.store = store or Store(self.rng)
        self.lose = self.refuse = self.full = 0.0
        self.delay, self.commit_delay = delay, commit_delay
        self.content: dict[bytes, Any] = {}
        self.world = world
        shards = world // replicas
        self.lookup = SimLookup(self.store, shards)
        monkeypatch.setattr(connector, "open_scheduler", lambda *a: self.lookup)
        config = engine_config(model, async_scheduling=async_scheduling, blocks=blocks, seqs=4, batched=128)
        config.parallel_config.world_size = world
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.block_size = BLOCK
        kv_config = kv_cache_config(blocks)
        cls = AsyncScheduler if async_scheduling else Scheduler
        self.scheduler = cls(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.role = self.connector._scheduler
        self.role._worker_count = world
        self.kv: list[list[list[Any]]] = [[[None] * BLOCK for _ in range(blocks)] for _ in range(world)]
        self.workers = []
        self.transfers = [SimTransfers(self, rank) for rank in range(world)]
        for rank in range(world):
            w = WorkerRole(
                self.transfers[rank],
                chunk_blocks=CHUNK_BLOCKS,
                submit_error=Refused,
                already_code=ALREADY,
                budgets=Budgets(load_bytes=6, store_bytes=8, waiting_bytes=64),
                shard=rank // replicas,
                replica=rank % replicas,
                replicas=replicas,
            )
            w.register([LayerRuns(0, 1, (0,), 1)], blocks)
            self.workers.append(w)
        self.tokens: dict[str, list[int]] = {}
        self.salts: dict[str, str] = {}
        self.hashes: dict[str, list[int]] = {}
        self.pending: list[tuple[Any, Any]] = []
        self.async_scheduling = async_scheduling
        self.finished: dict[str, list[int]] = {}
        self.steps = 0
        self._counted: dict[str, Any] = {}
        self._recving: dict[str, int] = {}
        self._sending: dict[str, int] = {}
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    # -- requests ---------------------------------------------------------

    def add(self, request_id: str, tokens: Sequence[int], *, max_tokens: int = 4, salt: str = "", **kw: Any) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **kw.pop("params", {}))
        r = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=params,
            pooling_params=None,
            cache_salt=salt or None,
            block_hasher=self._hasher,
            **kw,
        )
        self.tokens[request_id], self.salts[request_id] = list(tokens), salt
        self.hashes[request_id] = []
        self.scheduler.add_request(r)
        return r

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def expected(self, request_id: str, n: int) -> list[int]:
        """The KV of a request's first n tokens."""
        known, tokens = self.hashes[request_id], self.tokens[request_id]
        while len(known) < n:
            before = known[-1] if known else hash(("salt", self.salts[request_id]))
            known.append(hash((before, tokens[len(known)])))
        return known[:n]

    # -- steps ------------------------------------------------------------

    def step(self) -> None:
        """One step of the engine; with async scheduling the outputs of the one before are taken after it."""
        self.steps += 1
        output = self.scheduler.schedule()
        result = self._execute(output)
        self.pending.append((output, result))
        while len(self.pending) > (1 if self.async_scheduling else 0):
            self._take(*self.pending.pop(0))
        self.lookup.tick()

    def drain(self) -> None:
        while self.pending:
            self._take(*self.pending.pop(0))

    def _take(self, output: Any, result: Any) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self._counted = merge(self._counted, outputs.scheduler_stats.kv_connector_stats)
            for o in outputs.outputs:
                self.finished.setdefault(o.request_id, []).extend(o.new_token_ids)

    def _execute(self, output: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from maru_vllm.connector import _WorkerMetadata

        orders = pickle.loads(pickle.dumps(output.kv_connector_metadata)).orders
        for w in self.workers:
            w.before_overwrite(orders)
        starts = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens))
        ids = list(output.num_scheduled_tokens)
        sampled = [self._forward(r, starts[r], output.num_scheduled_tokens[r]) for r in ids]
        recving, sending, bad, metas = set(), set(), set(), []
        for w in self.workers:
            w.start_loads(orders)
            w.start_stores(orders)
            sent, received = w.finished()
            for r in received:
                self._recving[r] = self._recving.get(r, 0) + 1
                if self._recving[r] == self.world:
                    recving.add(r)
                    del self._recving[r]
            for r in sent:
                self._sending[r] = self._sending.get(r, 0) + 1
                if self._sending[r] == self.world:
                    sending.add(r)
                    del self._sending[r]
            bad |= w.bad_blocks()
            report = w.report(orders.step)
            if report is not None:
                metas.append(_WorkerMetadata(report))
        meta = None
        for m in metas:
            meta = m if meta is None else meta.aggregate(m)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_sending=sending or None,
                finished_recving=recving or None,
                invalid_block_ids=bad,
                kv_connector_worker_meta=meta,
            ),
        )

    def _forward(self, request_id: str, start: int, n: int) -> list[int]:
        """Reads the KV of all tokens before, writes that of n tokens; samples when there is nothing left to compute."""
        table = list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])
        want = self.expected(request_id, start + n)
        for kv in self.kv:
            have = [kv[table[i // BLOCK]][i % BLOCK] for i in range(start)]
            assert have == want[:start], (
                f"{request_id}: wrong KV from token {next(i for i in range(start) if have[i] != want[i])} of {start} "
                f"at step {self.steps}"
            )
            for i in range(start, start + n):
                kv[table[i // BLOCK]][i % BLOCK] = want[i]
        # As the model runner: by what the scheduler knows. Of an output that it drops (a
        # reset with steps under way) the token is known here and sampled again.
        request = self.scheduler.requests[request_id]
        known, ahead = request.num_tokens, request.num_output_placeholders
        if start + n != known + ahead - 1 if self.async_scheduling else start + n != known:
            return []
        token = 3 + abs(want[-1]) % 500
        if start + n == len(self.tokens[request_id]):
            self.tokens[request_id].append(token)
        return [token]

    def run(self, limit: int = 3000) -> None:
        """Steps until nothing is left; fails when that does not happen."""
        for _ in range(limit):
            self.step()
            if not self.scheduler.has_requests() and not any(w.busy for w in self.workers):
                break
        else:
            states = {r: str(q.status) for r, q in self.scheduler.requests.items()}
            raise AssertionError(f"not done after {limit} steps: {states}")
        self.drain()
        self.step()
        self.drain()

    def check_idle(self) -> None:
        """Nothing is left anywhere."""
        assert not self.scheduler.requests and self.role.live == 0 and self.role.kept == 0
        assert not self.lookup.leases
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        for w in self.workers:
            assert not w._storing and not w._store_jobs and not w._finishing and w._store_bytes == 0 and w._load_bytes == 0
            assert w._waiting_bytes == 0

    def counters(self) -> dict[str, float]:
        """What the connector counted since the last call, as the engine got it."""
        counted, self._counted = self._counted, {}
        return dict(merge(counted, self.role.stats() or {})["counters"])


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(tokens)]
