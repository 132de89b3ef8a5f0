#!/usr/bin/env python3
"""Maru's copies between a GPU and its pools, on a real GPU: bytes, checksums, order,
speed, and what goes wrong. Needs torch with CUDA; run by test/gpu/run.sh.

    copy_check.py --maru PATH/TO/maru [STEP...]

Steps: bytes, order, capture, processes, kill, bounce, reopen, submit, speed, busy.
Without a step all run. Each prints PASS or FAIL; the exit code is 1 after a FAIL.
--device cpu runs what needs no GPU, to try the script itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from maru.api import Blocks, Client, ClientConfig, Code, Layer
from maru.errors import MaruError, UnsupportedError
from maru.keys import Namespace

ARGS: argparse.Namespace
GIB = 1 << 30


def on_gpu() -> bool:
    return ARGS.device != "cpu"


def sync() -> None:
    if on_gpu():
        torch.cuda.synchronize()


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream if on_gpu() else 0


def keys(tag: str, n: int) -> bytes:
    return b"".join(hashlib.sha256(f"{tag}/{i}".encode()).digest()[:28] + bytes(4) for i in range(n))


class Up:
    """`maru up`, for the time of a with statement."""

    def __init__(self, cxl: str = "0", cpu: str = "24G", directory: str = "") -> None:
        self.command = [ARGS.maru, "up", "--json", "--listen", "127.0.0.1:0", "--cxl-size", cxl, "--cpu-size", cpu]
        if directory:
            self.command += ["--dir", directory]

    def __enter__(self) -> dict[str, Any]:
        self.log = open(Path(ARGS.out) / "up.log", "ab")
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=self.log)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"maru up ended with {self.process.wait()}; see {self.log.name}")
        info: dict[str, Any] = json.loads(line)
        return info

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


class Cache:
    """A KV cache: a tensor a layer, of blocks of one run or, with split, of two."""

    def __init__(self, layers: int, blocks: int, run: int, split: bool = False, fill: bool = True) -> None:
        self.run, self.blocks = run, blocks
        shape = (2, blocks, run) if split else (blocks, run)
        self.tensors = []
        for _ in range(layers):
            t = torch.empty(shape, dtype=torch.uint8, device=ARGS.device)
            self.tensors.append(t.random_(0, 256) if fill else t.zero_())
        sync()
        offsets = (0, blocks * run) if split else (0,)
        self.layers = [Layer(t.data_ptr(), run, run, offsets) for t in self.tensors]
        self.block_bytes = layers * len(offsets) * run
        self.split = split

    def register(self, c: Client) -> int:
        return c.register_layout(self.layers, self.blocks, device=ARGS.device if on_gpu() else None)

    def object(self, blocks: list[int]) -> torch.Tensor:
        """Blocks as they lie in an object: [block][layer][run]."""
        index = torch.tensor(blocks, device=ARGS.device)
        parts = [t[:, index].transpose(0, 1) if self.split else t[index].unsqueeze(1) for t in self.tensors]
        return torch.stack(parts, dim=1).reshape(-1)


def open_client(server: str, value_bytes: int, piece: int, **more: Any) -> Client:
    ns = Namespace(weights="copy-check", engine="test", piece_bytes=piece, extra={"value": str(value_bytes)})
    return Client(ClientConfig(server_address=server, namespace=ns, value_bytes=value_bytes, piece_bytes=piece, **more))


def wait_registered(c: Client, size: int) -> float:
    began = time.monotonic()
    if not on_gpu():
        return 0.0
    while (c.device_info() or {})["registered_bytes"] < size:
        if time.monotonic() - began > 60:
            raise RuntimeError(f"not registered: {c.device_info()}")
        time.sleep(0.005)
    return time.monotonic() - began


def check(ok: bool, what: str) -> None:
    if not ok:
        raise AssertionError(what)


def all_ok(codes: Any, what: str) -> None:
    check(all(c == Code.OK for c in codes), f"{what}: codes {sorted(set(codes))}")


def finish(c: Client, job: int, limit: float = 60.0) -> Any:
    end = time.monotonic() + limit
    poll = select.poll()
    poll.register(c.event_fd, select.POLLIN)
    while (codes := c.job_result(job)) is None:
        check(time.monotonic() < end, "a job does not end")
        poll.poll(1)
    c.completed()
    return codes


def host_equal(c: Client, key: bytes, want: torch.Tensor) -> None:
    """Loads an object into host memory, which verifies the GPU's checksums, and compares."""
    from maru.api import Runs

    data = bytearray(want.numel())
    all_ok(c.load(key, Runs.of([data], writable=True)), "load on the host")
    check(torch.equal(torch.frombuffer(data, dtype=torch.uint8), want.cpu()), "bytes on the host differ")


