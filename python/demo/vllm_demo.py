"""The demo: two real vLLM engines on this CPU, each prefix computed once.

Engine A computes prompts and stores their KV through MaruKVConnector on the cxl
backend; engine B, another process, reads it: while A lives, after maru-server was
killed with SIGKILL and started again, and after A was killed with SIGKILL. The
answers of B must equal, bit for bit in tokens and logprobs, those that A gave
from its own prefix cache; the default lengths make both hits equally long. Exit
status 1 when they differ or when a prompt read nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from demo import tiny_model
from demo.processes import EngineProcess, daemons

BLOCK_TOKENS = 128  # the CPU backend's default
CHUNK_TOKENS = 256
ANSWER_TOKENS = 16
TWO_HEARTBEATS_S = 2.0
LIVE, SERVER_KILLED, WRITER_KILLED = "A lives", "server killed", "A killed"


def kv_transfer(address: str) -> dict[str, Any]:
    """The complete setting of the connector, as a user writes it."""
    return {
        "kv_connector": "MaruKVConnector",
        "kv_connector_module_path": "maru_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "maru_server_url": address,
            "maru_storage_backend": "cxl",
            "maru_pool_size": "128M",
            "maru_cache_namespace": f"{tiny_model.NAME}@1",
            "maru_kv_chunk_tokens": CHUNK_TOKENS,
            "maru_min_hit_tokens": 0,  # a tiny model computes faster than it loads
        },
    }


def same(own: dict[str, Any], read: dict[str, Any]) -> bool:
    """Tokens, and where both runs computed the same count of tokens logprobs too, bit for bit.

    A prefill of another length has other shapes, so its sums may round otherwise,
    with or without a cache.
    """
    if own["cached"] == read["cached"] and own["logprobs"] != read["logprobs"]:
        return False
    return bool(own["tokens"] == read["tokens"])


def run(cache: Path, directory: Path, prompt_tokens: list[int], crash_tokens: int) -> dict[str, Any]:
    """Runs both engines and returns the table's facts."""
    model = cache / tiny_model.NAME
    rng = random.Random(7)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(3, tiny_model.VOCABULARY) for _ in range(tokens)]

    # Each prompt of its own: what B has read once it would find in its own prefix cache.
    plan = [(LIVE, prompt(n)) for n in prompt_tokens]
    plan += [(SERVER_KILLED, prompt(crash_tokens)), (WRITER_KILLED, prompt(crash_tokens))]
    prompts = [p for _, p in plan]
    warm = [prompt(300)]

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with daemons(directory, "1G") as (address, _, server):
        engines = [EngineProcess(directory / f"engine-{n}.log") for n in "ab"]
        try:
            a, b = engines
            say("importing vLLM in two processes ...")
            version = a.ready()["ready"]
            tiny_model_written = not (model / "complete").exists()
            if tiny_model_written:
                say("writing the tiny model ...")
                os.spawnv(os.P_WAIT, sys.executable, [sys.executable, str(Path(tiny_model.__file__)), str(model)])
            say("engine A: compute and store ...")
            start = {"model": str(model), "kv_transfer": kv_transfer(address), "llm": {"block_size": BLOCK_TOKENS}}
            a("start", **start)
            a("run", prompts=warm, max_tokens=ANSWER_TOKENS)
            cold = a("run", prompts=prompts, max_tokens=ANSWER_TOKENS)["results"]
            local = a("run", prompts=prompts, max_tokens=ANSWER_TOKENS)["results"]
            stored = a("counters")["counters"]
            say("engine B: read what A stored ...")
            b.ready()
            b("start", **start)
            b("run", prompts=[[t % 900 + 3 for t in warm[0]]], max_tokens=ANSWER_TOKENS)
            loaded = []
            for when in (LIVE, SERVER_KILLED, WRITER_KILLED):
                if when == SERVER_KILLED:
                    say("maru-server is killed and started again; engine B: read what A stored before ...")
                    server.kill()
                    server.start()
                    time.sleep(TWO_HEARTBEATS_S)
                elif when == WRITER_KILLED:
                    say("engine A is killed; engine B: read what it has left ...")
                    a.kill()
                loaded += b("run", prompts=[p for w, p in plan if w == when], max_tokens=ANSWER_TOKENS)["results"]
            read = b("counters")["counters"]
            b.stop()
        finally:
            for engine in engines:
                engine.kill()
    rows = [
        {
            "when": when,
            "prompt_tokens": c["prompt_tokens"],
            "tokens_from_maru": m["cached"],
            "ttft_cold_ms": round(1000 * c["ttft"], 1),
            "ttft_own_prefix_cache_ms": round(1000 * o["ttft"], 1),
            "ttft_from_maru_ms": round(1000 * m["ttft"], 1),
            "tokens_own_prefix_cache": o["cached"],
            "equal": same(o, m),
        }
        for (when, _), c, o, m in zip(plan, cold, local, loaded, strict=True)
    ]
    library_a, library_b = stored["library"], read["library"]
    return {
        "vllm": version,
        "rows": rows,
        "stored_bytes": stored["stored_bytes"],
        "stored_gb_per_s": _rate(stored["stored_bytes"], library_a["store_seconds"]),
        "loaded_bytes": read["loaded_bytes"],
        "loaded_gb_per_s": _rate(read["loaded_bytes"], library_b["load_seconds"]),
        "answers_equal": all(r["equal"] for r in rows),
        "read_from_maru": all(r["tokens_from_maru"] > 0 for r in rows) and read["loaded_bytes"] > 0,
    }


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds / 1e9, 2) if seconds > 0 else 0.0


def table(facts: dict[str, Any]) -> str:
    """The demo's one table."""
    head = ("B reads when", "prompt tokens", "from Maru", "TTFT cold", "own cache", "from Maru", "equal")
    lines = [head] + [
        (
            r["when"],
            str(r["prompt_tokens"]),
            str(r["tokens_from_maru"]),
            f"{r['ttft_cold_ms']:.0f} ms",
            f"{r['ttft_own_prefix_cache_ms']:.0f} ms",
            f"{r['ttft_from_maru_ms']:.0f} ms",
            "yes" if r["equal"] else "NO",
        )
        for r in facts["rows"]
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)
    return (
        f"{text}\n\nstored {facts['stored_bytes']} bytes at {facts['stored_gb_per_s']} GB/s, "
        f"loaded {facts['loaded_bytes']} bytes at {facts['loaded_gb_per_s']} GB/s, "
        f"answers equal: {'yes' if facts['answers_equal'] else 'NO'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="directory that keeps the tiny model")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[1100, 2100, 3900])
    parser.add_argument("--crash-tokens", type=int, default=2100, help="prompt length after a program was killed")
    parser.add_argument("--keep", type=Path, help="directory for logs; default: a temporary one, removed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    started = time.monotonic()
    # SIGTERM ends what was started, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="maru-demo-") as temporary:
        directory = args.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        facts = run(args.cache, directory, args.prompt_tokens, args.crash_tokens)
    facts["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(facts) if args.json else table(facts))
    if not facts["read_from_maru"]:
        print("FAILED: a prompt read nothing from Maru", file=sys.stderr)
    if not facts["answers_equal"]:
        print("FAILED: answers differ", file=sys.stderr)
    return 0 if facts["read_from_maru"] and facts["answers_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
