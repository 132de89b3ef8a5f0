"""Two processes on one pool; a writer that was killed; fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import CHUNK, POOL, ROOT, Child, System
from maru import MaruConfig, MaruHandler
from maru.errors import ForkedError
from test_handler import eventually, put, value

Key = Callable[[object], str]

HEAD = (
    "from maru import *\n"
    f"h = MaruHandler(MaruConfig(url, pool_size={POOL}, chunk_size_bytes={CHUNK}))\n"
    "assert h.connect()\n"
    "def put(k, v):\n"
    "    a = h.alloc(len(v)); a.buf[:] = v\n"
    "    return h.store(k, a)\n"
)


def config(system: System) -> MaruConfig:
    return MaruConfig(server_url=system.url, pool_size=POOL, chunk_size_bytes=CHUNK)


def line(p: subprocess.Popen[str]) -> str:
    assert p.stdout is not None
    return p.stdout.readline().rstrip("\n")


def test_two_processes_on_one_pool(system: System, child: Child, key: Key) -> None:
    writer = child(
        HEAD + "for i in range(20):\n"
        "    assert put(f'{args[0]}/{i}', bytes([i]) * (100 + i))\n"
        "print('stored')\n"
        "sys.stdin.readline()\n"
        "print(bytes(h.retrieve(args[0] + '/back').view).decode())\n"
        "h.close()\n",
        key("p"),
    )
    assert line(writer) == "stored"
    with MaruHandler(config(system)) as h:
        keys = [f"{key('p')}/{i}" for i in range(20)]
        assert h.batch_exists(keys) == [True] * 20
        infos = h.batch_retrieve(keys)
        assert [bytes(i.view) for i in infos if i] == [bytes([i]) * (100 + i) for i in range(20)]
        assert put(h, key("p") + "/back", b"and back")
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
        assert line(writer) == "and back"
        assert writer.wait(20) == 0
        # The writer has closed; what it stored stays readable.
        del infos
        assert [value(h, k) for k in keys] == [bytes([i]) * (100 + i) for i in range(20)]


def test_reading_after_the_writer_was_killed(system: System, child: Child, key: Key) -> None:
    writer = child(
        HEAD + "for i in range(10):\n    assert put(f'{args[0]}/{i}', f'value {i}'.encode())\n"
        "a = h.alloc(9); a.buf[:] = b'unfinishe'\n"
        "print('stored')\n"
        "sys.stdin.read()\n",
        key("p"),
    )
    assert line(writer) == "stored"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    with MaruHandler(config(system)) as h:
        keys = [f"{key('p')}/{i}" for i in range(10)]
        assert eventually(lambda: all(h.batch_exists(keys)), 30)
        assert [value(h, k) for k in keys] == [f"value {i}".encode() for i in range(10)]
        # Its keys can be deleted, and others can store them anew.
        assert eventually(lambda: h.delete(keys[0]))
        assert put(h, keys[0], b"another")
        assert value(h, keys[0]) == b"another"


def test_killed_in_the_middle(system: System, child: Child, key: Key) -> None:
    """Whatever was stored is whole; the rest is not there."""
    with MaruHandler(config(system)) as h:
        for round_ in range(3):
            base = key(round_)
            writer = child(
                HEAD + "print('go')\ni = 0\nwhile True:\n    put(f'{args[0]}/{i}', i.to_bytes(4, 'little') * 512)\n    i += 1\n",
                base,
            )
            assert line(writer) == "go"
            time.sleep(0.1 + 0.05 * round_)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert eventually(lambda b=base: h.exists(f"{b}/0"), 30)  # type: ignore[misc]
            i = 0
            while (v := value(h, f"{base}/{i}")) is not None:
                assert v == i.to_bytes(4, "little") * 512
                i += 1
            assert i > 0


def test_reader_keeps_a_dead_writers_page(system: System, child: Child, key: Key) -> None:
    writer = child(HEAD + "assert put(args[0], b'held')\nprint('ok')\nsys.stdin.read()\n", key("k"))
    assert line(writer) == "ok"
    with MaruHandler(config(system)) as h:
        info = h.retrieve(key("k"))
        assert info is not None
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        for i in range(100):
            put(h, key(i), b"other")
        assert bytes(info.view) == b"held"


def test_fork_is_refused(system: System, key: Key) -> None:
    with MaruHandler(config(system)) as h:
        assert put(h, key("k"), b"v")
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # a hang is a failure, too
            out = []
            for call in (lambda: h.exists("k"), lambda: h.alloc(1), MaruHandler(config(system)).connect):
                try:
                    out.append(f"no error: {call()}")
                except ForkedError as e:
                    out.append("forked" if "fork" in str(e) else str(e))
                except BaseException as e:
                    out.append(repr(e))
            out.append(str(h.healthcheck()))
            h.close()
            os.write(w, ",".join(out).encode())
            os._exit(0)
        os.close(w)
        assert os.read(r, 10_000).decode() == "forked,forked,forked,False"
        assert os.waitpid(pid, 0)[1] == 0
        os.close(r)
        assert value(h, key("k")) == b"v"


def test_fork_before_the_library_is_loaded(system: System, child: Child) -> None:
    """Nothing is loaded at import, so a child of an importing process is free to."""
    p = child(
        "import os, maru\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        f"    h = maru.MaruHandler(maru.MaruConfig(url, pool_size={POOL}, chunk_size_bytes={CHUNK}))\n"
        "    ok = h.connect() and h.store('forked child', b'v')\n"
        "    h.delete('forked child'); h.close()\n"
        "    os._exit(0 if ok else 1)\n"
        "print(os.waitpid(pid, 0)[1])\n"
    )
    assert line(p) == "0"


def test_spawn(system: System) -> None:
    code = (
        "import multiprocessing as m, sys, maru\n"
        "def work(url, q):\n"
        f"    with maru.MaruHandler(maru.MaruConfig(url, pool_size={POOL}, chunk_size_bytes={CHUNK})) as h:\n"
        "        q.put(h.healthcheck())\n"
        "if __name__ == '__main__':\n"
        f"    h = maru.MaruHandler(maru.MaruConfig(sys.argv[1], pool_size={POOL}, chunk_size_bytes={CHUNK}))\n"
        "    assert h.connect()\n"
        "    c = m.get_context('spawn'); q = c.Queue(); p = c.Process(target=work, args=(sys.argv[1], q)); p.start()\n"
        "    print(q.get(timeout=30)); p.join(); h.close()\n"
    )
    path = Path(system.directory).parent / "spawn.py"
    path.write_text(code)
    env = dict(os.environ, PYTHONPATH=str(ROOT / "python"))
    p = subprocess.run([sys.executable, path, system.url], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert p.stdout.strip() == "True", p.stderr


def test_interrupt_of_a_waiting_call(system: System, child: Child) -> None:
    p = child(
        HEAD + "import signal, time\n"
        # What a shell starts in the background without job control ignores it, and its children too.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "print('up')\n"
        "try:\n"
        "    while True: h.healthcheck()\n"
        "except KeyboardInterrupt:\n"
        "    h.close(); print('interrupted')\n"
    )
    assert line(p) == "up"
    time.sleep(0.2)
    p.send_signal(signal.SIGINT)
    assert line(p) == "interrupted"
    assert p.wait(20) == 0


def test_exit_without_close(system: System, child: Child, key: Key) -> None:
    """Views, pages and pins are out when the interpreter ends: no crash, no noise."""
    p = child(
        HEAD + "put(args[0], b'v')\n"
        "info = h.retrieve(args[0]); part = info.view[:1]; page = h.alloc(3); h.pin(args[0])\n"
        "region = h.get_buffer_view(page.region_id, 0, 10)\n"
        "print('end')\n",
        key("k"),
    )
    assert line(p) == "end"
    assert p.wait(30) == 0


def test_import_loads_nothing() -> None:
    code = (
        "import threading, maru, maru.api, maru_common, maru_handler.memory, maru_shm\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libmaru' not in maps\n"
        "assert threading.active_count() == 1\n"
        "maru.MaruHandler(); maru.api.ClientConfig('h:1')\n"
        "assert 'libmaru' not in open('/proc/self/maps').read()\n"
    )
    env = dict(os.environ, PYTHONPATH=str(ROOT / "python"), MARU_LIBRARY="/nonexistent/libmaru.so")
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=30)


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import maru\ntry: maru.MaruHandler().connect()\nexcept OSError as e: print(e)\n"
    env = dict(os.environ, PYTHONPATH=str(ROOT / "python"), MARU_LIBRARY="/nonexistent/libmaru.so")
    out = subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=30, capture_output=True, text=True).stdout
    assert "/nonexistent/libmaru.so" in out and "make build" in out
