"""An engine process for test_vllm_rows.py: requests step by step, faults in the middle, the engine's own metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from demo.engine import Engine, main


def resident() -> dict[str, int]:
    """This process's resident bytes by what they belong to: the library's Go heap, shared memory, the rest."""
    out = {"go": 0, "shared": 0, "rest": 0}
    kind = "rest"
    with open("/proc/self/smaps") as f:
        for line in f:
            head = line.split(maxsplit=5)
            if "-" in head[0] and not head[0].endswith(":"):
                shared = head[1].endswith("s")
                kind = "shared" if shared else "go" if head[0].startswith("c0") and len(head[0].split("-")[0]) == 10 else "rest"
            elif head[0] == "Rss:":
                out[kind] += int(head[1]) << 10
    return out


class Driver(Engine):
    """demo.engine.Engine with further commands."""

    def __init__(self, model: str, kv_transfer: dict[str, Any], llm: dict[str, Any]) -> None:
        super().__init__(model, kv_transfer, llm)
        self._engine = self._llm.llm_engine

    def do_restart(self, model: str, kv_transfer: dict[str, Any], llm: dict[str, Any]) -> dict[str, Any]:
        """Ends the engine and starts another one in this process, which has imported everything."""
        import gc

        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._llm, self._engine
        gc.collect()
        cleanup_dist_env_and_memory()
        self.__init__(model, kv_transfer, llm)  # type: ignore[misc]
        return {}

    def do_traffic(self, seconds: float, seed: int) -> dict[str, Any]:
        """Random requests on shared prefixes, with aborts and salts; the process's memory by tenths of the time."""
        import random

        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        rng = random.Random(0)
        prefixes = [[rng.randrange(3, 1024) for _ in range(900)] for _ in range(12)]
        rng.seed(seed)
        began, memory, count, cached, live = time.monotonic(), [], 0, 0, []
        while (passed := time.monotonic() - began) < seconds:
            if len(memory) < 10 * passed / seconds:
                memory.append({**resident(), "objects": sys.getallocatedblocks()})
            while len(live) < 6:
                base = rng.choice(prefixes)
                # Whole blocks, so that a step has one of few sizes: the backend keeps something for each size.
                tail = rng.randrange(1, 60)
                ids = [*base[: 32 * rng.randrange(2, 28) - tail], *(rng.randrange(3, 1024) for _ in range(tail))]
                prompt = TokensPrompt(prompt_token_ids=ids)
                if rng.random() < 0.1:
                    prompt["cache_salt"] = "tenant"
                params = SamplingParams(temperature=0, max_tokens=rng.choice([1, 4, 16]), detokenize=False, ignore_eos=True)
                live.append(f"t{count}")
                self._engine.add_request(live[-1], prompt, params)
                count += 1
            for o in self._engine.step():
                if o.finished:
                    cached += o.num_cached_tokens or 0
                    live.remove(o.request_id)
            if rng.random() < 0.02:
                self._engine.abort_request([live.pop(rng.randrange(len(live)))])
            if rng.random() < 0.01:
                self._llm.reset_prefix_cache()
        while self._engine.has_unfinished_requests() or self._worker.busy:
            self._engine.step()
        self.settle()
        return {"requests": count, "cached": cached, "memory": memory}

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    @property
    def _worker(self) -> Any:
        return self.connectors()[1]._worker

    def do_drive(self, requests: Sequence[dict[str, Any]], limit_s: float = 120.0) -> dict[str, Any]:
        """Runs requests together. A request: prompt, max_tokens, salt, prompt_logprobs, at (step of its start),
        abort ("loading", "storing", or a count of answered tokens)."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        end = time.monotonic() + limit_s
        out: dict[str, dict[str, Any]] = {}
        waiting = [dict(r, id=f"d{i}") for i, r in enumerate(requests)]
        aborts: dict[str, Any] = {}
        step = 0
        while waiting or self._engine.has_unfinished_requests() or self._worker.busy:
            for r in [r for r in waiting if r.get("at", 0) <= step]:
                waiting.remove(r)
                prompt = TokensPrompt(prompt_token_ids=r["prompt"])
                if r.get("salt"):
                    prompt["cache_salt"] = r["salt"]
                params = SamplingParams(
                    temperature=0,
                    max_tokens=r.get("max_tokens", 8),
                    logprobs=5,
                    prompt_logprobs=r.get("prompt_logprobs"),
                    detokenize=False,
                    ignore_eos=True,
                )
                internal = self._engine.add_request(r["id"], prompt, params)
                if r.get("abort") is not None:
                    aborts[r["id"]] = (r["abort"], internal or r["id"])
            for o in self._engine.step():
                out[o.request_id] = {
                    "cached": o.num_cached_tokens or 0,
                    "tokens": list(o.outputs[0].token_ids),
                    "logprobs": [{str(k): v.logprob for k, v in sorted(x.items())} for x in o.outputs[0].logprobs or []],
                    "finish": o.outputs[0].finish_reason,
                    "done": o.finished,
                }
            for name, (when, _) in list(aborts.items()):
                hit = (
                    any(load.order.request_id.startswith(name) for load, _, _ in self._worker._load_jobs.values())
                    if when == "loading"
                    else any(s.order.request_id.startswith(name) for parts in self._worker._store_jobs.values() for s, _ in parts)
                    if when == "storing"
                    else len(out.get(name, {}).get("tokens", ())) >= when
                )
                if hit:
                    del aborts[name]
                    self._engine.abort_request([name])
                    out.setdefault(name, {})["aborted"] = True
            step += 1
            if time.monotonic() > end:
                raise TimeoutError(f"{len(waiting)} waiting, {self.do_state()}")
        self.settle()
        return {"results": [out.get(f"d{i}", {}) for i in range(len(requests))], "steps": step}

    def do_state(self) -> dict[str, Any]:
        """What is left when nothing runs: all zeros."""
        scheduler = self._core.scheduler
        role = self.connectors()[0]._scheduler
        w = self._worker
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(scheduler.requests),
            "connector": role.live,
            "storing": len(w._storing) + len(w._store_jobs) + len(w._finishing),
            "bytes": w._load_bytes + w._store_bytes + w._waiting_bytes,
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }

    def do_hold(self, polls: int) -> dict[str, Any]:
        """Jobs are handed out so many polls after they ended; 0 ends it."""
        transfers = self._worker._transfers
        completed = type(transfers).completed
        held: list[list[int]] = []

        def late() -> list[int]:
            held.extend([job, polls] for job in completed(transfers))
            for h in held:
                h[1] -= 1
            out = [job for job, left in held if left <= 0]
            held[:] = [h for h in held if h[1] > 0]
            return out

        transfers.completed = late
        transfers.ready = lambda: bool(held) or type(transfers).ready(transfers)
        return {}

    def do_lose(self, first: int) -> dict[str, Any]:
        """The next load's objects from number first on are deleted between lookup and load."""
        worker, client = self._worker, self._worker._transfers.client
        start = type(worker).start_loads

        def start_loads(orders: Any) -> None:
            if orders.loads:
                client.delete(orders.loads[0].keys[32 * first :])
                del worker.start_loads
            start(worker, orders)

        worker.start_loads = start_loads
        return {}

    def do_pretend(self) -> dict[str, Any]:
        """The next load copies nothing and says that all went well: what a broken connector would do."""
        transfers = self._worker._transfers

        def submit_load(layout: int, keys: bytes, blocks: Any, ends: Any, offsets: Any) -> int:
            del transfers.submit_load
            fake = 1 << 62
            count, completed, codes, ready = len(ends), transfers.completed, transfers.job_codes, transfers.ready

            def done() -> list[int]:
                transfers.completed = completed
                transfers.ready = ready
                return [fake, *completed()]

            def job_codes(job: int) -> Any:
                if job != fake:
                    return codes(job)
                transfers.job_codes = codes
                return [0] * count

            transfers.completed, transfers.job_codes, transfers.ready = done, job_codes, lambda: True
            return fake

        transfers.submit_load = submit_load
        return {}

    def do_signal_at(self, what: str, pid: int, number: int) -> dict[str, Any]:
        """Sends a signal when the next lookup, load or store is about to be made."""
        import os

        owner, name = {
            "lookup": (self.connectors()[0]._lookup, "probe"),
            "load": (self._worker._transfers, "submit_load"),
            "store": (self._worker._transfers, "submit_store"),
        }[what]
        call = getattr(type(owner), name)

        def first(*args: Any, **kw: Any) -> Any:
            delattr(owner, name)
            os.kill(pid, number)
            return call(owner, *args, **kw)

        setattr(owner, name, first)
        return {}

    def do_metrics(self) -> dict[str, Any]:
        """Every sample of the connector's metrics, and of the engine's own that are compared with them."""
        from prometheus_client import REGISTRY

        values: dict[str, float] = {}
        for family in REGISTRY.collect():
            if not family.name.startswith(("vllm:maru_", "vllm:external_prefix_cache", "vllm:num_preemptions")):
                continue
            for s in family.samples:
                if s.name.endswith(("_created", "_bucket")):
                    continue
                label = next((v for k, v in s.labels.items() if k in ("outcome", "medium", "reason", "result")), "")
                values[f"{s.name}|{label}" if label else s.name] = values.get(s.name, 0) + s.value
        return {"metrics": values}

    def do_settings(self, **fields: Any) -> dict[str, Any]:
        """Changes what the roles go by, between rows."""
        role = self.connectors()[0]._scheduler
        for name, value in fields.items():
            if name == "lookup_timeout_s":
                role._timeout_s = value
                self.connectors()[0]._lookup._timeout_s = value
            else:
                raise ValueError(name)
        return {}


if __name__ == "__main__":
    raise SystemExit(main(Driver))
