"""What Maru costs and gives real vLLM engines on one GPU, measured in turns.

    vllm_mix.py --maru PROGRAM [--engines off,cpu,cxl,mixed] [--pairs 10] [--rounds 2]
                [--workloads reuse,shared,low,pressure] [--pool-gib 12] [--eager] [--out DIR]

One engine process each, all alive together, one of them at work at a time:

    off      no connector: the engine's own prefix cache only
    cpu      MaruKVConnector on memory of its own
    cxl      on a shared pool (a file on /dev/shm)
    mixed    half of each; the total is the same for all three
    null     a connector that does nothing: what vLLM charges for having one
    native   vLLM's own offload to as much host memory
    NAME     by --variant 'NAME={"maru_device_staging_size": "16M"}': cxl with other settings

With --hooks NAME such an engine says what each call of its connector took (a little more
than without). A variant with chunks longer than a pair's prompts stores nothing, which
tells the calls from the copies.

First the pairs: batches of new prompts, where nothing can hit, with the connector and
without it, the order turning; `off` runs twice a round, so that its ratio to itself says
what noise is. Then the tables (OBS-08), with prompts that are equal for every engine:

    reuse     prompts asked a second time, the engine's own cache forgotten
    shared    prompts with one long prefix that was asked before, likewise
    low       prompts of which few were asked before, likewise
    pressure  a working set of 2.7 pools asked twice in order; nothing is forgotten

Prompts of a table come in waves that are answered together. TTFT runs from a request's
arrival, waiting for its wave included; throughput counts the tokens of prompts and
answers. The pools are emptied between workloads. The exit status is 1 when an engine
that should hit does not, stores too little in the pairs, or ends early.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_ttft import KV_BYTES_PER_TOKEN_LAYER, maru_up
from vllm_turns import Child, Spec

GIB = 1 << 30
MARU = ("cpu", "cxl", "mixed")  # engines with its connector


class Measuring:
    """The engines in turns, and the rows that they gave."""

    def __init__(self, a: argparse.Namespace, engines: list[Child], deadline: float) -> None:
        self.a, self.engines, self._deadline = a, engines, deadline
        self.rows: list[dict[str, Any]] = []
        self.by_name = {e.name: e for e in engines}
        self._turn = 0

    def ask(self, e: Child, **command: Any) -> dict[str, Any]:
        return e.ask(min(self.a.limit, self._deadline - time.time()), **command)

    def turn(self) -> list[Child]:
        """All engines, beginning with another one each time."""
        k = self._turn % len(self.engines)
        self._turn += 1
        return self.engines[k:] + self.engines[:k]

    def run(self, e: Child, what: str, label: str, specs: list[Spec], wave: int, answer: int = 0, **more: Any) -> None:
        row = self.ask(e, do="run", specs=specs, wave=wave, answer=answer or self.a.answer)
        self.rows.append({"workload": what, "engine": label, **more, **row})
        (self.a.out / "rows.json").write_text("\n".join(json.dumps(r) for r in self.rows))

    def clear(self) -> None:
        for e in self.engines:
            self.ask(e, do="clear")

    def warm_up(self) -> None:
        """Each size computed, stored and loaded once: kernels are compiled, and what a token costs is learned."""
        a = self.a
        sizes = {a.pair_tokens, a.reuse[1], a.shared[1] + a.shared[2], a.low[1], a.pressure[1]}
        specs: list[Spec] = [(n, f"warm {n} {i}", 0, "") for n in sorted(sizes) for i in range(2)]
        for e in self.engines:
            self.run(e, "warm", e.name, specs, 2)
            self.ask(e, do="forget")
            self.run(e, "warm", e.name, specs, 2)
        self.clear()

    def pairs(self) -> None:
        """New prompts, and the same number of tokens for all."""
        a = self.a
        arms = [(e.name, e) for e in self.engines if e.name in ("off", *a.pair_engines)] + [("off again", self.by_name["off"])]
        for i in range(a.pairs):
            k = i % len(arms)
            order = arms[k:] + arms[:k]
            for label, e in order if i // len(arms) % 2 == 0 else reversed(order):
                specs: list[Spec] = [(a.pair_tokens, f"pair {i} {label} {j}", 0, "") for j in range(a.pair_prompts)]
                self.run(e, "pairs", label, specs, len(specs), a.pair_answer, pair=i)
        self.clear()

    def workload(self, what: str) -> None:
        """Prepares a workload in every engine, measures it and empties the pools."""
        count, tokens = getattr(self.a, what)[:2]
        shared = self.a.shared[2] if what == "shared" else 0
        known = self.a.low[2] if what == "low" else count
        before: list[Spec] = [(tokens, f"{what} {i}", shared, f"{what} prefix") for i in range(1 if shared else known)]
        for e in self.turn():
            self.run(e, f"{what}, first", e.name, before, self.a.wave)
        for r in range(1 if what == "pressure" else self.a.rounds):
            measured = before
            if shared:  # another end behind the prefix each time
                measured = [(tokens, f"{what} {r} {i}", shared, f"{what} prefix") for i in range(count)]
            elif known < count:
                measured = [*before, *((tokens, f"{what} {r} {i}", 0, "") for i in range(count - known))]
                random.Random(r).shuffle(measured)
            for e in self.turn():
                if what != "pressure":
                    self.ask(e, do="forget")
                self.run(e, what, e.name, measured, self.a.wave, round=r)
                if what == "reuse" and e.name == "off":
                    self.run(e, what, "off, own cache", measured, self.a.wave, round=r)
        self.clear()


# --- what is printed ---


def percentile(values: list[float], p: float) -> float:
    return sorted(values)[max(0, math.ceil(p * len(values)) - 1)]


def print_pairs(rows: list[dict[str, Any]], a: argparse.Namespace) -> list[str]:
    """The ratios of each engine to `off`; returns what is wrong."""
    wrong = []
    speed = {(r["pair"], r["engine"]): r["tokens"] / r["seconds"] for r in rows}
    want = a.pairs * a.pair_prompts * a.pair_tokens * a.token_bytes
    print(f"\npairs: {a.pair_prompts} new prompts of {a.pair_tokens} tokens and {a.pair_answer} of answer, ratio to `off`")
    for name in ["off", *(n for n in a.pair_engines if n in a.engines), "off again"]:
        ratios = [v / speed[i, "off"] for (i, engine), v in sorted(speed.items()) if engine == name and (i, "off") in speed]
        if len(ratios) < 2:
            continue
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        mine = [r for r in rows if r["engine"] == name]
        stored, hit = sum(r["stored"] for r in mine), sum(sum(r["hit"].values()) for r in mine)
        print(
            f"  {name:<10} median {middle:.4f} of {len(ratios)}, quartiles {low:.4f} {high:.4f}, min {min(ratios):.4f}, max {max(ratios):.4f}; "
            f"median {statistics.median(v for (_, e), v in speed.items() if e == name):.0f} tokens/s, "
            f"{1e3 * statistics.median(max(r['ttft']) for r in mine):.1f} ms to the last first token, "
            f"{1e3 * statistics.median(r['seconds'] - max(r['ttft']) for r in mine):.1f} from there; stored {stored / GIB:.3f} of {want * len(ratios) / a.pairs / GIB:.3f} GiB, hit {hit} tokens, "
            f"a lookup {mean_of(mine, 'lookup_ms'):.2f} ms, a store {mean_of(mine, 'store_ms'):.1f} ms"
        )
        for call, (n, seconds) in sorted(sum_hooks(mine).items(), key=lambda x: -x[1][1]):
            print(f"    {call:<31} {n / len(mine):7.1f} calls {1e6 * seconds / max(n, 1):8.1f} us {1e3 * seconds / len(mine):8.2f} ms a batch")
        if name in MARU and (stored < 0.5 * want * len(ratios) / a.pairs or hit):
            wrong.append(f"pairs: {name} stored less than half of what it computed, or hit what nobody stored")
    return wrong


def mean_of(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(v) if (v := [x for r in rows for x in r[name]]) else 0.0


def sum_hooks(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Calls and seconds of each method of the connector."""
    out: dict[str, tuple[float, float]] = {}
    for r in rows:
        for call, (n, seconds) in r["hooks"].items():
            before = out.get(call, (0.0, 0.0))
            out[call] = before[0] + n, before[1] + seconds
    return out


