"""Rows of a real vLLM engine on CPU that share its process: what the scheduler, the server and memory may do.

The engine has few blocks (so that it preempts), prefills in steps of 256 tokens
(so that chunks straddle steps), and its jobs can be held back. Each row has prompts
of its own, compares with the engine's own prefix cache bit for bit, and takes its
hits from the engine's count. The last row compares every metric with what was sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
BLOCK, CHUNK = 32, 128
ANSWER = 8


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(7_000 + seed)
    return [rng.randrange(3, 1024) for _ in range(tokens)]


def free_port() -> int:
    """A port under the range of ephemeral ones, whose second one (of the hot plane) is free too."""
    while True:
        port = random.SystemRandom().randrange(12_000, 22_000)
        with socket.socket() as a, socket.socket() as b:
            try:
                a.bind(("127.0.0.1", port))
                b.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port


class Up:
    """A resource manager, and a server on one port that can be stopped, killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.pool = directory / "pool"
        # Paths of Unix sockets are short.
        self.sockets = Path(tempfile.mkdtemp(prefix="maru-rows-"))
        self.rm = self._run(
            "maru-resource-manager", "--pool", f"file:{self.pool},size=256M", "--state-dir", directory / "rm", "--port", "-2",
            "--unix-socket", self.sockets / "rm.sock",
        )  # fmt: skip
        self.child: subprocess.Popen[bytes] | None = None

    def _run(self, name: str, *args: object) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                [ROOT / "bin" / name, "--http-port", "-2", *map(str, args)], stdout=log, stderr=log, start_new_session=True
            )
        socket_path = Path(str(args[list(args).index("--unix-socket") + 1]))
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as s:
                s.connect(str(socket_path))
                return child
            assert child.poll() is None and time.monotonic() < end, (self.directory / f"{name}.log").read_text()[-2000:]
            time.sleep(0.05)

    def start(self) -> None:
        self.child = self._run(
            "maru-server", "--rm-address", f"unix:{self.sockets / 'rm.sock'}", "--state-dir", self.directory / "server",
            "--port", self.port, "--hot-port", "-1", "--unix-socket", self.sockets / "s.sock",
            "--hot-unix-socket", self.sockets / "h.sock", "--cpu-budget", "512M",
        )  # fmt: skip

    def signal(self, number: int) -> None:
        assert self.child is not None
        os.kill(self.child.pid, number)

    def kill(self) -> None:
        """Kills the server."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None

    def close(self) -> None:
        self.kill()
        self.rm.kill()
        self.rm.wait()
        shutil.rmtree(self.sockets, ignore_errors=True)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"


class Rows:
    """The engine and what the rows say to it."""

    def __init__(self, up: Up, engine: Any) -> None:
        self.up, self.engine = up, engine

    def __call__(self, do: str, **kw: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.engine(do, **kw)
        return answer

    def drive(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = self("drive", requests=list(requests))["results"]
        return results

    def one(self, p: list[int], **kw: Any) -> dict[str, Any]:
        return self.drive({"prompt": p, **kw})[0]

    def reset(self) -> None:
        assert self("reset")["ok"], "the engine's own cache could not be dropped: blocks are still held"

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self("counters")["counters"]
        return counters

    def stored_and_local(self, p: list[int]) -> dict[str, Any]:
        """Stores a prompt; returns what the engine's own cache answers for it."""
        self.one(p)
        local = self.one(p)
        self.reset()
        return local

    def wait_until_hits(self, p: list[int], cached: int, limit_s: float = 30.0) -> dict[str, Any]:
        """Asks until the cache is back."""
        end = time.monotonic() + limit_s
        while True:
            self.reset()
            r = self.one(p)
            if r["cached"] >= cached:
                return r
            assert time.monotonic() < end, f"no hit within {limit_s} s: {r['cached']} tokens"
            time.sleep(0.2)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (a["tokens"], a["logprobs"]) == (b["tokens"], b["logprobs"])


