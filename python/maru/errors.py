"""Status codes and the exceptions made of them."""

from __future__ import annotations

import enum

__all__ = [
    "BusyError",
    "ClosedError",
    "Code",
    "ForkedError",
    "FullError",
    "InvalidError",
    "MaruError",
    "NotFoundError",
    "UnavailableError",
    "UnsupportedError",
    "error_of",
]


class Code(enum.IntEnum):
    """Status of a call or of one item. Stable and append-only; the numbers of
    ``include/maru.h``."""

    OK = 0
    INVALID = 1
    NOT_FOUND = 2
    EXISTS = 3
    FULL = 4
    LIMIT = 5
    PERMANENT = 6
    STALE = 7
    FENCED = 8
    DENIED = 9
    BUSY = 10
    UNAVAILABLE = 11
    UNKNOWN = 12
    ABORTED = 13
    RETIRED = 14
    PINNED = 15
    CORRUPT = 16
    MISMATCH = 17
    UNSUPPORTED = 18
    EXHAUSTED = 19
    CLOSED = 20
    TIMEOUT = 21
    FAULT = 22
    DRAINING = 23
    FORKED = 24
    INTERNAL = 25
    FOREIGN = 26
    OFFLINE = 27
    PENDING = 28
    MISS = 29
    ALREADY_STORED = 30
    UNPROVEN = 31


class MaruError(RuntimeError):
    """A call that was not made, with the library's text. ``code`` says why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class InvalidError(MaruError, ValueError):
    """An argument or a setting is outside what is allowed."""


class NotFoundError(MaruError):
    """No such region, layout or job."""


class FullError(MaruError):
    """No capacity now: skip the store."""


class BusyError(MaruError):
    """A queue is full, or somebody else has it now; the text says which."""


class UnavailableError(MaruError):
    """The server does not answer now; a retry may succeed."""


class ClosedError(MaruError):
    """The client is closed."""


class UnsupportedError(MaruError):
    """This machine, build or device cannot do it; the text says what could."""


class ForkedError(MaruError):
    """The library was loaded by a parent process; use spawn or forkserver."""


_CLASSES: dict[int, type[MaruError]] = {
    Code.INVALID: InvalidError,
    Code.NOT_FOUND: NotFoundError,
    Code.FULL: FullError,
    Code.BUSY: BusyError,
    Code.UNAVAILABLE: UnavailableError,
    Code.TIMEOUT: UnavailableError,
    Code.CLOSED: ClosedError,
    Code.UNSUPPORTED: UnsupportedError,
    Code.FORKED: ForkedError,
}


def error_of(code: int, text: str) -> MaruError:
    """Returns the exception for a status; ``text`` is the library's."""
    try:
        name = Code(code).name.lower()
    except ValueError:
        name = f"code {code} of a newer library"
    return _CLASSES.get(code, MaruError)(code, text or f"maru: {name}")
