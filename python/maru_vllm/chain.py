"""The keys of one request's chunks, as its tokens become known.

The rules are those of :mod:`maru.keys`; this is the same chain with its keys packed,
so that a step costs a slice, and with the hashing of many chunks in one call of the
library, outside the interpreter lock.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from maru.keys import DIGEST_BYTES, KEY_BYTES, PART_ALL_LAYERS, pack_tokens

__all__ = ["Hasher", "PrefixChain", "hash_chunks", "library_hasher", "with_shard"]

Hasher = Callable[[bytes, int, bytes, int, "Sequence[bytes] | None"], "tuple[bytes, bytes]"]
"""(link, chunks before, packed tokens of whole chunks, tokens a chunk, extras a chunk)
to (packed keys of shard 0, last link)."""

_TAIL = struct.pack("<HH", 0, PART_ALL_LAYERS)
_NO_PARENT = bytes(DIGEST_BYTES)

# Fewer chunks than this are not worth a call of the library.
_LIBRARY_CHUNKS = 8


def hash_chunks(
    link: bytes, before: int, tokens: bytes, chunk_tokens: int, extras: Sequence[bytes] | None
) -> tuple[bytes, bytes]:
    """A Hasher in Python."""
    step, size = 4 * chunk_tokens, chunk_tokens.to_bytes(4, "little")
    keys = bytearray()
    for i in range(len(tokens) // step):
        chunk = tokens[i * step : (i + 1) * step]
        extra = extras[i] if extras is not None else b""
        link = hashlib.sha256(b"".join((b"maru-chunk-v1", link, size, chunk, extra))).digest()
        keys += link[:DIGEST_BYTES] + _TAIL
    return bytes(keys), link


def library_hasher(lib: Any) -> Hasher:
    """A Hasher that calls the loaded library where that is cheaper."""

    def hash_many(
        link: bytes, before: int, tokens: bytes, chunk_tokens: int, extras: Sequence[bytes] | None
    ) -> tuple[bytes, bytes]:
        count = len(tokens) // (4 * chunk_tokens)
        if count < _LIBRARY_CHUNKS or sys.byteorder != "little":
            return hash_chunks(link, before, tokens, chunk_tokens, extras)
        end = ctypes.create_string_buffer(link, len(link))
        keys = ctypes.create_string_buffer(KEY_BYTES * count)
        ends = array("Q", range(chunk_tokens, chunk_tokens * count + 1, chunk_tokens))
        packed, extra_ends = b"", None
        if extras is not None:
            packed = b"".join(extras[:count])
            extra_ends = array("Q", bytes(8 * count))
            at = 0
            for i in range(count):
                at += len(extras[i])
                extra_ends[i] = at
        status = lib.maru_chain_keys(
            end,
            before,
            count,
            tokens,
            ends.buffer_info()[0],
            packed or None,
            extra_ends.buffer_info()[0] if extra_ends is not None and packed else None,
            0,
            PART_ALL_LAYERS,
            keys,
            None,
            None,
        )
        if status:
            return hash_chunks(link, before, tokens, chunk_tokens, extras)
        return keys.raw, end.raw

    return hash_many


def with_shard(keys: bytes, shard: int) -> bytes:
    """Packed keys of shard 0 as those of another shard."""
    if shard == 0:
        return keys
    out = bytearray(keys)
    low, high = shard & 0xFF, shard >> 8
    out[DIGEST_BYTES::KEY_BYTES] = bytes((low,)) * (len(keys) // KEY_BYTES)
    out[DIGEST_BYTES + 1 :: KEY_BYTES] = bytes((high,)) * (len(keys) // KEY_BYTES)
    return bytes(out)


class PrefixChain:
    """Keys of the whole chunks of a request. One thread at a time."""

    __slots__ = ("_chunk_tokens", "_hasher", "_keys", "_link")

    def __init__(self, root: bytes, chunk_tokens: int, hasher: Hasher = hash_chunks) -> None:
        self._link = root
        self._chunk_tokens = chunk_tokens
        self._hasher = hasher
        self._keys = bytearray()

    def __len__(self) -> int:
        return len(self._keys) // KEY_BYTES

    def extend(self, tokens: Sequence[int], extras: Sequence[bytes] | None = None) -> None:
        """Adds the whole chunks in tokens, which follow the last chunk; extras: encoded, one for each."""
        keys, self._link = self._hasher(self._link, len(self), pack_tokens(tokens), self._chunk_tokens, extras)
        self._keys += keys

    def key(self, index: int) -> bytes:
        """The key of one chunk, of shard 0."""
        return bytes(self._keys[index * KEY_BYTES : (index + 1) * KEY_BYTES])

    def keys(self, start: int = 0, stop: int | None = None) -> bytes:
        """Packed keys of shard 0 of chunks start to stop."""
        end = len(self) if stop is None else stop
        return bytes(self._keys[start * KEY_BYTES : end * KEY_BYTES])

    def parents(self, start: int = 0, stop: int | None = None) -> bytes:
        """Packed parent digests of those chunks; the first chunk's is zero."""
        end = len(self) if stop is None else min(stop, len(self))
        keys = self._keys
        return b"".join(
            bytes(keys[(i - 1) * KEY_BYTES : (i - 1) * KEY_BYTES + DIGEST_BYTES]) if i else _NO_PARENT for i in range(start, end)
        )