def print_table(what: str, rows: list[dict[str, Any]], a: argparse.Namespace) -> list[str]:
    """One workload; returns what is wrong."""
    wrong = []
    print(f"\n{what} {getattr(a, what)}, waves of {a.wave}, answers of {a.answer} tokens; all rounds together")
    print(
        f"  {'engine':<15} {'TTFT p50':>9} {'p95 ms':>9} {'tokens/s':>9} {'loaded':>8} {'stored GiB':>10} "
        f"{'hit tokens':>10} {'of cpu':>7} {'of cxl':>7} {'cached':>7} {'lookup':>7} {'load ms':>8} {'min hit':>8}"
    )
    for name in [*a.engines, "off, own cache"]:
        if not (mine := [r for r in rows if r["engine"] == name]):
            continue
        ttft = [1e3 * t for r in mine for t in r["ttft"]]
        hit = {m: sum(r["hit"].get(m, 0) for r in mine) for m in ("cpu", "cxl")}
        print(
            f"  {name:<15} {percentile(ttft, 0.5):>9.1f} {percentile(ttft, 0.95):>9.1f} "
            f"{sum(r['tokens'] for r in mine) / sum(r['seconds'] for r in mine):>9.0f} {sum(r['loaded'] for r in mine) / GIB:>8.3f} "
            f"{sum(r['stored'] for r in mine) / GIB:>10.3f} {sum(hit.values()):>10} {hit['cpu']:>7} {hit['cxl']:>7} "
            f"{sum(r['cached'] for r in mine):>7} {mean_of(mine, 'lookup_ms'):>7.2f} {mean_of(mine, 'load_ms'):>8.2f} {mine[-1]['min_hit_tokens']:>8.0f}"
        )
        want = {"reuse": 0.8 * len(mine) * a.reuse[0] * a.reuse[1], "shared": 0.8 * len(mine) * a.shared[2]}.get(what, 0)
        if (name in MARU or name in a.variant) and sum(hit.values()) < want:
            wrong.append(f"{what}: {name} hit {sum(hit.values())} tokens, {want:.0f} were to be expected")
        if failed := sum(r["load_failed_tokens"] for r in mine):
            wrong.append(f"{what}: loads of {failed} tokens failed in {name}")
    return wrong


