"""Time to first token with real vLLM on a GPU: cold, from the engine's own prefix cache,
from Maru, and from the engine's native host offload.

    vllm_ttft.py --maru PROGRAM [--modes none,native,maru,reader] [--sizes 8192,32768,65536]
                 [--reps 2] [--pool 56G] [--layers 32] [--eager] [--out DIR]

The model has the geometry of Llama-3.1-8B (32 layers, 8 KV heads of 128, bf16) and dummy
weights; prompts are random token ids. Each mode is an engine process of its own:

    none      no connector
    native    vLLM's own offload to host memory
    maru      MaruKVConnector on a cxl pool (a file on /dev/shm); killed by SIGKILL at its end
    reader    MaruKVConnector in another engine process, after the first was killed: what it
              reads was stored by a process that is gone

A row is the median over the repetitions. `floor` is the engine's own prefix hit and the
bytes at the link's 54.7 GB/s. The exit status is 1 when a mode that should hit does not.
Needs a GPU, vLLM and the package maru; test/gpu/run.sh says how they get there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINK_BYTES_PER_SECOND = 54.7e9  # one contiguous copy, measured by copy_check.py
KV_BYTES_PER_TOKEN_LAYER = 2 * 8 * 128 * 2
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def prompt(tokens: int, rep: int | str) -> list[int]:
    """The same prompt in every mode and process."""
    return random.Random(f"{tokens} {rep}").choices(range(3, 128000), k=tokens)


class Engine:
    """vLLM in this process, with what the measurements need."""

    def __init__(self, o: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
        from vllm.config import KVTransferConfig  # type: ignore[import-not-found]

        kw: dict[str, Any] = dict(o.get("llm", {}))
        if o["mode"] == "native":
            os.environ["VLLM_USE_SIMPLE_KV_OFFLOAD"] = "0"
            kw.update(kv_offloading_size=o["native_gib"], kv_offloading_backend="native")
        elif o["mode"] == "null":
            kw["kv_transfer_config"] = KVTransferConfig(
                kv_connector="NullConnector", kv_connector_module_path="null_connector", kv_role="kv_both"
            )
        elif o["mode"] != "none":
            name, module = ("TimedConnector", "timed_connector") if o.get("hook_times") else ("MaruKVConnector", "maru_vllm")
            kw["kv_transfer_config"] = KVTransferConfig(
                kv_connector=name, kv_connector_module_path=module, kv_role="kv_both",
                kv_load_failure_policy="recompute", kv_connector_extra_config=o["extra"],
            )  # fmt: skip
        model = tempfile.mkdtemp()
        Path(model, "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": o["layers"], **o.get("geometry", {})}))
        self._one = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
        self._few = SamplingParams(temperature=0, max_tokens=3, detokenize=False, ignore_eos=True)
        self._random = random.Random(time.time_ns())
        self._llm = LLM(
            model=model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=o["eager"],
            max_model_len=max(o["sizes"]) + 256, enable_prefix_caching=True, seed=0, disable_log_stats=False, **kw,
        )  # fmt: skip

    def first_token(self, tokens: list[int]) -> dict[str, Any]:
        began = time.perf_counter()
        out = self._llm.generate([{"prompt_token_ids": tokens}], self._one, use_tqdm=False)[0]
        return {
            "ms": round((time.perf_counter() - began) * 1e3, 2),
            "cached": out.num_cached_tokens,
            "token": out.outputs[0].token_ids[0],
        }

    def settle(self) -> None:
        """A few small steps: stores that were put off are submitted, and their end is seen."""
        for _ in range(3):
            ids = self._random.choices(range(3, 128000), k=8)
            self._llm.generate([{"prompt_token_ids": ids}], self._few, use_tqdm=False)
            time.sleep(0.15)

    def forget(self) -> None:
        """Empties the engine's own prefix cache."""
        for _ in range(60):
            if self._llm.reset_prefix_cache():
                return
            self.settle()
        raise SystemExit("the prefix cache could not be reset: blocks stay in use")


def child(o: dict[str, Any]) -> None:
    """Measures one mode; a JSON object a line."""

    def say(row: dict[str, Any]) -> None:
        print("ROW " + json.dumps({"mode": o["mode"], **row}), flush=True)

    began = time.time()
    engine = Engine(o)
    say({"what": "start", "seconds": round(time.time() - began, 1)})
    external = o["mode"] != "none"
    for n in sorted(o["sizes"]):  # every path and size once: kernels, and growing pools
        tokens = prompt(n, -1)
        engine.first_token(tokens)
        engine.settle()
        engine.first_token(tokens)
        if external:
            engine.forget()
            engine.first_token(tokens)
    for n in o["sizes"]:
        for rep in range(o["reps"]):
            tokens = prompt(n, rep)
            kinds = [("cold", 1), ("local", 2), ("store", 3)]
            if o["mode"] == "none":
                kinds = kinds[:2]
            elif o["mode"] == "reader":
                kinds = [("store", 3), ("local", 2)]
            engine.forget()
            for what, count in kinds:
                for _ in range(count):
                    engine.settle()
                    if what == "store":
                        engine.forget()
                    say({"what": what, "tokens": n, "rep": rep, **engine.first_token(tokens)})
    say({"what": "end"})
    if o["mode"] in ("maru", "reader"):
        time.sleep(600)  # until it is killed: nothing of it may be needed any more


