"""The Python side of ``maru bench vllm``: the connector's roles, without an engine.

It is a process that obeys, as data.py. What is measured is the code that an engine
calls: the scheduler role's orders of a step, and the worker role's loads and stores
of KV tensors with a real model's geometry in CPU memory, beside memcpy of the same
bytes. Times are nanoseconds.
"""

from __future__ import annotations

import ctypes
import mmap
import pickle
import random
import select
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from maru import _lib
from maru.api import Blocks, Client, ClientConfig, Code, Layer
from maru.errors import MaruError
from maru.keys import Namespace, engine_page_bytes, piece_bytes, root
from maru_vllm.chain import Hasher, PrefixChain, hash_chunks, library_hasher
from maru_vllm.geometry import LayerRuns
from maru_vllm.messages import BlockLoad, BlockStore, StepOrders
from maru_vllm.scheduler import SchedulerRole
from maru_vllm.worker import Budgets, WorkerRole

_now = time.perf_counter_ns
_BLOCK_TOKENS = 16
_CHUNK_BLOCKS = 16


class _Nothing:
    """A lookup's answer: nothing is stored."""

    def done(self) -> bool:
        return True

    def answered_at(self) -> float | None:
        return None

    def leading(self) -> int:
        return 0

    def media(self, start: int, stop: int) -> Mapping[str, int]:
        return {}

    def reason(self) -> str:
        return "not_stored"


class _Lookup:
    def __init__(self, hasher: Hasher) -> None:
        self.root = root(Namespace(weights="bench", engine="vllm").id())
        self.hasher = hasher

    def new_chain(self, salt: bytes, chunk_tokens: int) -> PrefixChain:
        return PrefixChain(self.root, chunk_tokens, self.hasher)

    def probe(self, request_id: str, keys: bytes | Callable[[], bytes]) -> _Nothing:
        if not isinstance(keys, bytes):
            keys()
        return _Nothing()

    def keep_due(self) -> bool:
        return False

    def keep(self, request_ids: Iterable[str]) -> None: ...

    def end(self, request_id: str) -> None: ...


class Steps:
    """A scheduler role with running requests of many chunks, one token a step each."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.role = SchedulerRole(
            _Lookup(library_hasher(_lib.load())), block_tokens=_BLOCK_TOKENS, chunk_blocks=_CHUNK_BLOCKS, min_hit_tokens=0
        )
        self.chunk_tokens = _BLOCK_TOKENS * _CHUNK_BLOCKS
        self.requests: list[Any] = []
        self.table = list(range((order["chunks"] + 8) * _CHUNK_BLOCKS))
        tokens = order["chunks"] * self.chunk_tokens
        self.served = 0
        for i in range(order["running"]):
            # They are at different places of their chunks, as real ones are.
            self.requests.append(self._admit(f"r{i}", tokens + i * self.chunk_tokens // order["running"]))

    def _admit(self, name: str, tokens: int) -> Any:
        r = SimpleNamespace(request_id=name, all_token_ids=list(range(tokens)), num_computed_tokens=0)
        r.num_tokens = tokens
        self.role.on_new_request(r)
        self.role.get_num_new_matched_tokens(r, 0)
        self._orders({name: tokens})
        r.num_computed_tokens = tokens
        return r

    def _orders(self, scheduled: dict[str, int]) -> StepOrders:
        return self.role.build_orders(scheduled, (), lambda name: self.table)

    def serve(self, count: int) -> None:
        """Short requests come and go, so that whatever grows with them has grown."""
        for _ in range(count):
            self.served += 1
            r = self._admit(f"s{self.served}", self.chunk_tokens + 1)
            self.role.request_finished(r)
            for name in list(self.role._held):
                del self.role._held[name]
            self.role.stats()

    def measure(self, steps: int) -> dict[str, list[int]]:
        """A step: orders, pickled as the engine does, the workers' news, counts."""
        out: dict[str, list[int]] = {"step": [], "pickle": []}
        for _ in range(steps):
            for r in self.requests:
                r.all_token_ids.append(7)
                r.num_tokens += 1
            scheduled = {r.request_id: 1 for r in self.requests}
            began = _now()
            orders = self._orders(scheduled)
            self.role.update_output((), set(), None)
            self.role.stats()
            ordered = _now()
            pickle.dumps(orders)
            out["step"].append(ordered - began)
            out["pickle"].append(_now() - ordered)
            for r in self.requests:
                r.num_computed_tokens += 1
                if r.num_tokens // self.chunk_tokens + 1 >= len(self.table) // _CHUNK_BLOCKS:
                    raise RuntimeError("the bench's requests have outgrown their tables")
        return out

    def hash(self, tokens: int) -> dict[str, list[int]]:
        """Hashing a prompt, in Python and in the library."""
        ids = list(range(tokens))
        out: dict[str, list[int]] = {}
        for name, hasher in (("python", hash_chunks), ("library", library_hasher(_lib.load()))):
            for _ in range(5):
                chain = PrefixChain(bytes(32), self.chunk_tokens, hasher)
                began = _now()
                chain.extend(ids)
                out.setdefault(name, []).append(_now() - began)
        return out

    def close(self) -> None:
        """Nothing is open."""