def kv_transfer(address: str, **extra: Any) -> dict[str, Any]:
    settings = {
        "maru_server_url": address,
        "maru_pool_size": "32M",
        "maru_cache_namespace": "tiny@rows",
        "maru_kv_chunk_tokens": CHUNK,
        "maru_min_hit_tokens": 0,
        "maru_timeout_ms": 1500,
        "maru_lookup_timeout_ms": 1500,
        **extra,
    }
    return {
        "kv_connector": "MaruKVConnector",
        "kv_connector_module_path": "maru_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "run"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, model: Path, run_dir: Path) -> Iterator[Rows]:
    from demo.processes import EngineProcess

    directory = tmp_path_factory.mktemp("rows")
    path = os.pathsep.join([str(ROOT / "python" / "tests"), str(ROOT / "python")])
    engine = EngineProcess(directory / "engine.log", module="vllm_driver", env={"PYTHONPATH": path, "MARU_RUN_DIR": str(run_dir)})
    up = Up(directory)
    try:
        up.start()
        engine.ready()
        engine(
            "start",
            model=str(model),
            kv_transfer=kv_transfer(up.address),
            llm={
                "block_size": BLOCK,
                "max_model_len": 1024,
                "max_num_batched_tokens": 256,
                "max_num_seqs": 4,
                "num_gpu_blocks_override": 48,
            },
        )
        engine("watch_bytes")
        yield Rows(up, engine)
        engine.stop()
    finally:
        up.close()
        engine.kill()


@pytest.fixture(autouse=True)
def idle(rows: Rows) -> Iterator[None]:
    rows.reset()
    yield
    state = rows("state")
    assert not any(state[k] for k in ("requests", "connector", "storing", "bytes", "blocks")), state


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [(4 * CHUNK, 4 * CHUNK - BLOCK), (4 * CHUNK + 1, 4 * CHUNK), (3 * CHUNK + 70, 3 * CHUNK), (CHUNK - 9, 0)],
)
def test_full_partial_and_tail_hits_over_chunked_prefill(rows: Rows, tokens: int, cached: int) -> None:
    p = prompt(tokens, tokens)
    # Read at the same place as the engine's own cache would: a hit of as many tokens.
    rows.one(p)
    rows.reset()
    if cached:
        rows.one(p[: cached + 1], max_tokens=1)  # the own cache has these, and no more
    local = rows.one(p)
    rows.reset()
    hit = rows.one(p)
    assert hit["cached"] == cached, "from the engine's own count"
    assert same(hit, local)


def test_a_hit_behind_a_local_one_inside_a_chunk(rows: Rows) -> None:
    p = prompt(20, 4 * CHUNK + 5)
    local = rows.stored_and_local(p)
    rows.one(p[: CHUNK + BLOCK + 1], max_tokens=1)  # local: a chunk and a block of the second
    before = rows.counters()["loaded_bytes"]
    hit = rows.one(p)
    assert hit["cached"] == 4 * CHUNK and same(hit, local)
    # The short prompt loaded its own chunks; the long one the other three blocks and two chunks.
    loaded = rows.counters()["loaded_bytes"] - before
    assert loaded == (3 * CHUNK - BLOCK) // BLOCK * rows.counters()["stored_bytes"] // rows.counters()["stored"] // 4


def test_bytes_are_those_that_were_stored(rows: Rows) -> None:
    p = prompt(21, 5 * CHUNK + 1)
    rows.stored_and_local(p)
    assert rows.one(p)["cached"] == 5 * CHUNK
    answer = rows("bytes")
    assert len(answer["loaded"]) >= 5 and answer["loaded"].items() <= answer["stored"].items()


def test_a_load_that_does_nothing_changes_the_answer(rows: Rows) -> None:
    """The negative control: without it the comparison of answers proves nothing."""
    p = prompt(22, 3 * CHUNK + 1)
    local = rows.stored_and_local(p)
    rows.one(prompt(23, 900), max_tokens=1)  # other bytes in the blocks
    rows.reset()
    rows("pretend")
    bad = rows.one(p)
    assert bad["cached"] == 3 * CHUNK and not same(bad, local)
    rows.reset()
    assert same(rows.one(p), local)


def test_preempted_requests_come_back_from_the_store(rows: Rows) -> None:
    before = rows("metrics")["metrics"]
    prompts = [prompt(30 + i, 2 * CHUNK + 40) for i in range(4)]
    alone = [rows.one(p, max_tokens=120)["tokens"] for p in prompts]
    rows.reset()
    together = rows.drive(*({"prompt": p, "max_tokens": 120} for p in prompts))
    assert [r["tokens"] for r in together] == alone
    after = rows("metrics")["metrics"]
    name = "vllm:num_preemptions_total"
    assert after[name] > before[name], "48 blocks do not hold four answers: the engine must have preempted"


def test_aborts_while_loading_and_while_storing(rows: Rows) -> None:
    p = prompt(40, 5 * CHUNK)
    local = rows.stored_and_local(p)
    rows("hold", polls=20)
    (aborted,) = rows.drive({"prompt": p, "abort": "loading"})
    assert aborted.get("aborted") and not aborted.get("tokens")
    rows.reset()
    (aborted,) = rows.drive({"prompt": prompt(41, 5 * CHUNK), "max_tokens": 60, "abort": "storing"})
    assert aborted.get("aborted")
    rows("hold", polls=0)
    rows.reset()
    assert same(rows.one(p), local)


