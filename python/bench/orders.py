"""Orders of a benchmark to its Python side: one JSON object a line, one answer each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["obey"]


def obey(open_state: Callable[[dict[str, Any]], tuple[Any, Any]], do: Callable[[Any, dict[str, Any]], Any]) -> int:
    """Obeys orders until there are no more.

    An order whose "do" begins with "open " makes the state, by open_state, which gives a
    value with it; "close" ends it. All others are do's, with the state that there is, or
    None; ValueError says that one makes no sense now.
    """
    state: Any = None
    _say({"value": {"python": sys.version.split()[0]}})
    for line in sys.stdin:
        try:
            order = json.loads(line)
            value = None
            if order["do"].startswith("open "):
                state, value = open_state(order)
            elif order["do"] == "close" and state is not None:
                state.close()
                state = None
            else:
                value = do(state, order)
            _say({"value": value})
        except Exception as e:
            # The program that gave the order says it, with this process's log.
            _say({"error": f"{type(e).__name__}: {e}"})
    if state is not None:
        state.close()
    return 0


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
