"""The model of several processes, over HTTP: API server, engine core and one or two workers apart.

Two starts serve everything: one rank, killed in the middle; then two ranks, which
share nothing with it, and end in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test_vllm_rows import BLOCK, CHUNK, free_port, kv_transfer, prompt

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


class Server:
    """One `openai.api_server`, with everything that it started."""

    def __init__(self, directory: Path, model: Path, address: str, name: str, *args: str, **extra: Any) -> None:
        from demo.engine import environment

        self.port = free_port()
        self.log = directory / f"{name}.log"
        env = {
            **os.environ,
            **environment(),
            "PYTHONPATH": f"{ROOT}/python/tests/engine_site:{ROOT}/python",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
        with self.log.open("wb") as out:
            self.child = subprocess.Popen(
                [
                    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
                    "--served-model-name", "tiny",
                    "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024",
                    "--block-size", str(BLOCK), "--host", "127.0.0.1", "--port", str(self.port),
                    "--kv-transfer-config", json.dumps(kv_transfer(address, **extra)), *args,
                ],
                stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip

    def get(self, path: str, body: Any = None, timeout: float = 120.0) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="GET" if body is None else "POST",
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            data: bytes = answer.read()
            return data

    def wait(self, limit_s: float = 400.0) -> None:
        end = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError):
                self.get("/health", timeout=2.0)
                return
            assert self.child.poll() is None and time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.5)

    def ask(self, p: list[int], max_tokens: int = 8) -> list[int]:
        body = {
            "model": "tiny", "prompt": p, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        tokens: list[int] = json.loads(self.get("/v1/completions", body))["choices"][0]["token_ids"]
        return tokens

    def reset(self) -> None:
        self.get("/reset_prefix_cache", {})

    def metrics(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for line in self.get("/metrics").decode().splitlines():
            m = re.match(r"(vllm:[\w:]+)(?:\{(.*)\})? (\S+)$", line)
            if m:
                label = re.search(r'(?:outcome|medium|reason|result)="(\w+)"', m.group(2) or "")
                name = f"{m.group(1)}|{label.group(1)}" if label else m.group(1)
                out[name] = out.get(name, 0) + float(m.group(3))
        return out

    def end(self, number: int) -> float:
        """Sends a signal to the whole group (SIGKILL) or to the API server, and returns the seconds to its end."""
        began = time.monotonic()
        if number == signal.SIGKILL:
            os.killpg(self.child.pid, number)
        else:
            self.child.send_signal(number)
        self.child.wait(timeout=60)
        return time.monotonic() - began

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, Path]]:
    from demo import tiny_model
    from demo.processes import maru_up

    cache = os.environ.get("MARU_CACHE")
    model = (Path(cache) if cache else tmp_path_factory.mktemp("model")) / tiny_model.NAME
    subprocess.run([sys.executable, tiny_model.__file__, str(model)], check=True, capture_output=True)
    directory = tmp_path_factory.mktemp("http")
    with maru_up(directory, "--cxl-size", "256M", "--cpu-size", "256M") as up:
        yield directory, up["server"], model


def check_hit(server: Server, p: list[int]) -> float:
    """A prompt that is stored: its hit, counted by engine and connector alike. Returns the bytes that were loaded."""
    server.ask(p)
    local = server.ask(p)
    server.reset()
    before = server.metrics()
    assert server.ask(p) == local
    # Counts come with the step after.
    end = time.monotonic() + 10
    while True:
        now = server.metrics()
        grown = now["vllm:external_prefix_cache_hits_total"] - before["vllm:external_prefix_cache_hits_total"]
        if grown or time.monotonic() > end:
            break
        time.sleep(0.1)
    changed = {name: now[name] - before[name] for name in now if "maru" in name and now[name] != before[name]}
    seen = f"{changed}\n{server.log.read_text()[-4000:]}"
    assert grown == 5 * CHUNK, seen
    for name in ("vllm:maru_hit_tokens_total|cxl", "vllm:maru_loaded_tokens_total"):
        assert now[name] - before[name] == grown, f"{name}: {seen}"
    assert now["vllm:maru_loads_total|ok"] - before["vllm:maru_loads_total|ok"] == 1, seen
    return now["vllm:maru_load_bytes_total"] - before["vllm:maru_load_bytes_total"]


def explained(run_dir: Path) -> list[dict[str, Any]]:
    out = subprocess.run(
        [ROOT / "bin" / "maru", "explain", "--dir", run_dir, "--last", "100", "--json"], check=True, capture_output=True
    ).stdout
    records: list[dict[str, Any]] = json.loads(out)
    return records


def test_one_rank_then_two_over_http(system: tuple[Path, str, Path]) -> None:
    directory, address, model = system
    run_dir = directory / "run"
    p = prompt(1, 5 * CHUNK + 20)
    one = Server(directory, model, address, "one", maru_run_dir=str(run_dir))
    try:
        one.wait()
        load_bytes = check_hit(one, p)
        (record,) = [r for r in explained(run_dir) if r["loaded"] == 5 * CHUNK]
        assert record["request"].startswith("cmpl-") and record["miss"] == {"too_short": 20}
        # It dies while it stores and answers; nobody else is hurt.
        asking = subprocess.Popen(
            [sys.executable, "-c", "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode(), "
             "{'Content-Type': 'application/json'})).read()", f"http://127.0.0.1:{one.port}/v1/completions",
             json.dumps({"model": "tiny", "prompt": prompt(2, 900), "max_tokens": 100, "ignore_eos": True})],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(0.3)
        one.end(signal.SIGKILL)
        asking.wait(timeout=30)
    finally:
        one.kill()

    two = Server(directory, model, address, "two", "--tensor-parallel-size", "2", maru_run_dir=str(run_dir))
    try:
        two.wait()
        before = two.metrics()
        two.ask(p)
        two.reset()
        now = two.metrics()
        assert now["vllm:maru_lookups_total|hit"] == 0, "another tensor parallel size shares nothing"
        # Both ranks load as many bytes as the one rank loaded alone, in two halves.
        assert check_hit(two, p) == load_bytes
        now = two.metrics()
        chunks = now["vllm:maru_store_chunks_total|stored"] - before["vllm:maru_store_chunks_total|stored"]
        assert chunks == 2 * 5, "a shard a rank"
        named = [r["elsewhere"][0]["differs"] for r in explained(run_dir) if r.get("elsewhere")]
        assert named and all("tensor_parallel 2 here, 1 there" in differs for differs in named), named
        seconds = two.end(signal.SIGTERM)
        assert seconds < 30, f"{seconds:.0f} s to end"
    finally:
        two.kill()