def options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return [x for x in text.split(",") if x]

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    def variant(text: str) -> tuple[str, dict[str, Any]]:
        name, _, settings = text.partition("=")
        return name, dict(json.loads(settings))

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--maru", default="maru")
    p.add_argument("--engines", type=names, default=["off", "cpu", "cxl", "mixed"], help="off is one of them")
    p.add_argument("--workloads", type=names, default=["reuse", "shared", "low", "pressure"])
    p.add_argument("--pairs", type=int, default=10, help="0: none")
    p.add_argument("--pair-engines", type=names, default=["cxl", "cpu"])
    p.add_argument("--pair-prompts", type=int, default=8)
    p.add_argument("--pair-tokens", type=int, default=1024)
    p.add_argument("--pair-answer", type=int, default=64)
    # Less than the engine's own cache and more than half a pool: mixed has it in both.
    p.add_argument("--reuse", type=numbers, default=[15, 4096], help="prompts,tokens")
    p.add_argument("--shared", type=numbers, default=[24, 512, 6144], help="prompts,own tokens,tokens of the prefix")
    p.add_argument("--low", type=numbers, default=[24, 2048, 3], help="prompts,tokens,of them asked before")
    p.add_argument("--pressure", type=numbers, default=[64, 4096], help="prompts,tokens")
    p.add_argument("--rounds", type=int, default=2, help="measured rounds of a workload; pressure has one")
    p.add_argument("--answer", type=int, default=16)
    p.add_argument("--wave", type=int, default=4, help="prompts that are asked together")
    p.add_argument("--pool-gib", type=float, default=12, help="Maru's memory of one engine")
    p.add_argument("--kv-gib", type=float, default=8, help="the engine's own KV memory")
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--geometry", type=json.loads, default={}, help="more of the model's configuration")
    p.add_argument("--llm", type=json.loads, default={}, help="more arguments of LLM")
    p.add_argument("--variant", type=variant, action="append", default=[], help="NAME=settings in JSON")
    p.add_argument("--hooks", type=names, default=[], help="engines whose connector is timed, call by call")
    p.add_argument("--extra", type=json.loads, default={}, help="more of kv_connector_extra_config")
    p.add_argument("--eager", action="store_true")
    p.add_argument("--start-limit", type=float, default=200, help="seconds until all engines have started")
    p.add_argument("--limit", type=float, default=60, help="seconds of one command")
    p.add_argument("--total-limit", type=float, default=400, help="seconds of everything: what is measured by then is printed")
    p.add_argument("--out", type=Path, default=Path(tempfile.mkdtemp()))
    a = p.parse_args()
    a.variant = dict(a.variant)
    a.engines += [n for n in a.variant if n not in a.engines]
    a.pair_engines += [n for n in a.variant if n not in a.pair_engines]
    return a


