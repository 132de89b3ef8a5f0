"""One real vLLM engine on CPU, told what to do by JSON lines on standard input.

Both of the connector's roles live in this process
(VLLM_ENABLE_V1_MULTIPROCESSING=0), so that an engine starts in seconds and its
counters can be read. vLLM writes to standard output; answers go to the file
descriptor given as --answers.

Commands: {"do": "start", "model": DIR, "kv_transfer": {...}, "llm": {...}};
{"do": "run", "prompts": [[ids]], "max_tokens": n, "salt": s};
{"do": "reset"} drops the engine's own prefix cache; {"do": "counters"};
{"do": "watch_bytes"}, then {"do": "bytes"} gives digests of the KV bytes of
chunks that were stored and loaded, by key; {"do": "stop"}.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
from typing import Any


class Engine:
    """A vLLM engine with MaruKVConnector."""

    def __init__(self, model: str, kv_transfer: dict[str, Any], llm: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        kwargs: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 4096,
            "enable_prefix_caching": True,
            "seed": 0,
            "disable_log_stats": False,
        }
        kwargs.update(llm)
        if kv_transfer:
            kwargs["kv_transfer_config"] = KVTransferConfig(**kv_transfer)
        self._stored: dict[str, str] = {}
        self._loaded: dict[str, str] = {}
        self._tensors: list[Any] = []
        if kv_transfer:
            self._keep_tensors()
        self._llm = LLM(model=model, **kwargs)

    def _keep_tensors(self) -> None:
        """Takes note of the KV tensors when the engine registers them."""
        from maru_vllm import MaruKVConnector

        register, tensors = MaruKVConnector.register_kv_caches, self._tensors

        def keep(connector: Any, kv_caches: dict[str, Any]) -> None:
            tensors[:] = [kv_caches[name] for name in connector._shape.layer_names]
            register(connector, kv_caches)

        MaruKVConnector.register_kv_caches = keep

    def run(self, prompts: list[list[int]], max_tokens: int, salt: str = "", together: bool = False) -> list[dict[str, Any]]:
        """Answers prompts, one after the other or together: tokens, logprobs, cached tokens, seconds to the first token."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=5, detokenize=False, ignore_eos=True)
        inputs = []
        for ids in prompts:
            prompt = TokensPrompt(prompt_token_ids=ids)
            if salt:
                prompt["cache_salt"] = salt
            inputs.append(prompt)
        outputs = []
        for batch in [inputs] if together else [[i] for i in inputs]:
            outputs += self._llm.generate(batch, params, use_tqdm=False)
        return [
            {
                "prompt_tokens": len(o.prompt_token_ids or ()),
                "cached": o.num_cached_tokens or 0,
                "tokens": list(o.outputs[0].token_ids),
                "logprobs": [{str(k): v.logprob for k, v in sorted(step.items())} for step in o.outputs[0].logprobs or []],
                "finish": o.outputs[0].finish_reason,
                "ttft": o.metrics.first_token_latency if o.metrics else 0.0,
            }
            for o in outputs
        ]

    def connectors(self) -> tuple[Any, Any]:
        """(scheduler role, worker role) of the connector in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return self._llm.llm_engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()

    def counters(self) -> dict[str, Any]:
        """The worker role's counters and the library's own."""
        _, worker = self.connectors()
        counters: dict[str, Any] = dataclasses.asdict(worker.counters)
        counters["library"] = worker.library_stats()
        return counters

    def watch_bytes(self) -> None:
        """From now on keeps a digest of the KV bytes of every chunk that is stored or loaded whole."""
        _, connector = self.connectors()
        worker = connector._worker
        tensors = self._tensors
        stored, loaded = self._stored, self._loaded
        size = worker._chunk_blocks

        def digest(blocks: list[int]) -> str:
            h = hashlib.sha256()
            for b in blocks:
                for t in tensors:
                    h.update(t[b].contiguous().view(-1).numpy().tobytes())
            return h.hexdigest()

        start_stores, end_load = worker.start_stores, worker._end_load_part

        def start(orders: Any) -> None:
            for store in orders.stores:
                for i in range(len(store.keys) // 32):
                    stored[store.keys[32 * i : 32 * i + 32].hex()] = digest(store.blocks[i * size : (i + 1) * size])
            start_stores(orders)

        def end(load: Any, first: int, stop: int, codes: Any) -> None:
            order = load.order
            for i in range(first, stop):
                if codes[i - first] == 0 and order.counts[i] == size:
                    loaded[order.keys[32 * i : 32 * i + 32].hex()] = digest(order.blocks[load.ends[i] : load.ends[i + 1]])
            end_load(load, first, stop, codes)

        worker.start_stores, worker._end_load_part = start, end

    def settle(self, limit_s: float = 30.0) -> None:
        """Steps until no request is left: blocks of finished ones are held until their stores have ended."""
        engine = self._llm.llm_engine
        end = time.monotonic() + limit_s
        while engine.engine_core.engine_core.scheduler.requests and time.monotonic() < end:
            engine.step()

    def reset(self) -> bool:
        """Drops the engine's own prefix cache."""
        self.settle()
        return bool(self._llm.reset_prefix_cache())

    def stop(self) -> None:
        """Ends the engine and with it both roles of the connector."""
        self._llm.llm_engine.engine_core.shutdown()


def environment(cache_gib: int = 1) -> dict[str, str]:
    """Environment of an engine process: offline, one thread, in one process."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        # Eager all through: the one function that the engine would still compile,
        # which ranks logprobs, costs a run of the C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }


def main(kind: type[Engine] = Engine) -> int:
    """Obeys commands until there are no more. kind: an engine with further commands do_NAME."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, required=True, help="file descriptor for answers")
    answers = os.fdopen(parser.parse_args().answers, "w", buffering=1)

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")

    started = time.monotonic()
    import vllm

    say(ready=vllm.__version__, seconds=round(time.monotonic() - started, 1))
    engine: Engine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        try:
            if what == "start":
                started = time.monotonic()
                engine = kind(command["model"], command.get("kv_transfer", {}), command.get("llm", {}))
                say(ok=True, seconds=round(time.monotonic() - started, 1))
            elif what == "stop":
                if engine is not None:
                    engine.stop()
                say(ok=True)
                return 0
            elif engine is None:
                say(error=f"{what} before start")
            elif what == "run":
                say(ok=True, results=engine.run(**command))
            elif what == "counters":
                say(ok=True, counters=engine.counters())
            elif what == "reset":
                say(ok=engine.reset())
            elif what == "watch_bytes":
                engine.watch_bytes()
                say(ok=True)
            elif what == "bytes":
                say(ok=True, stored=engine._stored, loaded=engine._loaded)
            elif hasattr(engine, f"do_{what}"):
                say(ok=True, **getattr(engine, f"do_{what}")(**command))
            else:
                say(error=f"unknown command {what}")
        except Exception as e:  # noqa: BLE001  (the caller decides what a failure of the engine means)
            say(error=f"{type(e).__name__}: {e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
