"""The Python side of ``maru bench data``: transfers through the C ABI beside memcpy.

It is a process that obeys. An order is one line of JSON, the answer another; the
program that started it decides what is measured, in which order, and makes the
table. Times are nanoseconds of single calls.

Transfers: a batch of objects goes from private anonymous memory, as an engine's
tensors are, into pages of a pool and back. The reference copies the same bytes with
one ``memcpy`` of the C library, from the same page-aligned source to page-aligned
shared memory of the pool's size, so that both walk through as much memory. Memory
of both is touched before. Each timed copy has its reference right before it.

Keys: a batch of packed keys, or of text keys, is probed.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maru import MaruConfig, MaruHandler
from maru.api import Client, ClientConfig, Code, Runs, Verdict
from maru.keys import KEY_BYTES, Namespace, engine_page_bytes, key_of, pack_opaque, piece_bytes

_now = time.perf_counter_ns

# Deleted pages come back with the next events of the server.
_RECLAIM_TIMEOUT_S = 30.0


def _memcpy() -> Callable[[int, int, int], Any]:
    function = ctypes.CDLL(None).memcpy
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return function


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _private(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _want(codes: Any, what: str) -> None:
    for i, code in enumerate(codes):
        if code != Code.OK:
            raise RuntimeError(f"{what} of object {i}: {Code(code).name}")


class Transfers:
    """Batches of equal objects in one pool. One thread copies.

    ``batches`` batches are stored, then loaded; then one batch more, object by
    object. The pool has room for exactly that.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.size: int = order["object_bytes"]
        self.batch: int = order["batch"]
        self.batches: int = order["batches"]
        self.pages = self.batch * (self.batches + 1)
        piece = piece_bytes(self.size)
        pool = self.pages * engine_page_bytes(self.size, piece)
        config = ClientConfig(
            server_address=order["server"],
            namespace=Namespace(weights="bench", engine="bench", run_bytes=(self.size,), piece_bytes=piece),
            instance_id="bench-python",
            value_bytes=self.size,
            piece_bytes=piece,
            checksums=order["checksums"],
            copy_threads=1,
            auto_expand=False,
            views=False,
            rpc_timeout_ms=30_000,
        )
        if order["medium"] == "cpu":
            config.cpu_bytes = pool
        else:
            config.region_bytes = pool
        self.memcpy = _memcpy()
        whole = self.size * self.batch
        self.source, self.target = _private(whole), _private(whole)
        self.arena = mmap.mmap(-1, whole * self.batches)
        pattern = random.Random(1).randbytes(min(whole, 1 << 20) - 1)
        self.source[:] = (pattern * (whole // len(pattern) + 1))[:whole]
        self.target[:] = bytes(whole)
        for i in range(self.batches):
            self.arena[i * whole : (i + 1) * whole] = bytes(whole)
        self.from_source = self._runs(self.source)
        self.to_target = self._runs(self.target)
        self.round = 0
        self.client = Client(config)

    def _runs(self, memory: mmap.mmap) -> tuple[Runs, list[Runs]]:
        view = memoryview(memory)
        parts = [view[i * self.size : (i + 1) * self.size] for i in range(self.batch)]
        return Runs.of(parts, writable=True), [Runs.of([p], writable=True) for p in parts]

    def _keys(self, batch: int) -> bytes:
        out = []
        for i in range(self.batch):
            out.append(key_of(random.Random(f"{self.round}/{batch}/{i}").randbytes(32)))
        return b"".join(out)

    def measure(self) -> dict[str, list[int]]:
        """One round: stores and loads every batch, then single objects."""
        self.round += 1
        keys = [self._keys(b) for b in range(self.batches + 1)]
        out: dict[str, list[int]] = {}
        copy, size, whole = self.memcpy, self.size, self.size * self.batch
        source, target, arena = _address(self.source), _address(self.target), _address(self.arena)

        def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
            began = _now()
            result = call(*arguments)
            out.setdefault(name, []).append(_now() - began)
            return result

        for b in range(self.batches):
            timed("store memcpy", copy, arena + b * whole, source, whole)
            _want(timed("store", self.client.store, keys[b], self.from_source[0]), "store")
        for b in range(self.batches):
            timed("load memcpy", copy, target, arena + b * whole, whole)
            self.target[:4096] = bytes(4096)
            _want(timed("load", self.client.load, keys[b], self.to_target[0]), "load")
            if b in (0, self.batches - 1) and self.target[:] != self.source[:]:
                raise RuntimeError(f"batch {b} came back with other bytes")
        for i in range(self.batch):
            key, at = keys[-1][i * KEY_BYTES : (i + 1) * KEY_BYTES], i * size
            timed("store one memcpy", copy, arena + at, source + at, size)
            _want(timed("store one", self.client.store, key, self.from_source[1][i]), "single store")
        for i in range(self.batch):
            key, at = keys[-1][i * KEY_BYTES : (i + 1) * KEY_BYTES], i * size
            timed("load one memcpy", copy, target + at, arena + at, size)
            _want(timed("load one", self.client.load, key, self.to_target[1][i]), "single load")
        self._empty(keys)
        return out

    def _empty(self, keys: list[bytes]) -> None:
        for packed in keys:
            _want(self.client.delete(packed, timeout=30.0), "delete")
        end = time.monotonic() + _RECLAIM_TIMEOUT_S
        while self.client.stats()["pages_free"] < self.pages:
            if time.monotonic() > end:
                raise RuntimeError(f"deleted pages do not come back: {self.client.stats()}")
            time.sleep(0.005)

    def close(self) -> None:
        """Ends the session and gives the memory back."""
        self.client.close()


class Keys:
    """Values under text keys, to be probed by text and by packed keys."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.names = [f"bench/{i:06d}/key-of-usual-length" for i in range(order["count"])]
        self.packed = pack_opaque(self.names)
        self.handler = MaruHandler(
            MaruConfig(
                server_url=order["server"],
                instance_id="bench-handler",
                pool_size=4 << 20,
                chunk_size_bytes=1024,
            )
        )
        if not self.handler.connect():
            raise RuntimeError("MaruHandler does not connect")
        if not all(self.handler.batch_store(self.names, [name.encode() for name in self.names])):
            raise RuntimeError("MaruHandler does not store")
        self.client = Client(
            ClientConfig(
                server_address=order["server"],
                opaque=True,
                page_bytes=1024,
                instance_id="bench-keys",
                region_bytes=64 << 10,
                rpc_timeout_ms=30_000,
            )
        )

    def probe(self, form: str, rounds: int) -> list[int]:
        """Times probes of all keys, as packed keys or as text."""
        out = []
        for _ in range(rounds):
            if form == "packed":
                began = _now()
                leading, _verdicts = self.client.probe(self.packed)
                out.append(_now() - began)
            else:
                began = _now()
                found = self.handler.batch_exists(self.names)
                out.append(_now() - began)
                leading = len(self.names) if all(found) else found.index(False)
            if leading != len(self.names):
                raise RuntimeError(f"{leading} of {len(self.names)} keys hit, then {Verdict.MISS.name}")
        return out

    def close(self) -> None:
        """Ends both sessions."""
        self.client.close()
        self.handler.close()


def _open(order: dict[str, Any]) -> tuple[Transfers | Keys, Any]:
    if order["do"] == "open transfers":
        return Transfers(order), None
    if order["do"] == "open keys":
        keys = Keys(order)
        return keys, keys.packed.hex()
    raise ValueError(f"order {order!r} makes no sense")


def _do(state: Transfers | Keys | None, order: dict[str, Any]) -> Any:
    if order["do"] == "measure" and isinstance(state, Transfers):
        return state.measure()
    if order["do"] == "probe" and isinstance(state, Keys):
        return state.probe(order["form"], order["rounds"])
    raise ValueError(f"order {order!r} makes no sense now")


def main() -> int:
    """Obeys orders until there are no more."""
    # Behind what is installed: only this package is looked for there.
    sys.path.append(str(Path(__file__).parents[1]))
    from bench.orders import obey

    return obey(_open, _do)


if __name__ == "__main__":
    sys.exit(main())