def start(a: argparse.Namespace, stack: contextlib.ExitStack) -> list[Child]:
    """Starts a `maru up` for each pool and all engines at once."""
    work = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    whole, slack = int(a.pool_gib * GIB), max(64 << 20, int(a.pool_gib * GIB) // 64)
    engines = []
    for name in a.engines:
        extra: dict[str, Any] = {}
        kind = "cxl" if name in a.variant else name
        if kind in MARU:
            parts = {"cpu": (whole, 0), "cxl": (0, whole), "mixed": (whole // 2, whole // 2)}[kind]
            cxl = str(parts[1] + slack) if parts[1] else "0"
            server = stack.enter_context(maru_up(a.maru, cxl, a.out / f"up-{name}.log", "--cpu-size", str(parts[0] + slack)))
            extra = {
                "maru_server_url": server, "maru_storage_backend": kind, "maru_cache_namespace": "llama-8b@dummy",
                "maru_run_dir": str(work / f"run-{name}"),
            }  # fmt: skip
            extra |= {"maru_cpu_pool_size": parts[0]} if parts[0] else {}
            extra |= {"maru_cxl_pool_size": parts[1]} if parts[1] else {}
            extra |= {"maru_pool_size": parts[1]} if kind == "cxl" else {}
            extra |= a.extra | a.variant.get(name, {})
        o = {
            "name": name, "mode": "none" if name == "off" else name, "extra": extra,
            "hook_times": str(work / f"hooks-{name}") if name in a.hooks else "", "layers": a.layers, "eager": a.eager,
            "sizes": [a.pair_tokens, a.reuse[1], a.shared[1] + a.shared[2], a.low[1], a.pressure[1]],
            "geometry": a.geometry, "native_gib": a.pool_gib, "cache": str(work / f"cache-{name}"),
            "llm": {"kv_cache_memory_bytes": int(a.kv_gib * GIB), "gpu_memory_utilization": 0.1, **a.llm},
        }  # fmt: skip
        engines.append(Child(o, a.out / f"{name}.log", a.total_limit + 30))
        stack.callback(engines[-1].close)
    end = time.time() + a.start_limit
    for e in engines:
        print(f"{e.name} started in {e.answer(end - time.time())['seconds']} s", flush=True)
    return engines


def main() -> int:
    a = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines are killed
    a.out.mkdir(parents=True, exist_ok=True)
    a.token_bytes = a.layers * KV_BYTES_PER_TOKEN_LAYER
    if a.geometry:
        a.token_bytes = a.layers * 4 * a.geometry["num_key_value_heads"] * a.geometry["head_dim"]
    began, wrong = time.time(), []
    steps = ["pairs"] * (a.pairs > 0) + a.workloads
    with contextlib.ExitStack() as stack:
        m = Measuring(a, [], 0)
        try:
            m = Measuring(a, start(a, stack), began + a.total_limit)
            for what in ["warm_up", *steps]:
                since = time.time()
                m.workload(what) if what in a.workloads else getattr(m, what)()
                print(f"{what}: {time.time() - since:.0f} s", flush=True)
            memory = {e.name: e.memory() for e in m.engines}
            print(
                "resident GiB, own and shared:",
                ", ".join(f"{k} {v['RssAnon'] / GIB:.1f} {v['RssShmem'] / GIB:.1f}" for k, v in memory.items()),
            )
        except RuntimeError as e:
            wrong.append(str(e))
        for what in steps:
            if rows := [r for r in m.rows if r["workload"] == what]:
                wrong += print_pairs(rows, a) if what == "pairs" else print_table(what, rows, a)
        print(f"\n{time.time() - began:.0f} s in all; rows: {a.out / 'rows.json'}")
        print("\n".join(f"WRONG {w}" for w in wrong) or "nothing is wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