def _memcpy() -> Callable[[int, int, int], Any]:
    function = ctypes.CDLL(None).memcpy
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return function


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _Transfers:
    """The worker's way to the library, as maru_vllm.store has it; no engine is needed for it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.poll = select.poll()
        self.poll.register(client.event_fd, select.POLLIN)

    def register_layout(self, layers: Any, block_count: int) -> int:
        rows = [Layer(r.base, r.block_stride, r.run_bytes, tuple(r.offsets)) for r in layers]
        return self.client.register_layout(rows, block_count)

    def submit_store(self, layout: int, keys: bytes, parents: bytes, blocks: Any, ends: Any) -> int:
        return self.client.submit_store(keys, Blocks(layout, blocks, ends), parents)

    def submit_load(self, layout: int, keys: bytes, blocks: Any, ends: Any, offsets: Any) -> int:
        return self.client.submit_load(keys, Blocks(layout, blocks, ends), offsets)

    def ready(self) -> bool:
        return bool(self.poll.poll(0))

    def completed(self) -> list[int]:
        return self.client.completed()

    def copied(self, job: int) -> bool:
        return self.client.job_copied(job)

    def job_codes(self, job: int) -> Any:
        return self.client.job_result(job)

    def wait(self, timeout_s: float) -> None:
        self.poll.poll(timeout_s * 1000)

    def close(self, timeout_s: float) -> None:
        self.client.close(timeout_s)


class Tensors:
    """KV tensors of one model, one tensor a layer, and a worker role that stores and loads its blocks.

    The reference copies whole tensors with memcpy to and from memory of the pool's size.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.layers: int = order["layers"]
        self.run: int = order["run_bytes"]
        self.chunks: int = order["chunks"]
        blocks = self.chunks * _CHUNK_BLOCKS
        self.value = _CHUNK_BLOCKS * self.layers * self.run
        piece = piece_bytes(self.run)
        self.client = Client(
            ClientConfig(
                server_address=order["server"],
                namespace=Namespace(weights="bench", engine="vllm", run_bytes=(self.run,), piece_bytes=piece),
                instance_id="bench-vllm",
                value_bytes=self.value,
                piece_bytes=piece,
                checksums=order["checksums"],
                copy_threads=1,
                region_bytes=self.chunks * engine_page_bytes(self.value, piece),
                auto_expand=False,
                views=False,
                rpc_timeout_ms=30_000,
            )
        )
        self.memory = [mmap.mmap(-1, blocks * self.run, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(self.layers)]
        pattern = random.Random(1).randbytes((1 << 20) - 1)
        for i, m in enumerate(self.memory):
            m[:] = (pattern[i:] * (len(m) // (len(pattern) - i) + 1))[: len(m)]
        self.arena = mmap.mmap(-1, self.chunks * self.value)
        for at in range(0, len(self.arena), 4096):
            self.arena[at] = 1
        self.worker = WorkerRole(
            _Transfers(self.client),
            chunk_blocks=_CHUNK_BLOCKS,
            submit_error=MaruError,
            already_code=int(Code.ALREADY_STORED),
            budgets=Budgets(4 << 30, 4 << 30, 16 << 30),
        )
        self.worker.register([LayerRuns(_address(m), self.run, (0,), self.run) for m in self.memory], blocks)
        # Scattered, as an engine's blocks are after a while.
        self.blocks = list(range(blocks))
        random.Random(2).shuffle(self.blocks)
        self.round = 0
        self.memcpy = _memcpy()

    def _copy(self, store: bool) -> int:
        """The same bytes, tensor by tensor, each in one piece: what no copy of scattered blocks can beat."""
        copy, size, arena = self.memcpy, len(self.memory[0]), _address(self.arena)
        pairs = [(arena + i * size, _address(m)) for i, m in enumerate(self.memory)]
        began = _now()
        for object_, tensor in pairs:
            if store:
                copy(object_, tensor, size)
            else:
                copy(tensor, object_, size)
        return _now() - began

    def _until_done(self) -> set[str]:
        received: set[str] = set()
        while self.worker.busy:
            self.worker._transfers.wait(0.1)
            received |= self.worker.finished()[1]
        return received | self.worker.finished()[1]

    def measure(self) -> dict[str, list[int]]:
        """One round: stores all chunks, loads them into the same blocks, each beside memcpy."""
        self.round += 1
        keys = b"".join(self.round.to_bytes(4, "little") + i.to_bytes(4, "little") + bytes(24) for i in range(self.chunks))
        out: dict[str, list[int]] = {}
        out["store memcpy"] = [self._copy(True)]
        before = self.worker.counters.stored
        began = _now()
        self.worker.start_stores(StepOrders(stores=[BlockStore("s", keys, bytes(28 * self.chunks), self.blocks)]))
        out["store submit"] = [_now() - began]
        self._until_done()
        out["store"] = [_now() - began]
        if self.worker.counters.stored - before != self.chunks:
            raise RuntimeError(f"not everything was stored: {self.worker.counters}")
        part = min(1 << 20, len(self.memory[-1]))
        want = self.memory[-1][:part]
        out["load memcpy"] = [self._copy(False)]
        self.memory[-1][:part] = bytes(part)
        began = _now()
        load = BlockLoad("l", keys, self.blocks, [_CHUNK_BLOCKS] * self.chunks, [0] * self.chunks)
        self.worker.start_loads(StepOrders(loads=[load]))
        out["load submit"] = [_now() - began]
        received = self._until_done()
        out["load"] = [_now() - began]
        if received != {"l"} or self.worker.bad_blocks() or self.memory[-1][:part] != want:
            raise RuntimeError(f"not everything was loaded: {self.worker.counters}")
        self.worker.report()
        self.client.delete(keys, timeout=30.0)
        end = time.monotonic() + 30.0
        while self.client.stats()["pages_free"] < self.chunks:
            if time.monotonic() > end:
                raise RuntimeError("deleted pages do not come back")
            time.sleep(0.005)
        return out

    def close(self) -> None:
        """Ends the session."""
        self.worker.shutdown(5.0)


def _open(order: dict[str, Any]) -> tuple[Steps | Tensors, Any]:
    if order["do"] == "open steps":
        return Steps(order), None
    if order["do"] == "open tensors":
        return Tensors(order), None
    raise ValueError(f"order {order!r} makes no sense")


def _do(state: Steps | Tensors | None, order: dict[str, Any]) -> Any:
    what = order["do"]
    if isinstance(state, Steps):
        if what == "serve":
            state.serve(order["count"])
            return None
        if what == "steps":
            return state.measure(order["count"])
        if what == "hash":
            return state.hash(order["tokens"])
    elif what == "measure" and isinstance(state, Tensors):
        return state.measure()
    raise ValueError(f"order {order!r} makes no sense now")


def main() -> int:
    """Obeys orders until there are no more."""
    # Behind what is installed: only this package is looked for there.
    sys.path.append(str(Path(__file__).parents[1]))
    from bench.orders import obey

    return obey(_open, _do)


if __name__ == "__main__":
    sys.exit(main())
