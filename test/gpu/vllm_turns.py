"""vLLM engines in processes of their own that measure in turns; vllm_mix.py tells them what.

    vllm_turns.py JSON

is such an engine: a command a line on standard input, a ROW for each on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm_ttft import Engine, prompt

Spec = tuple[int, str, int, str]
"""A prompt: tokens of its own and their seed, tokens of a shared prefix and its seed."""

CLEAR_SECONDS = 30.0
HOOKS_REST_SECONDS = 0.2  # until timed_connector.py has written


# --- an engine's process ---


class Counting(Engine):
    """An engine that adds up what its connector counts, and can empty its part of the pool."""

    def __init__(self, o: dict[str, Any]) -> None:
        super().__init__(o)
        self._counts: dict[str, Any] = {}
        self._gauges: dict[str, float] = {}
        self._asked: list[list[int]] = []
        self._run_dir = o["extra"].get("maru_run_dir")
        self._hook_times = Path(o["hook_times"]) if o.get("hook_times") else None
        core = self._llm.llm_engine.engine_core
        get_output = core.get_output

        def counted() -> Any:
            # Not from the metrics: LLM.generate of vLLM 0.26 drops the counts of steps without an answer.
            out = get_output()
            stats = out.scheduler_stats and out.scheduler_stats.kv_connector_stats
            if stats and "counters" in stats:  # Maru's
                from maru_vllm.stats import merge

                self._counts = merge(self._counts, stats)
                self._gauges.update(stats["gauges"])
            return out

        core.get_output = counted

    def rest(self) -> None:
        """Settles until no store is under way."""
        for _ in range(40):
            self.settle()
            if not any(self._gauges.get(f"stores_{what}") for what in ("in_flight_bytes", "waiting_chunks")):
                return
        raise SystemExit("stores do not end")

    def run(self, specs: list[Spec], answer: int, wave: int) -> dict[str, Any]:
        """Answers prompts, so many together: seconds, tokens, and what Maru moved for it."""
        from vllm import SamplingParams  # type: ignore[import-not-found]

        asks = [(prompt(shared, prefix) if shared else []) + prompt(own, seed) for own, seed, shared, prefix in specs]
        params = SamplingParams(temperature=0, max_tokens=answer, detokenize=False, ignore_eos=True)
        self._llm.generate([{"prompt_token_ids": [5] * 4}], self._one, use_tqdm=False)  # the GPU is awake
        hooks = self._hooks()
        self._counts = {}
        outs: list[Any] = []
        began = time.perf_counter()
        for i in range(0, len(asks), wave):
            outs += self._llm.generate([{"prompt_token_ids": a} for a in asks[i : i + wave]], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        self.rest()
        self._asked += [[*a, *o.outputs[0].token_ids] for a, o in zip(asks, outs)]
        counts = self._counts.get("counters", {})
        samples = self._counts.get("samples", {})
        return {
            "seconds": round(seconds, 4),
            "tokens": sum(len(a) + len(o.outputs[0].token_ids) for a, o in zip(asks, outs)),
            "ttft": [round(o.metrics.first_token_latency, 5) for o in outs],
            "cached": sum(o.num_cached_tokens or 0 for o in outs),
            "loaded": int(counts.get("load_bytes", 0)),
            "stored": int(counts.get("store_bytes", 0)),
            "hit": {k.partition("|")[2]: int(v) for k, v in counts.items() if k.startswith("hit_tokens|") and v},
            "chunks": {k.partition("|")[2]: int(v) for k, v in counts.items() if k.startswith("store_chunks|") and v},
            "load_failed_tokens": int(counts.get("load_failed_tokens", 0)),
            "lookup_ms": [round(1e3 * s, 3) for s in samples.get("lookup_seconds", [])],
            "store_ms": [round(1e3 * s, 3) for s in samples.get("store_seconds", [])],
            "load_ms": [round(1e3 * s, 3) for s in samples.get("load_seconds", [])],
            "min_hit_tokens": self._gauges.get("min_hit_tokens", 0),
            "hooks": {k: [n - hooks.get(k, (0, 0.0))[0], s - hooks.get(k, (0, 0.0))[1]] for k, (n, s) in self._hooks().items()},
        }

    def _hooks(self) -> dict[str, Any]:
        """Calls and seconds of the connector's methods until now; nothing without timed_connector.py."""
        if self._hook_times is None:
            return {}
        time.sleep(HOOKS_REST_SECONDS)
        out: dict[str, Any] = {}
        for file in self._hook_times.parent.glob(self._hook_times.name + ".*"):
            for call, (n, seconds) in json.loads(file.read_text()).items():
                before = out.get(call, (0, 0.0))
                out[call] = before[0] + n, before[1] + seconds
        return out

    def clear(self) -> dict[str, Any]:
        """Deletes all that was asked so far from Maru."""
        asked, self._asked = self._asked, []
        if not self._run_dir:
            return {"deleted": 0}
        from maru.api import Client, ClientConfig, Code
        from maru.keys import KEY_BYTES, Namespace, root
        from maru_vllm.chain import PrefixChain

        self.rest()
        header = json.loads(next(Path(self._run_dir).glob("explain-*.jsonl")).open().readline())["header"]
        namespace = Namespace(**header["namespace"])
        keys: set[bytes] = set()
        for tokens in asked:
            chain = PrefixChain(root(namespace.id()), namespace.chunk_tokens)
            chain.extend(tokens[: len(tokens) // namespace.chunk_tokens * namespace.chunk_tokens])
            keys.update(chain.key(i) for i in range(len(chain)))
        left, deleted, end = sorted(keys), 0, time.time() + CLEAR_SECONDS
        with Client(ClientConfig(header["server"], namespace, role="scheduler")) as client:
            while left:
                part, left = left[:1024], left[1024:]
                codes = client.delete(b"".join(part))
                deleted += sum(c == Code.OK for c in codes)
                left += [k for k, c in zip(part, codes) if c not in (Code.OK, Code.NOT_FOUND)]
                if time.time() > end:
                    raise SystemExit(f"{len(left)} of {len(keys)} keys of {KEY_BYTES} bytes could not be deleted")
        return {"deleted": deleted}


def child(o: dict[str, Any]) -> None:
    """Obeys a JSON object a line; answers each with a ROW."""
    began = time.time()
    engine = Counting(o)
    row: dict[str, Any] = {"what": "start", "seconds": round(time.time() - began, 1)}
    print("ROW " + json.dumps(row), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "run":
            row = engine.run(**command)
        elif what == "clear":
            row = engine.clear()
        else:
            engine.forget()
            row = {}
        print("ROW " + json.dumps({"what": what, **row}), flush=True)


# --- the process that measures ---


class Child:
    """An engine's process. Each answer has a time limit; close() kills all that it started."""

    def __init__(self, o: dict[str, Any], log: Path, limit: float) -> None:
        self.name, self._log = o["name"], log
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue()
        env = {**os.environ, "VLLM_CACHE_ROOT": o["cache"]}  # engines that start together would write the same files
        if o.get("hook_times"):
            env["MARU_HOOK_TIMES"] = o["hook_times"]
        self._said = log.open("w")
        self._p = subprocess.Popen(
            ["timeout", "-s", "KILL", str(int(limit)), sys.executable, __file__, json.dumps(o)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, start_new_session=True, env=env,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._p.stdout is not None
        for line in self._p.stdout:
            if line.startswith("ROW "):
                self._rows.put(json.loads(line[4:]))
            else:
                self._said.write(line)
                self._said.flush()
        self._rows.put(None)

    def answer(self, limit: float) -> dict[str, Any]:
        """The next row. Raises RuntimeError when there is none."""
        row, end = None, time.time() + limit
        # The pipe alone would not tell: an engine core that outlives its front end holds it open.
        ended = False
        while row is None and not ended:
            ended = self._p.poll() is not None
            with contextlib.suppress(queue.Empty):
                row = self._rows.get(timeout=1.0)
                ended = ended or row is None
            if row is None and time.time() > end:
                raise RuntimeError(f"{self.name}: no answer in {limit:.0f} s; {self.end_of_log()}")
        if row is None:
            raise RuntimeError(f"{self.name}: ended early; {self.end_of_log()}")
        return row

    def ask(self, limit: float, **command: Any) -> dict[str, Any]:
        assert self._p.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # answer() says what happened
            self._p.stdin.write(json.dumps(command) + "\n")
            self._p.stdin.flush()
        return self.answer(limit)

    def end_of_log(self) -> str:
        return f"the end of {self._log}:\n" + "\n".join(self._log.read_text().splitlines()[-25:])

    def memory(self) -> dict[str, int]:
        """Resident bytes of its processes: their own, and shared (a shared pool counts as far as it was touched)."""
        out = {"RssAnon": 0, "RssShmem": 0}
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):  # it may end meanwhile
                if os.getsid(int(status.parent.name)) == self._p.pid:
                    for line in status.read_text().splitlines():
                        name, _, value = line.partition(":")
                        if name in out:
                            out[name] += int(value.split()[0]) << 10
        return out

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._p.pid, signal.SIGKILL)
        self._p.wait()
        self._said.close()


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