def test_salts_and_prompt_logprobs(rows: Rows) -> None:
    p = prompt(50, 3 * CHUNK + 1)
    rows.stored_and_local(p)
    assert rows.one(p, salt="tenant")["cached"] == 0
    rows.reset()
    assert rows.one(p, prompt_logprobs=1)["cached"] == 0, "must not read"
    rows.reset()
    assert rows.one(p, salt="tenant")["cached"] == 3 * CHUNK
    rows.reset()
    q = prompt(51, 3 * CHUNK + 1)
    rows.one(q, prompt_logprobs=1)
    rows.reset()
    assert rows.one(q)["cached"] == 3 * CHUNK, "but it writes"


@pytest.mark.parametrize("count", [2, 20])
def test_many_requests_on_one_prefix_load_it_once(rows: Rows, count: int) -> None:
    p = prompt(60 + count, 4 * CHUNK)
    rows.stored_and_local(p)
    before = rows.counters()["loaded"]
    rows("hold", polls=5)
    results = rows.drive(*({"prompt": [*p, 10 + i], "max_tokens": 2} for i in range(count)))
    rows("hold", polls=0)
    assert all(r["cached"] == 4 * CHUNK for r in results)
    loaded = rows.counters()["loaded"] - before
    # Two running requests of the small pool may push the prefix out and load it again.
    assert loaded == 4 if count == 2 else loaded <= 12, f"{loaded} chunks loaded for {count} requests"


def test_a_chunk_that_is_lost_after_the_lookup(rows: Rows) -> None:
    p = prompt(70, 4 * CHUNK + 1)
    local = rows.stored_and_local(p)
    rows("lose", first=2)
    before = rows.counters()["load_failures"]
    r = rows.one(p)
    assert rows.counters()["load_failures"] - before == 2
    assert r["tokens"] == local["tokens"] and r["finish"] == "length"


def test_every_load_failing_ends(rows: Rows) -> None:
    p = prompt(71, 4 * CHUNK + 1)
    local = rows.stored_and_local(p)
    rows("lose", first=0)
    answer = rows("drive", requests=[{"prompt": p}])
    assert answer["results"][0]["tokens"] == local["tokens"]
    assert answer["steps"] < 2000, "R14: it must not go round for ever"


def test_broken_memory_is_found(rows: Rows) -> None:
    import numpy

    p = prompt(72, 3 * CHUNK + 1)
    local = rows.stored_and_local(p)
    words = numpy.memmap(rows.up.pool, dtype=numpy.uint32, mode="r+", offset=2 << 20)
    words[words != 0] ^= 0x0100_0000  # a high bit of every float
    words.flush()
    del words
    before = rows.counters()["load_failures"]
    r = rows.one(p)
    assert rows.counters()["load_failures"] > before and r["tokens"] == local["tokens"]


@pytest.mark.parametrize("phase", ["lookup", "load", "store"])
def test_a_hung_server_costs_a_timeout_and_no_request(rows: Rows, phase: str) -> None:
    p = prompt(80 + len(phase), 3 * CHUNK + 1)
    local = rows.stored_and_local(p)
    assert rows.up.child is not None
    rows("signal_at", what=phase, pid=rows.up.child.pid, number=int(signal.SIGSTOP))
    began = time.monotonic()
    try:
        r = rows.one(prompt(90, 3 * CHUNK + 1) if phase == "store" else p)
        if phase != "store":
            assert r["tokens"] == local["tokens"]
        rows.reset()
        again = rows.one(p)  # while it still hangs
        assert again["tokens"] == local["tokens"]
        assert time.monotonic() - began < 40
    finally:
        rows.up.signal(signal.SIGCONT)
    rows.one(p)
    rows.wait_until_hits(p, 3 * CHUNK)


@pytest.mark.parametrize("phase", ["idle", "lookup", "load", "store"])
def test_a_killed_server_is_picked_up_when_it_is_back(rows: Rows, phase: str) -> None:
    p = prompt(100 + len(phase), 3 * CHUNK + 1)
    local = rows.stored_and_local(p)
    assert rows.up.child is not None
    if phase == "idle":
        rows.up.kill()
    else:
        rows("signal_at", what=phase, pid=rows.up.child.pid, number=int(signal.SIGKILL))
    q = prompt(110, 3 * CHUNK + 1) if phase == "store" else p
    r = rows.one(q)
    if phase != "store":
        assert r["tokens"] == local["tokens"]
    rows.up.kill()
    rows.reset()
    assert rows.one(p)["tokens"] == local["tokens"], "without a server"
    rows.up.start()
    rows.wait_until_hits(p, 3 * CHUNK)


