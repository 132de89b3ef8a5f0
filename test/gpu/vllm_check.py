"""Does real vLLM on a GPU answer the same with Maru as without it?

    vllm_check.py --maru PROGRAM [--out DIR]

A tiny seeded Llama with real (random) weights, greedy decoding. Prompts are answered
without a connector, then from Maru in the engine that stored them, from its own prefix
cache, and in a second engine process after the first was killed; for a cxl, a cpu and a
mixed pool. Greedy tokens must be equal and log-probabilities close (a prefill of another
shape rounds otherwise). With checksums off and every stored byte flipped the answers must
differ: the negative control. The exit status is 1 when anything of this does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_ttft import maru_up

PROMPTS = [(1, 200), (2, 1000), (3, 515)]  # seed, tokens
LOGPROB_TOLERANCE = 0.05  # bf16; 0.008 was seen between a prefill of all tokens and one behind a hit


def make_model(path: str) -> None:
    """A Llama of 4 layers."""
    import torch  # type: ignore[import-not-found]
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=1024, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(path)


def child(o: dict[str, Any]) -> None:
    """Answers all prompts, `rounds` times; "forget" empties the engine's own cache first."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
    from vllm.config import KVTransferConfig  # type: ignore[import-not-found]

    kw: dict[str, Any] = {}
    if o["extra"]:
        kw["kv_transfer_config"] = KVTransferConfig(
            kv_connector="MaruKVConnector", kv_connector_module_path="maru_vllm", kv_role="kv_both",
            kv_load_failure_policy="recompute", kv_connector_extra_config=o["extra"],
        )  # fmt: skip
    llm = LLM(
        model=o["model"], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=2048,
        gpu_memory_utilization=0.1, enable_prefix_caching=True, seed=0, **kw,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True, logprobs=1)
    tiny = SamplingParams(temperature=0, max_tokens=2, detokenize=False, ignore_eos=True)

    def settle() -> None:
        for _ in range(3):
            llm.generate([{"prompt_token_ids": [5] * 4}], tiny, use_tqdm=False)
            time.sleep(0.1)

    for number, what in enumerate(o["rounds"]):
        settle()
        if what == "forget":
            for _ in range(60):
                if llm.reset_prefix_cache():
                    break
                settle()
            else:
                raise SystemExit("the prefix cache could not be reset")
        for seed, n in PROMPTS:
            ids = random.Random(seed).choices(range(3, 1000), k=n)
            out = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
            c = out.outputs[0]
            row = {
                "round": number, "prompt": n, "cached": out.num_cached_tokens, "tokens": list(c.token_ids),
                "logprobs": [d[t].logprob for d, t in zip(c.logprobs, c.token_ids)],
            }  # fmt: skip
            print("ROW " + json.dumps(row), flush=True)
    settle()
    print('ROW {"end": true}', flush=True)
    time.sleep(600)  # killed


def answers(o: dict[str, Any], log: Path) -> list[dict[str, Any]]:
    """Runs an engine to its last answer and kills it."""
    rows: list[dict[str, Any]] = []
    with log.open("w") as said:
        p = subprocess.Popen(
            ["timeout", "-s", "KILL", "150", sys.executable, __file__, "--child", json.dumps(o)],
            stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True,
        )  # fmt: skip
        assert p.stdout is not None
        for line in p.stdout:
            said.write(line)
            if line.startswith("ROW "):
                rows.append(json.loads(line[4:]))
                if "end" in rows[-1]:
                    break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()
    if not rows or "end" not in rows.pop():
        raise SystemExit(f"an engine ended early; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-30:]))
    return rows


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    p.add_argument("--maru", default="maru")
    p.add_argument("--backends", type=lambda s: s.split(","), default=["cxl", "mixed", "cpu"])
    p.add_argument("--out", type=Path, default=Path(tempfile.mkdtemp()))
    a = p.parse_args()
    if a.child:
        child(a.child)
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    model = tempfile.mkdtemp()
    make_model(model)
    failed = 0
    base = answers({"model": model, "extra": None, "rounds": ["cold"]}, a.out / "none.log")
    want = {r["prompt"]: r for r in base}

    def judge(name: str, rows: list[dict[str, Any]], hits: dict[int, int]) -> None:
        """hits: at least so many tokens from a cache, by round, for the longest prompt."""
        nonlocal failed
        same = sum(r["tokens"] == want[r["prompt"]]["tokens"] for r in rows)
        far = max(
            (
                abs(x - y)
                for r in rows
                if r["tokens"] == want[r["prompt"]]["tokens"]
                for x, y in zip(r["logprobs"], want[r["prompt"]]["logprobs"])
            ),
            default=0.0,
        )
        cached = {r["round"]: r["cached"] for r in rows if r["prompt"] == 1000}
        missing = {k: cached.get(k, 0) for k, v in hits.items() if (cached.get(k) or 0) < v}
        ok = same == len(rows) and far <= LOGPROB_TOLERANCE and not missing
        failed += not ok
        print(
            f"{'PASS' if ok else 'FAIL'} {name}: {same} of {len(rows)} answers equal, log-probabilities within {far:.4f}, cached by round {cached}",
            flush=True,
        )

    for backend in a.backends:
        with maru_up(a.maru, "1G", a.out / f"up-{backend}.log") as server:
            extra = {
                "maru_server_url": server,
                "maru_storage_backend": backend,
                "maru_cache_namespace": "tiny",
                "maru_kv_chunk_tokens": 128,
                "maru_min_hit_tokens": 0,  # a tiny model computes faster than it loads
            }
            extra |= {"cxl": {"maru_pool_size": "256M"}}.get(backend, {"maru_cpu_pool_size": "256M"})
            extra |= {"maru_cxl_pool_size": "256M", "maru_write_order": "cxl,cpu"} if backend == "mixed" else {}
            o = {"model": model, "extra": extra, "rounds": ["cold", "forget", "own"]}
            judge(f"{backend}, storing engine", answers(o, a.out / f"{backend}-1.log"), {1: 768, 2: 768})
            if backend != "cpu":
                o["rounds"] = ["cold"]
                judge(f"{backend}, another engine after a kill", answers(o, a.out / f"{backend}-2.log"), {0: 768})
            if backend == "cxl":
                # The negative control: pool bytes flipped under an engine that does not check.
                pool = Path(json.loads((a.out / f"up-{backend}.log.json").read_text())["dir"], "pool")
                with pool.open("r+b") as f:
                    f.seek(2 << 20)
                    data = bytearray(f.read(192 << 20))
                    f.seek(2 << 20)
                    f.write(bytes(b ^ 0x55 if b else 0 for b in data))
                flipped = answers({**o, "extra": {**extra, "maru_checksums": False}}, a.out / "flipped.log")
                differ = sum(r["tokens"] != want[r["prompt"]]["tokens"] for r in flipped)
                hit = max(r["cached"] or 0 for r in flipped)
                ok = differ > 0 and hit >= 768
                failed += not ok
                print(
                    f"{'PASS' if ok else 'FAIL'} negative control: {differ} answers differ, up to {hit} tokens from Maru",
                    flush=True,
                )
                checked = answers(o, a.out / "checked.log")
                judge("flipped bytes with checksums on", checked, {})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