def run_child(o: dict[str, Any], log: Path, limit: float) -> list[dict[str, Any]]:
    """Starts a mode's process, takes its rows, and kills it with all that it started."""
    rows: list[dict[str, Any]] = []
    with log.open("w") as said:
        p = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(o)],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,
        )
        deadline = time.time() + limit
        watchdog = subprocess.Popen(["sh", "-c", f"sleep {limit}; kill -9 -{p.pid} 2>/dev/null"], start_new_session=True)
        assert p.stdout is not None
        for line in p.stdout:
            said.write(line)
            if line.startswith("ROW "):
                rows.append(json.loads(line[4:]))
                if rows[-1]["what"] == "end":
                    break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(watchdog.pid, signal.SIGKILL)
        watchdog.wait()
    if not rows or rows[-1]["what"] != "end":
        why = "out of time" if time.time() > deadline else f"exit status {p.returncode}"
        print(f"{o['mode']}: {why}; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-25:]), flush=True)
    return rows


@contextlib.contextmanager
def maru_up(program: str, pool: str, log: Path, *flags: str) -> Iterator[str]:
    """An emulated pool and the daemons for it; the server's address."""
    with log.open("w") as said:
        p = subprocess.Popen(
            [program, "up", "--json", "--cxl-size", pool, "--listen", "127.0.0.1:0", *flags],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        try:
            assert p.stdout is not None
            line = p.stdout.readline()
            if not line:
                raise SystemExit(f"maru up did not start; see {log}")
            Path(f"{log}.json").write_text(line)
            yield json.loads(line)["server"]
        finally:
            p.send_signal(signal.SIGTERM)
            p.wait(30)


def table(rows: list[dict[str, Any]], o: argparse.Namespace) -> int:
    """Prints what was measured and returns the exit status."""

    def of(mode: str, what: str, n: int) -> tuple[float, float] | None:
        v = [r for r in rows if r["mode"] == mode and r["what"] == what and r.get("tokens") == n]
        return (statistics.median(r["ms"] for r in v), min(r["cached"] or 0 for r in v)) if v else None

    def cell(v: tuple[float, float] | None) -> str:
        return "-" if v is None else f"{v[0]:.1f}"

    failed = 0
    print("\nmilliseconds to the first token, median")
    print(
        f"{'tokens':>7} {'cold':>8} {'cold native':>12} {'cold Maru':>10} {'own cache':>10} {'floor':>8} {'native hit':>11} {'Maru hit':>9} {'after kill':>11}"
    )
    for n in o.sizes:
        own = of("maru", "local", n) or of("native", "local", n) or of("none", "local", n)
        floor = own and own[0] + n * KV_BYTES_PER_TOKEN_LAYER * o.layers / LINK_BYTES_PER_SECOND * 1e3
        for mode in ("maru", "reader"):
            hit = of(mode, "store", n)
            if mode in o.modes and (hit is None or hit[1] < n - 512):
                failed = 1
                print(f"{mode}: {n} tokens: {'no measurement' if hit is None else f'only {hit[1]} tokens came from Maru'}")
        print(
            f"{n:>7} {cell(of('none', 'cold', n)):>8} {cell(of('native', 'cold', n)):>12} {cell(of('maru', 'cold', n)):>10} {cell(own):>10} "
            f"{'-' if floor is None else format(floor, '.1f'):>8} {cell(of('native', 'store', n)):>11} {cell(of('maru', 'store', n)):>9} {cell(of('reader', 'store', n)):>11}",
            flush=True,
        )
    tokens: dict[tuple[int, int], set[int]] = {}
    for r in rows:
        if "token" in r:
            tokens.setdefault((r["tokens"], r["rep"]), set()).add(r["token"])
    print(f"prompts whose first token was the same in every mode: {sum(len(t) == 1 for t in tokens.values())} of {len(tokens)}")
    return failed


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    p.add_argument("--maru", default="maru")
    p.add_argument("--modes", type=lambda s: s.split(","), default=["none", "native", "maru", "reader"])
    p.add_argument("--sizes", type=lambda s: [int(x) for x in s.split(",")], default=[8192, 32768, 65536])
    p.add_argument("--reps", type=int, default=2)
    p.add_argument("--pool", default="56G")
    p.add_argument("--region", default="50G")
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--eager", action="store_true")
    p.add_argument("--limit", type=float, default=170, help="seconds of one mode")
    p.add_argument("--extra", type=json.loads, default={}, help="more of kv_connector_extra_config")
    p.add_argument("--out", type=Path, default=Path(tempfile.mkdtemp()))
    a = p.parse_args()
    if a.child:
        child(a.child)
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        server = None
        for mode in a.modes:
            extra: dict[str, Any] = {}
            if mode in ("maru", "reader"):
                if server is None:
                    server = stack.enter_context(maru_up(a.maru, a.pool, a.out / "up.log"))
                extra = {
                    "maru_server_url": server, "maru_storage_backend": "cxl", "maru_cache_namespace": "llama-8b@dummy",
                    "maru_min_hit_tokens": 0,  # every hit is measured
                    # The reader stores next to nothing.
                    "maru_pool_size": a.region if mode == "maru" else "2G", **a.extra,
                }  # fmt: skip
            o = {
                "mode": mode,
                "extra": extra,
                "sizes": a.sizes,
                "reps": a.reps,
                "layers": a.layers,
                "eager": a.eager,
                "native_gib": 40,
            }
            rows += run_child(o, a.out / f"{mode}.log", a.limit)
            (a.out / "rows.json").write_text("\n".join(json.dumps(r) for r in rows))
    return table(rows, a)


if __name__ == "__main__":
    sys.exit(main())