def step_bytes() -> str:
    """Every run and piece size, both media, both ways, parts, checksums computed on one side and checked on the other."""
    cases = [(16 << 10, 16 << 10), (64 << 10, 64 << 10), (256 << 10, 64 << 10), (2 << 20, 64 << 10), (2 << 20, 2 << 20), (4096, 64 << 10),
             (1536, 512), (48, 768), (8 << 10, 8 << 10), (208, 832), (12 << 10, 36 << 10), (1040, 4160)]  # fmt: skip
    n = bounced = 0
    with Up(cxl="2G") as up:
        for medium in ("cpu", "cxl"):
            for run, piece in cases:
                began = time.monotonic()
                for split in (False, True) if run < (1 << 20) else (False,):
                    layers, per = 3, 10 if run < (128 << 10) else 7
                    src, dst = Cache(layers, 2 * per, run, split), Cache(layers, 2 * per, run, split, fill=False)
                    blocks = [int(b) for b in torch.randperm(2 * per)[:per]]
                    value = per * src.block_bytes
                    size = max(4 << 20, 4 * value + (64 << 10))
                    memory = {"cpu_bytes": size} if medium == "cpu" else {"region_bytes": size, "cxl_bytes": size}
                    for way in ("auto", "staged", "direct"):
                        if way != "auto" and (split or run < (64 << 10)):
                            continue
                        bounced += with_client(up["server"], value, piece, memory, size, way, src, dst, blocks)
                        n += 1
                print(f"  {medium}, runs of {run}, pieces of {piece}: right ({time.monotonic() - began:.1f} s)", flush=True)
    check(not on_gpu() or bounced > 0, "no client copied before its memory was registered")
    return f"{n} clients, {bounced} of them through the bounce buffer first"


