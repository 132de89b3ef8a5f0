"""MaruKVConnector with a clock at each call of the engine: where a step's time goes.

Calls and seconds since start are in the file that MARU_HOOK_TIMES names, with the id of
each process that has a role behind it, whenever the engine made no step for a moment:
{"build_connector_meta": [calls, seconds], ...}.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maru_vllm import MaruKVConnector

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
)

_times: dict[str, list[float]] = {}
_path = Path(f"{os.environ['MARU_HOOK_TIMES']}.{os.getpid()}")
_REST_S = 0.05


def _timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    spent = _times.setdefault(name, [0, 0.0])

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            spent[0] += 1
            spent[1] += time.perf_counter() - began

    return timed


def _write() -> None:
    """Not while the engine works: writing would be a part of what is measured."""
    written = before = None
    while not _ended.wait(_REST_S):
        now = {k: list(v) for k, v in _times.items()}
        if now == before and now != written:
            new = _path.with_name("new-" + _path.name)
            new.write_text(json.dumps(now))
            new.rename(_path)
            written = now
        before = now


class TimedConnector(MaruKVConnector):
    """The same connector."""


for _name in HOOKS:
    if hasattr(MaruKVConnector, _name):
        setattr(TimedConnector, _name, _timed(_name, getattr(MaruKVConnector, _name)))

_ended = threading.Event()
atexit.register(_ended.set)
threading.Thread(target=_write, name="maru-hook-times", daemon=True).start()
