"""KV tensors on a GPU, over the C ABI with a device of host memory (libmaru.so built with the tag cabifake)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import ctypes, mmap, random, sys
from maru.api import Client, ClientConfig
from maru.keys import Namespace, piece_bytes
from maru_vllm.geometry import TensorShape, plan_layers
from maru_vllm.messages import BlockLoad, BlockStore, StepOrders
from maru_vllm.store import ClientTransfers
from maru_vllm.worker import WorkerRole

run, layers, blocks, chunk = 4096, 3, 8, 2
piece = piece_bytes(run)
client = Client(ClientConfig(
    server_address="127.0.0.1:1", namespace=Namespace(weights="w", engine="vllm", run_bytes=(run,), piece_bytes=piece),
    instance_id="i", engine_id="e", value_bytes=run * layers * chunk, piece_bytes=piece, region_bytes=1 << 20, views=False,
))
memory = [mmap.mmap(-1, run * blocks) for _ in range(layers)]
for i, m in enumerate(memory):
    m[:] = random.Random(i).randbytes(run * blocks)
was = [bytes(m) for m in memory]
stream = [7]
t = ClientTransfers(client)
t.place("cuda:0", lambda: stream[0])
w = WorkerRole(t, chunk_blocks=chunk, submit_error=t.submit_error, already_code=t.already_code)
shapes = [
    TensorShape(f"l{i}", ctypes.addressof(ctypes.c_char.from_buffer(m)), (blocks, run // 4), (run // 4, 1), 4)
    for i, m in enumerate(memory)
]
w.register(plan_layers(shapes, blocks, run, block_first=True), blocks)
assert client.device_info()["name"] == "fake"

def until_idle():
    received = set()
    while w.busy:
        t.wait(0.1)
        received |= w.finished()[1]
    return received | w.finished()[1]

keys = b"".join(bytes([i]) * 28 + bytes(2) + b"\\xff\\xff" for i in (1, 2))
w.start_stores(StepOrders(stores=[BlockStore("a", keys, bytes(56), [5, 0, 3, 6])]))
until_idle()
assert w.counters.stored == 2, w.counters
for m in memory:
    m[:] = bytes(len(m))
# The second block of the first chunk, and the whole second one.
w.start_loads(StepOrders(loads=[BlockLoad("b", keys, [1, 2, 4], [1, 2], [1, 0])]))
assert until_idle() == {"b"} and w.bad_blocks() == set(), w.counters
for m, old in zip(memory, was):
    for new, of in ((1, 0), (2, 3), (4, 6)):
        assert m[new * run:(new + 1) * run] == old[of * run:(of + 1) * run]
    assert m[5 * run:6 * run] == bytes(run), "nothing else is written"

stream[0] = 0xCA  # a stream that is being captured takes no copies
w.start_loads(StepOrders(loads=[BlockLoad("c", keys, [1, 2, 4], [1, 2], [1, 0])]))
assert until_idle() == {"c"} and w.bad_blocks() == {1, 2, 4}, "computed instead, reported once"
w.start_stores(StepOrders(stores=[BlockStore("d", bytes([9]) * 28 + bytes(2) + b"\\xff\\xff", bytes(28), [1, 2])]))
until_idle()
assert w.counters.dropped == 1
w.shutdown(2.0)

# Without a place the same layout is the host's, and a device that is not there is an error.
try:
    other = ClientTransfers(Client(client.config))
    other.place("cuda:5", lambda: 0)
    other.register_layout(plan_layers(shapes, blocks, run, block_first=True), blocks)
except Exception as e:
    assert "GPU 5" in str(e), e
else:
    raise SystemExit("a device that is not there was taken")
finally:
    other.close(1.0)
print("ok")
"""


@pytest.mark.vllm  # it needs no engine, but more time than the fast lane has
def test_tensors_on_a_device(tmp_path: Path) -> None:
    go = shutil.which("go")
    assert go, "Go builds the library with its fake device; install it, as README says"
    lib = tmp_path / "libmaru_fake.so"
    subprocess.run(
        [go, "build", "-tags", "cabifake", "-buildmode=c-shared", "-o", lib, "./cmd/libmaru"],
        cwd=ROOT, check=True, env={**os.environ, "CGO_ENABLED": "1"},
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "MARU_LIBRARY": str(lib)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_host_tensors_have_no_stream(device: str) -> None:
    from array import array

    from maru_vllm.store import ClientTransfers

    calls: list[dict[str, object]] = []

    class Recorder:
        """A client that takes everything."""

        event_fd = os.open(os.devnull, os.O_RDONLY)

        def register_layout(self, layers: object, count: int, **kw: object) -> int:
            calls.append(kw)
            return 1

        def submit_store(self, keys: bytes, blocks: object, parents: bytes, **kw: object) -> int:
            calls.append(kw)
            return 1

        def submit_load(self, keys: bytes, blocks: object, offsets: object, **kw: object) -> int:
            calls.append(kw)
            return 2

    t = ClientTransfers.__new__(ClientTransfers)
    t.client, t._device, t._stream = Recorder(), {}, None  # type: ignore[assignment]
    if device != "cpu":
        t.place(device, iter([11, 12]).__next__)
    t.register_layout([], 0)
    t.submit_store(1, b"", b"", array("I"), array("Q"))
    t.submit_load(1, b"", array("I"), array("Q"), array("Q"))
    want = [{}, {}, {}] if device == "cpu" else [{"device": device}, {"stream": 11}, {"stream": 12}]
    assert calls == want, "the stream is asked for at each call"