def test_metrics_are_what_was_sent(rows: Rows) -> None:
    """Every counter beside the load generator's own count, the engine's external hits among them."""
    p, q, short = prompt(120, 4 * CHUNK + 1), prompt(121, 2 * CHUNK + 40), prompt(122, 30)
    rows.wait_until_hits(p, 4 * CHUNK)
    rows.reset()
    before = rows("metrics")["metrics"]
    c0 = rows.counters()
    hit = rows.one(p, max_tokens=1)  # hit of 4 chunks, 1 token computed
    cold = rows.one(q, max_tokens=1)  # miss: 2 chunks and a tail of 40
    rows.one(short, max_tokens=1)  # no chunk at all
    rows.reset()
    silent = rows.one(q, max_tokens=1, prompt_logprobs=1)  # does not read
    rows.reset()
    rows("lose", first=1)
    lost = rows.one(p, max_tokens=1)  # 1 chunk good, 3 lost
    assert (hit["cached"], cold["cached"], silent["cached"]) == (4 * CHUNK, 0, 0) and lost["finish"] == "length"
    rows("drive", requests=[])
    c1 = rows.counters()
    now = rows("metrics")["metrics"]

    def grown(name: str) -> float:
        return float(now.get(name, 0) - before.get(name, 0))

    assert grown("vllm:maru_lookups_total|hit") == 2 and grown("vllm:maru_lookups_total|miss") == 1
    assert grown("vllm:maru_lookup_tokens_total") == (4 + 2 + 4) * CHUNK
    assert grown("vllm:maru_lookup_seconds_count") == 3
    assert grown("vllm:maru_hit_tokens_total|cxl") == 8 * CHUNK == grown("vllm:external_prefix_cache_hits_total")
    assert grown("vllm:maru_loads_total|ok") == 1 and grown("vllm:maru_loads_total|failed") == 1
    assert grown("vllm:maru_load_seconds_count") == 2 and grown("vllm:maru_load_seconds_sum") > 0
    assert grown("vllm:maru_loaded_tokens_total") == 5 * CHUNK and grown("vllm:maru_load_failed_tokens_total") == 3 * CHUNK
    assert grown("vllm:maru_load_bytes_total") == c1["loaded_bytes"] - c0["loaded_bytes"]
    token_bytes = c1["stored_bytes"] / c1["stored"] / CHUNK
    assert grown("vllm:maru_load_bytes_total") == 5 * CHUNK * token_bytes
    assert grown("vllm:maru_requests_total|hit") == 2 and grown("vllm:maru_requests_total|miss") == 3
    assert grown("vllm:maru_miss_tokens_total|too_short") == 1 + 40 + 30 + 1
    assert grown("vllm:maru_miss_tokens_total|no_read") == len(q)
    assert grown("vllm:maru_miss_tokens_total|not_stored") == 2 * CHUNK
    assert grown("vllm:maru_miss_tokens_total|failed") == 3 * CHUNK
    assert sum(grown(n) for n in now if n.startswith("vllm:maru_miss_tokens_total")) + 5 * CHUNK == sum(
        map(len, (p, q, short, q, p))
    )
    assert grown("vllm:maru_store_chunks_total|stored") == c1["stored"] - c0["stored"] == 2 + 3
    assert grown("vllm:maru_store_chunks_total|already") == 2, "the prompt that does not read is written all the same"
    assert grown("vllm:maru_store_bytes_total") == 5 * CHUNK * token_bytes
    # A store a step that completes chunks: two of them for the prompt whose tail is computed again.
    assert grown("vllm:maru_store_seconds_count") == 4
    assert grown("vllm:maru_prefill_seconds_saved_total") > 0
    assert now["vllm:maru_loads_in_flight_bytes"] == 0 and now["vllm:maru_stores_in_flight_bytes"] == 0


def test_explain_says_what_became_of_the_requests(rows: Rows, run_dir: Path) -> None:
    p = prompt(130, 3 * CHUNK + 10)
    rows.wait_until_hits(p, 3 * CHUNK)
    rows.reset()
    rows.one(p)
    time.sleep(0.5)
    text = subprocess.run(
        [ROOT / "bin" / "maru", "explain", "--dir", run_dir, "--last", "1", "--json"], check=True, capture_output=True
    ).stdout
    (record,) = json.loads(text)
    assert record["prompt"] == len(p) and record["loaded"] == 3 * CHUNK and record["hit"] == {"cxl": 3 * CHUNK}
    assert record["miss"] == {"too_short": 10} and record["done"]
    rows.reset()
    rows.one(p, prompt_logprobs=1)
    rows.reset()
    rows("lose", first=1)
    rows.one(p)
    time.sleep(0.5)
    said = subprocess.run(
        [ROOT / "bin" / "maru", "explain", "--dir", run_dir, "--last", "1000"], check=True, capture_output=True, text=True
    ).stdout
    for word in ("request d", "not_stored: nobody", "too_short: ", "no_read: ", "failed (code 29", f"{2 * CHUNK}  failed: "):
        assert word in said, word