def with_client(server: str, value: int, piece: int, memory: dict[str, int], size: int, way: str, src: Cache, dst: Cache, blocks: list[int]) -> bool:
    c = open_client(server, value, piece, device_copy=way, **memory)
    bounced = False
    try:
        what = f"run {src.run}, piece {piece}, split {src.split}, {way}, {memory}"
        a, b = src.register(c), dst.register(c)
        want = src.object(blocks)
        tag = f"{time.time_ns()}"
        # At once: through the bounce buffer. Later: registered.
        for i in range(2):
            key = keys(f"{tag}/{i}", 1)
            all_ok(c.store(key, Blocks.of(a, [blocks]), stream=stream()), f"store, {what}")
            host_equal(c, key, want)
            for t in dst.tensors:
                t.zero_()
            all_ok(c.load(key, Blocks.of(b, [blocks]), stream=stream()), f"load, {what}")
            check(torch.equal(dst.object(blocks), want), f"bytes on the GPU differ, {what}")
            from array import array

            for t in dst.tensors:
                t.zero_()
            all_ok(c.load(key, Blocks.of(b, [blocks[3:7]]), array("Q", [3 * src.block_bytes]), stream=stream()), f"part, {what}")
            check(torch.equal(dst.object(blocks[3:7]), src.object(blocks[3:7])), f"a part differs, {what}")
            rest = [x for x in range(src.blocks) if x not in blocks[3:7]]
            check(int(dst.object(rest).max()) == 0, f"other blocks were written, {what}")
            if i == 0:
                before = (c.device_info() or {}).get("bounced_bytes", 0)
                bounced = before > 0
                wait_registered(c, size // 2)
        # The host stores, the GPU loads.
        from maru.api import Runs

        other = torch.randint(0, 256, (value,), dtype=torch.uint8)
        key = keys(f"{tag}/host", 1)
        all_ok(c.store(key, Runs.of([bytes(other.numpy())])), "store on the host")
        all_ok(c.load(key, Blocks.of(b, [blocks]), stream=stream()), f"load of the host's, {what}")
        check(torch.equal(dst.object(blocks).cpu(), other), f"bytes of the host differ, {what}")
    finally:
        c.close()
    return bounced


def step_order() -> str:
    """A store reads behind what its stream has; a load writes behind it. On side streams and the default one."""
    run, layers = 64 << 10, 8
    src, dst = Cache(layers, 64, run), Cache(layers, 64, run, fill=False)
    blocks = list(range(16))
    busy = torch.randn(4096, 4096, device=ARGS.device, dtype=torch.bfloat16) if on_gpu() else torch.randn(64, 64)
    with Up(cxl="0") as up:
        c = open_client(up["server"], 16 * src.block_bytes, run, cpu_bytes=1 << 30)
        a, b = src.register(c), dst.register(c)
        wait_registered(c, 1 << 30)
        for i in range(6):
            side = torch.cuda.Stream() if on_gpu() and i % 2 else None
            with torch.cuda.stream(side) if side else open(os.devnull):
                for _ in range(40):
                    busy @ busy
                for t in src.tensors:
                    t.fill_(i + 1)
                job = c.submit_store(keys(f"order/{i}", 1), Blocks.of(a, [blocks]), stream=stream())
                all_ok(finish(c, job), "store")
                check(int(host_min(c, keys(f"order/{i}", 1), 16 * src.block_bytes)) == i + 1, "a store did not wait for the stream")
                for t in dst.tensors:
                    t.fill_(0)
                for _ in range(40):
                    busy @ busy
                copies = [t.clone() for t in dst.tensors]  # read behind the products, before the load may write
                job = c.submit_load(keys(f"order/{i}", 1), Blocks.of(b, [blocks]), stream=stream())
                all_ok(finish(c, job), "load")
                check(all(int(t.max()) == 0 for t in copies), "a load did not wait for the stream")
                check(int(dst.object(blocks).min()) == i + 1, "a load was not there when its job ended")
            sync()
        c.close()
    return "6 rounds"


def host_min(c: Client, key: bytes, size: int) -> int:
    from maru.api import Runs

    data = bytearray(size)
    all_ok(c.load(key, Runs.of([data], writable=True)), "load")
    t = torch.frombuffer(data, dtype=torch.uint8)
    check(int(t.min()) == int(t.max()), "bytes of two times in one object")
    return int(t.min())


def step_capture() -> str:
    """Graphs are captured while copies run; a stream that is being captured is refused."""
    if not on_gpu():
        return "skipped: no GPU"
    run, layers = 64 << 10, 16
    src, dst = Cache(layers, 512, run), Cache(layers, 512, run, fill=False)
    stop, failed, moved = threading.Event(), [], [0]
    with Up(cxl="1G") as up:
        c = open_client(up["server"], 16 * src.block_bytes, run, cpu_bytes=1 << 30, cxl_bytes=1 << 29, region_bytes=1 << 28)
        a, b = src.register(c), dst.register(c)
        items = [list(range(i * 16, i * 16 + 16)) for i in range(16)]
        side = torch.cuda.Stream()

        def copies() -> None:
            try:
                n = 0
                while not stop.is_set():
                    k = keys(f"capture/{n}", 16)
                    all_ok(finish(c, c.submit_store(k, Blocks.of(a, items), stream=side.cuda_stream)), "store")
                    all_ok(finish(c, c.submit_load(k, Blocks.of(b, items), stream=side.cuda_stream)), "load")
                    c.delete(k)
                    n += 1
                    moved[0] = n
            except Exception:
                failed.append(traceback.format_exc())

        thread = threading.Thread(target=copies)
        thread.start()
        x = torch.randn(1024, 1024, device=ARGS.device)
        x @ x
        sync()
        refused = 0
        for i in range(30):
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                y = x @ x
                if i % 3 == 0:
                    for s in (torch.cuda.current_stream().cuda_stream, 0):
                        try:
                            c.submit_store(keys("captured", 1), Blocks.of(a, [items[0]]), stream=s)
                        except UnsupportedError:
                            refused += 1
                y = y + 1
            g.replay()
            sync()
            check(torch.allclose(y, x @ x + 1, rtol=1e-2, atol=1e-1), "a captured graph computes something else")
            time.sleep(0.02)
        stop.set()
        thread.join()
        c.close()
    check(not failed, "".join(failed))
    # Stream 0 is not captured, and an event there breaks nothing.
    check(refused == 10, f"{refused} of 10 submissions of the captured stream were refused")
    return f"30 captures, {moved[0]} rounds of copies meanwhile"


def child_args(*more: str) -> list[str]:
    return [sys.executable, __file__, "--maru", ARGS.maru, "--out", ARGS.out, "--device", ARGS.device, *more]


CHILD = {"run": 64 << 10, "layers": 16, "blocks": 1024, "per": 16, "items": 64}


def child_store(server: str, seconds: float, region: int) -> None:
    """Stores objects of known bytes for a while; says when it begins."""
    src = Cache(CHILD["layers"], CHILD["blocks"], CHILD["run"], fill=False)
    for t in src.tensors:
        t.copy_(torch.arange(CHILD["blocks"], device=ARGS.device).remainder(251).to(torch.uint8).unsqueeze(1))
    sync()
    c = open_client(server, CHILD["per"] * src.block_bytes, CHILD["run"], cxl_bytes=2 * region, region_bytes=region)
    a = src.register(c)
    wait_registered(c, region)
    items = [list(range(i * 16, i * 16 + 16)) for i in range(CHILD["items"])]
    n, end = 0, time.monotonic() + seconds
    while True:
        codes = finish(c, c.submit_store(keys(f"child/{n}", len(items)), Blocks.of(a, items), stream=stream()))
        all_ok(codes, "store")
        print(f"stored {n}", flush=True)
        n += 1
        if time.monotonic() > end:
            break
        if n > 1:
            c.delete(keys(f"child/{n - 2}", len(items)))
    sys.stdin.readline()
    c.close()


def load_child(c: Client, layout: int, dst: Cache, n: int) -> None:
    items = [list(range(i * 16, i * 16 + 16)) for i in range(CHILD["items"])]
    for t in dst.tensors:
        t.fill_(255)
    sync()
    codes = finish(c, c.submit_load(keys(f"child/{n}", len(items)), Blocks.of(layout, items), stream=stream()))
    all_ok(codes, "load of another process's objects")
    want = torch.arange(CHILD["blocks"], device=ARGS.device).remainder(251).to(torch.uint8).unsqueeze(1)
    check(all(bool((t == want).all()) for t in dst.tensors), "bytes of another process differ")


def start_child(up: dict[str, Any], seconds: float, region: int) -> subprocess.Popen[str]:
    p = subprocess.Popen(child_args("--child", up["server"], str(seconds), str(region)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return p


def step_processes() -> str:
    """Two processes with one cxl pool, both registered: one stores, the other loads."""
    region = 3 * GIB
    dst = Cache(CHILD["layers"], CHILD["blocks"], CHILD["run"], fill=False)
    with Up(cxl="8G") as up:
        p = start_child(up, 0, region)
        assert p.stdout is not None and p.stdin is not None
        check("stored 0" in p.stdout.readline(), "the other process stored nothing")
        c = open_client(up["server"], CHILD["per"] * dst.block_bytes, CHILD["run"], cxl_bytes=1 << 28, region_bytes=1 << 28)
        b = dst.register(c)
        load_child(c, b, dst, 0)
        time.sleep(1.0 if on_gpu() else 0)  # the other's region is registered read-only by now
        began = time.monotonic()
        load_child(c, b, dst, 0)
        took = time.monotonic() - began
        info = c.device_info()
        if info:
            check(info["registered_bytes"] >= region, f"the foreign region is not registered: {info}")
        p.stdin.write("\n")
        p.stdin.close()
        check(p.wait(60) == 0, "the other process failed")
        c.close()
    return f"1 GiB in {took * 1e3:.0f} ms"


def pool_bytes(directory: str) -> list[torch.Tensor]:
    """A copy of every pool file, as 64-bit words."""
    out = []
    for path in sorted(Path(directory).rglob("*")):
        if path.is_file() and (size := path.stat().st_size) > (64 << 20):
            out.append(torch.from_file(str(path), shared=True, size=size // 8, dtype=torch.int64).clone())
    check(len(out) > 0, f"no pool in {directory}")
    return out


def step_kill() -> str:
    """A process is killed while it stores: once it is gone no byte of the pool changes, and what it had published can be read."""
    region = 3 * GIB
    dst = Cache(CHILD["layers"], CHILD["blocks"], CHILD["run"], fill=False)
    gone = []
    for delay in (0.0, 0.007, 0.03):
        with Up(cxl="4G") as up:
            p = start_child(up, 60, region)
            assert p.stdout is not None
            last = -1
            while last < 2:
                last = int(p.stdout.readline().split()[1])
            time.sleep(delay)
            began = time.monotonic()
            p.send_signal(signal.SIGKILL)
            p.wait()
            gone.append(time.monotonic() - began)
            first = pool_bytes(up["dir"])
            time.sleep(0.5)
            second = pool_bytes(up["dir"])
            same = all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
            check(same, "bytes of the pool changed after the process was gone")
            del first, second
            for line in p.stdout:
                last = int(line.split()[1])
            c = open_client(up["server"], CHILD["per"] * dst.block_bytes, CHILD["run"], cxl_bytes=1 << 28, region_bytes=1 << 28)
            b = dst.register(c)
            load_child(c, b, dst, last)
            c.close()
    return f"{len(gone)} kills, gone after {', '.join(f'{g * 1e3:.0f}' for g in gone)} ms"


def step_bounce() -> str:
    """A pool in a file on a disk cannot be registered: the same bytes through the bounce buffer."""
    directory = Path(ARGS.disk or ".").absolute() / f"maru-bounce-{os.getpid()}"
    run, layers = 64 << 10, 8
    src, dst = Cache(layers, 64, run), Cache(layers, 64, run, fill=False)
    blocks = [list(range(i * 16, i * 16 + 16)) for i in range(4)]
    with Up(cxl="512M", directory=str(directory)) as up:
        c = open_client(up["server"], 16 * src.block_bytes, run, cxl_bytes=1 << 28, region_bytes=1 << 28)
        a, b = src.register(c), dst.register(c)
        time.sleep(1.0)
        began = time.monotonic()
        all_ok(c.store(keys("bounce", 4), Blocks.of(a, blocks), stream=stream()), "store")
        all_ok(c.load(keys("bounce", 4), Blocks.of(b, blocks), stream=stream()), "load")
        took = time.monotonic() - began
        check(torch.equal(dst.object(sum(blocks, [])), src.object(sum(blocks, []))), "bytes differ")
        info = c.device_info()
        c.close()
    subprocess.run(["rm", "-rf", str(directory)], check=True)
    if info:
        check(info["registered_bytes"] > 0 or info["refused_bytes"] > 0, f"{info}")
        return f"registered {info['registered_bytes']}, refused {info['refused_bytes']} bytes, {took * 1e3:.0f} ms both ways"
    return "host"


def step_reopen() -> str:
    """Closing under a copy, opening again: nothing leaks, torch goes on."""
    run, layers = 64 << 10, 16
    src = Cache(layers, 512, run)
    items = [list(range(i * 16, i * 16 + 16)) for i in range(32)]
    free = []
    with Up() as up:
        for i in range(12):
            c = open_client(up["server"], 16 * src.block_bytes, run, cpu_bytes=1 << 30)
            a = src.register(c)
            if i % 2:
                wait_registered(c, 1 << 30)
            c.submit_store(keys(f"reopen/{i}", 32), Blocks.of(a, items), stream=stream())
            c.close()
            if on_gpu():
                free.append(torch.cuda.mem_get_info()[0])
            x = torch.ones(1000, device=ARGS.device)
            check(float(x.sum()) == 1000, "torch is broken")
    check(len(set(free[2:])) <= 1, f"memory of the GPU differs: {free}")
    return f"12 times, {free[-1] >> 20 if free else 0} MiB free each time"


def step_submit() -> str:
    """What a submission costs the engine's thread, 2048 runs."""
    run, layers = 16 << 10, 32
    src = Cache(layers, 64, run)
    with Up() as up:
        c = open_client(up["server"], 64 * src.block_bytes, run, cpu_bytes=2 << 30)
        a = src.register(c)
        wait_registered(c, 2 << 30)
        costs, whole = [], []
        for i in range(40):
            k, source, s = keys(f"submit/{i}", 1), Blocks.of(a, [list(range(64))]), stream()
            began = time.perf_counter()
            job = c.submit_store(k, source, stream=s)
            costs.append(time.perf_counter() - began)
            all_ok(finish(c, job), "store")
            whole.append(time.perf_counter() - began)
        loads = []
        for i in range(40):
            k, target, s = keys(f"submit/{i}", 1), Blocks.of(a, [list(range(64))]), stream()
            began = time.perf_counter()
            job = c.submit_load(k, target, stream=s)
            costs.append(time.perf_counter() - began)
            while not (codes := c.job_result(job)):
                pass
            loads.append(time.perf_counter() - began)
            all_ok(codes, "load")
        c.close()
    median, worst = statistics.median(costs) * 1e6, sorted(costs)[-4] * 1e6
    check(median < 200, f"a submission costs {median:.0f} us")
    return f"median {median:.0f} us, 95 % {worst:.0f} us; 32 MiB stored in {statistics.median(whole) * 1e3:.2f} ms, loaded in {statistics.median(loads) * 1e3:.2f} ms"


def reference(size: int) -> tuple[float, float]:
    """Seconds of one contiguous copy, device to host and back."""
    device = torch.empty(size, dtype=torch.uint8, device=ARGS.device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu())
    out = []
    for to, source in ((host, device), (device, host)):
        took = []
        for _ in range(6):
            sync()
            began = time.perf_counter()
            to.copy_(source, non_blocking=True)
            sync()
            took.append(time.perf_counter() - began)
        out.append(statistics.median(took[1:]))
    return out[0], out[1]


def step_speed() -> str:
    """Stores and loads of 1 GiB against one contiguous copy of it."""
    lines = []
    total = GIB
    want = 0.95
    worst = 10.0
    for medium in ("cpu", "cxl"):
        with Up(cxl="4G" if medium == "cxl" else "0") as up:
            for run in (16 << 10, 64 << 10, 256 << 10, 2 << 20):
                layers = 32 if run < (2 << 20) else 16
                per = max((32 << 20) // (layers * run), 1)
                src = Cache(layers, 2 * total // (layers * run), run)
                value = per * src.block_bytes
                piece = min(run, 64 << 10)
                memory = {"cpu_bytes": 3 * GIB} if medium == "cpu" else {"region_bytes": 3 * GIB, "cxl_bytes": 3 * GIB}
                count = total // value
                order = torch.randperm(src.blocks).tolist()
                items = [order[i * per : i * per + per] for i in range(count)]
                for way in ("auto",) if run < (2 << 20) else ("staged", "direct"):
                    c = open_client(up["server"], value, piece, device_copy=way, **memory)
                    a = src.register(c)
                    wait_registered(c, 3 * GIB)
                    d2h, h2d = reference(total)
                    stores, loads = [], []
                    for i in range(6):
                        k = keys(f"speed/{medium}/{run}/{way}/{i}", count)
                        sync()
                        began = time.perf_counter()
                        all_ok(finish(c, c.submit_store(k, Blocks.of(a, items), stream=stream())), "store")
                        stores.append(time.perf_counter() - began)
                        began = time.perf_counter()
                        all_ok(finish(c, c.submit_load(k, Blocks.of(a, items), stream=stream())), "load")
                        loads.append(time.perf_counter() - began)
                        c.delete(k)
                        time.sleep(0.02)
                    c.close()
                    s, load = statistics.median(stores[1:]), statistics.median(loads[1:])
                    worst = min(worst, d2h / s, h2d / load)
                    lines.append(
                        f"  {medium} run {run >> 10:5d} KiB {way:6s}: store {total / s / 1e9:5.1f} GB/s = {100 * d2h / s:5.1f} %, "
                        f"load {total / load / 1e9:5.1f} GB/s = {100 * h2d / load:5.1f} % of {total / d2h / 1e9:.1f} and {total / h2d / 1e9:.1f}"
                    )
                del src
    text = "\n" + "\n".join(lines)
    check(not on_gpu() or worst >= want, f"{100 * worst:.1f} % of one contiguous copy, {100 * want:.0f} % is wanted{text}")
    return text


def step_busy() -> str:
    """What copies cost matrix products that run meanwhile."""
    if not on_gpu():
        return "skipped: no GPU"
    run, layers = 64 << 10, 32
    src = Cache(layers, 1024, run)
    a16 = torch.randn(8192, 4096, device=ARGS.device, dtype=torch.bfloat16)
    b16 = torch.randn(4096, 14336, device=ARGS.device, dtype=torch.bfloat16)

    def products() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(120):
            a16 @ b16
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    out = []
    with Up() as up:
        c = open_client(up["server"], 16 * src.block_bytes, run, cpu_bytes=8 * GIB)
        a = src.register(c)
        wait_registered(c, 8 * GIB)
        items = [list(range(i * 16, i * 16 + 16)) for i in range(64)]
        for _ in range(4):
            products()
        side = torch.cuda.Stream().cuda_stream
        for kind in ("store", "load"):
            ratios, speeds = [], []
            for i in range(7):
                k = [keys(f"busy/{i}/{j}", 64) for j in range(3)]
                if kind == "load":
                    for x in k:
                        all_ok(finish(c, c.submit_store(x, Blocks.of(a, items), stream=side)), "store")
                submit = c.submit_store if kind == "store" else c.submit_load
                sync()
                products()  # a chip that rested is cooler and faster: all three that count come behind one
                alone = products()
                began = time.perf_counter()
                jobs = [submit(x, Blocks.of(a, items), stream=side) for x in k]
                ended = []
                watch = threading.Thread(target=lambda: ended.append([finish(c, j) for j in jobs] and time.perf_counter()))
                watch.start()
                busy = products()
                watch.join()
                speeds.append(3 * 64 * 16 * src.block_bytes / (ended[0] - began) / 1e9)
                again = products()
                ratios.append(busy / ((alone + again) / 2) - 1)
                for x in k:
                    c.delete(x)
                end = time.monotonic() + 10
                while c.stats()["pages_free"] < 3 * 64:
                    check(time.monotonic() < end, "deleted pages do not come back")
                    time.sleep(0.01)
            out.append(f"  {kind}: products {100 * statistics.median(ratios):+.1f} % ({', '.join(f'{100 * r:+.1f}' for r in ratios)}), copy {statistics.median(speeds):.1f} GB/s")
        c.close()
    return "\n" + "\n".join(out)


STEPS = [step_order, step_capture, step_processes, step_kill, step_bounce, step_reopen, step_submit, step_speed, step_busy, step_bytes]


def main() -> int:
    global ARGS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maru", required=True)
    parser.add_argument("--out", default=".")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--disk", default="", help="a folder on a disk")
    parser.add_argument("--child", nargs=3)
    parser.add_argument("steps", nargs="*")
    ARGS = parser.parse_args()
    if ARGS.child:
        child_store(ARGS.child[0], float(ARGS.child[1]), int(ARGS.child[2]))
        return 0
    import logging

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    torch.manual_seed(1)
    failed = 0
    for step in STEPS:
        name = step.__name__.removeprefix("step_")
        if ARGS.steps and name not in ARGS.steps:
            continue
        began = time.monotonic()
        try:
            text = step()
            print(f"PASS {name} ({time.monotonic() - began:.1f} s): {text}", flush=True)
        except (Exception, MaruError):
            failed += 1
            print(f"FAIL {name} ({time.monotonic() - began:.1f} s)\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
