"""Identity of content: namespaces, prefix chains and opaque keys, in pure Python.

The twin of the Go package ``internal/keys``; both are checked against the same
file of golden vectors. Nothing here loads the library: a scheduler can compute
keys in any process, also in a forked one.

A key is 32 bytes: the first 28 bytes of a SHA-256 digest, a shard and a part as
little-endian u16. A batch of keys is packed: 32 bytes each, no separators.

Source: docs/rfcs/0005-object-identity.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Union

__all__ = [
    "DIGEST_BYTES",
    "FORMAT_VERSION",
    "KEY_BYTES",
    "MAX_OPAQUE_KEY_BYTES",
    "OPAQUE_NAMESPACE",
    "PART_ALL_LAYERS",
    "Chain",
    "Extra",
    "KeyLike",
    "Namespace",
    "chunk_link",
    "encode_cbor",
    "encode_extras",
    "engine_page_bytes",
    "fingerprint_config",
    "key_of",
    "opaque_key",
    "pack_opaque",
    "pack_tokens",
    "piece_bytes",
    "root",
]

FORMAT_VERSION = 1
KEY_BYTES = 32
DIGEST_BYTES = 28
PART_ALL_LAYERS = 65535
MAX_OPAQUE_KEY_BYTES = 4096
MAX_NAMESPACE_BYTES = 64 << 10
MAX_TEXT_BYTES = 4096
MAX_LIST_COUNT = 4096
MAX_EXTRA_COUNT = 256
MAX_EXTRAS_BYTES = 64 << 10
MAX_SALT_BYTES = 4096
MAX_CHUNK_TOKENS = 1 << 20
PAGE_ALIGN_BYTES = 4096
MIN_PIECE_BYTES = 256
PIECE_ALIGN_BYTES = 64
TARGET_PIECE_BYTES = 16 << 10
MAX_PIECE_BYTES = 1 << 20
MAX_OBJECT_BYTES = (1 << 40) - 1

KeyLike = Union[str, int, bytes]

_NODE_LOCAL = frozenset(("_name_or_path", "name_or_path", "transformers_version", "_commit_hash"))


# --- deterministic CBOR (RFC 8949, 4.2.1): the few types that identities use ---


def _head(major: int, value: int) -> bytes:
    major <<= 5
    if value < 24:
        return bytes((major | value,))
    if value < 1 << 8:
        return bytes((major | 24, value))
    if value < 1 << 16:
        return struct.pack(">BH", major | 25, value)
    if value < 1 << 32:
        return struct.pack(">BI", major | 26, value)
    if value < 1 << 64:
        return struct.pack(">BQ", major | 27, value)
    raise ValueError(f"integer {value} does not fit 64 bits")


def _float(value: float) -> bytes:
    if math.isnan(value):
        return b"\xf9\x7e\x00"
    for prefix, fmt in ((b"\xf9", ">e"), (b"\xfa", ">f")):
        try:
            packed = struct.pack(fmt, value)
        except OverflowError:
            continue
        if struct.unpack(fmt, packed)[0] == value:
            return prefix + packed
    return b"\xfb" + struct.pack(">d", value)


def encode_cbor(value: object) -> bytes:
    """Returns the one deterministic encoding of maps with text keys, lists, text,
    bytes, integers of 64 bits, floats, booleans and None.

    Raises:
        ValueError: a value outside its range.
        TypeError: any other type.
    """
    if value is None:
        return b"\xf6"
    if value is False:
        return b"\xf4"
    if value is True:
        return b"\xf5"
    if isinstance(value, int):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, str):
        raw = value.encode("utf-8")
        return _head(3, len(raw)) + raw
    if isinstance(value, (bytes, bytearray, memoryview)):
        raw = bytes(value)
        return _head(2, len(raw)) + raw
    if isinstance(value, Mapping):
        rows = []
        for k, v in value.items():
            if not isinstance(k, str):
                raise TypeError(f"map key {k!r} must be text")
            rows.append((encode_cbor(k), encode_cbor(v)))
        rows.sort()
        return _head(5, len(rows)) + b"".join(k + v for k, v in rows)
    if isinstance(value, (list, tuple)):
        return _head(4, len(value)) + b"".join(encode_cbor(v) for v in value)
    raise TypeError(f"{type(value).__name__} has no canonical encoding")


def _portable(value: object) -> object:
    if isinstance(value, Mapping):
        return {k: _portable(v) for k, v in value.items() if k not in _NODE_LOCAL}
    if isinstance(value, (list, tuple)):
        return [_portable(v) for v in value]
    return value


def fingerprint_config(config: Mapping[str, object]) -> str:
    """Returns the SHA-256, in hexadecimal, of a model's configuration without the
    fields that only say where it lies or who wrote it (ID-11), at any depth."""
    return hashlib.sha256(encode_cbor(_portable(config))).hexdigest()


# --- namespace ---


@dataclasses.dataclass(frozen=True)
class Namespace:
    """Which objects can stand for one another: the same weights read by the same
    geometry. Each field is part of the identity; fields that differ make another
    namespace. Model paths, ranks, ports and the storage backend are no part of it.

    ``weights`` is an immutable revision given by the operator, never a path or a
    branch. ``layers`` are layer counts stage by stage, and in it group by group.
    ``run_bytes`` are the lengths of the contiguous runs of one KV block, in bytes.
    """

    weights: str
    engine: str
    engine_format: int = 0
    tenant: str = ""
    adapter: str = ""
    config: str = ""
    overrides: str = ""
    quantization: str = ""
    model_dtype: str = ""
    kv_dtype: str = ""
    kv_scales: str = ""
    speculative: str = ""
    layout: str = ""
    isa: str = ""
    block_tokens: int = 0
    kernel_block_tokens: int = 0
    chunk_tokens: int = 0
    kv_heads: int = 0
    head_size: int = 0
    layers: tuple[int, ...] = ()
    run_bytes: tuple[int, ...] = ()
    piece_bytes: int = 0
    tensor_parallel: int = 0
    pipeline_parallel: int = 0
    decode_context_parallel: int = 0
    prefill_context_parallel: int = 0
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)
    format: int = FORMAT_VERSION

    def problems(self) -> list[str]:
        """Returns what is wrong with each field; empty when the namespace is valid."""
        out = []
        if self.format != FORMAT_VERSION:
            out.append(f"format: version {self.format}, this build writes and reads {FORMAT_VERSION}")
        if not self.weights:
            out.append("weights: is empty; name an immutable revision of the weights")
        if not self.engine:
            out.append("engine: is empty; name the engine's family, for example 'vllm'")
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "extra":
                if len(value) > MAX_EXTRA_COUNT:
                    out.append(f"extra: has {len(value)} entries, at most {MAX_EXTRA_COUNT} are allowed")
                for k, v in value.items():
                    if not (isinstance(k, str) and isinstance(v, str) and k) or not (_fits(k) and _fits(v)):
                        out.append(f"extra: entry {k!r:.40}: names and values are UTF-8 of 1 to {MAX_TEXT_BYTES} bytes")
            elif f.name in ("layers", "run_bytes"):
                limit = 1 << (32 if f.name == "layers" else 64)
                if len(value) > MAX_LIST_COUNT:
                    out.append(f"{f.name}: has {len(value)} items, at most {MAX_LIST_COUNT} are allowed")
                if not all(_is_int(v) and 0 <= v < limit for v in value):
                    out.append(f"{f.name}: every item must be an integer from 0 to {limit - 1}")
            elif f.type == "int":
                if not (_is_int(value) and 0 <= value < 1 << 32):
                    out.append(f"{f.name}: {value!r} must be an integer from 0 to {(1 << 32) - 1}")
            elif not isinstance(value, str):
                out.append(f"{f.name}: {value!r} must be a string")
            elif not _fits(value):
                out.append(f"{f.name}: must be UTF-8 of at most {MAX_TEXT_BYTES} bytes")
        return out

    def encode(self) -> bytes:
        """Returns the canonical CBOR.

        Raises:
            ValueError: names every field that is wrong.
        """
        problems = self.problems()
        if problems:
            raise ValueError("namespace is not valid: " + "; ".join(problems))
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        encoded = encode_cbor(fields)
        if len(encoded) > MAX_NAMESPACE_BYTES:
            raise ValueError(f"namespace has {len(encoded)} bytes encoded, at most {MAX_NAMESPACE_BYTES} are allowed")
        return encoded

    def id(self) -> bytes:
        """Returns the 32-byte identity: the SHA-256 of the encoding."""
        return hashlib.sha256(self.encode()).digest()

    def diff(self, other: Namespace) -> list[str]:
        """Names every field in which two namespaces differ."""
        out = []
        for f in dataclasses.fields(self):
            a, b = getattr(self, f.name), getattr(other, f.name)
            if f.name == "extra":
                for k in sorted(set(a) | set(b)):
                    if a.get(k) != b.get(k):
                        out.append(f"extra.{k}: {a.get(k)!r} / {b.get(k)!r}")
            elif (tuple(a) if isinstance(a, (list, tuple)) else a) != (tuple(b) if isinstance(b, (list, tuple)) else b):
                out.append(f"{f.name}: {a!r} / {b!r}")
        return out


def _is_int(v: object) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


def _fits(text: str) -> bool:
    try:
        return len(text.encode("utf-8")) <= MAX_TEXT_BYTES
    except UnicodeEncodeError:
        return False


OPAQUE_NAMESPACE: bytes = encode_cbor({"format": FORMAT_VERSION, "reserved": "opaque"})
"""The encoding of the reserved namespace of MaruHandler's keys."""


# --- prefix chains ---


@dataclasses.dataclass(frozen=True)
class Extra:
    """Content of a chunk that is no token: a multimodal input, an adapter.

    ``offset`` is relative to the chunk's first token and can be negative.
    """

    kind: str
    id: bytes
    offset: int = 0


def encode_extras(extras: Sequence[Extra]) -> bytes:
    """Returns the canonical encoding of a chunk's extra keys; b"" for none.

    Raises:
        ValueError: a kind or id outside its limits.
    """
    if not extras:
        return b""
    rows = []
    for i, e in enumerate(extras):
        if not 1 <= len(e.kind.encode("utf-8")) <= 64:
            raise ValueError(f"extra key {i}: kind {e.kind!r:.80} must be UTF-8 of 1 to 64 bytes")
        if not 1 <= len(e.id) <= MAX_TEXT_BYTES:
            raise ValueError(f"extra key {i} ({e.kind}): id has {len(e.id)} bytes, 1 to {MAX_TEXT_BYTES} are allowed")
        if not -(1 << 63) <= e.offset < 1 << 63:
            raise ValueError(f"extra key {i} ({e.kind}): offset {e.offset} does not fit 64 bits")
        rows.append([e.kind, bytes(e.id), e.offset])
    encoded = encode_cbor(rows)
    if len(encoded) > MAX_EXTRAS_BYTES:
        raise ValueError(f"extra keys of a chunk have {len(encoded)} bytes encoded, at most {MAX_EXTRAS_BYTES} are allowed")
    return encoded


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Returns token ids packed as u32 little-endian.

    Raises:
        OverflowError: an id below 0 or above 2**32 - 1.
    """
    packed = array("I", tokens)
    if sys.byteorder != "little":  # pragma: no cover - the formats are little-endian
        packed.byteswap()
    return packed.tobytes()


def root(namespace_id: bytes, salt: bytes = b"") -> bytes:
    """Returns the start of a chain: the namespace's identity, mixed with the
    request's salt when it has one.

    Raises:
        ValueError: an identity that is not 32 bytes, a salt that is too long.
    """
    if len(namespace_id) != 32:
        raise ValueError(f"namespace id has {len(namespace_id)} bytes, must have 32")
    if not salt:
        return bytes(namespace_id)
    if len(salt) > MAX_SALT_BYTES:
        raise ValueError(f"salt has {len(salt)} bytes, at most {MAX_SALT_BYTES} are allowed")
    return hashlib.sha256(b"maru-salt-v1" + namespace_id + salt).digest()


def chunk_link(previous: bytes, tokens: bytes, extras: bytes = b"") -> bytes:
    """Returns the 32-byte link of the chunk behind ``previous``. ``tokens`` are
    packed (:func:`pack_tokens`), ``extras`` encoded (:func:`encode_extras`)."""
    count = len(tokens) // 4
    if len(previous) != 32 or len(tokens) % 4 or not 1 <= count <= MAX_CHUNK_TOKENS:
        raise ValueError(
            f"chunk has {len(tokens)} bytes of tokens behind a link of {len(previous)} bytes: "
            f"4 bytes a token, 1 to {MAX_CHUNK_TOKENS} tokens and a link of 32 bytes are allowed"
        )
    return hashlib.sha256(b"maru-chunk-v1" + previous + count.to_bytes(4, "little") + tokens + extras).digest()


def key_of(link: bytes, shard: int = 0, part: int = PART_ALL_LAYERS) -> bytes:
    """Returns the 32-byte object key of a chunk's link."""
    return link[:DIGEST_BYTES] + struct.pack("<HH", shard, part)


class Chain:
    """The links of one prompt, chunk by chunk, as its tokens become known.

    Not thread-safe: one thread at a time.
    """

    __slots__ = ("_links", "_root")

    def __init__(self, root_link: bytes) -> None:
        if len(root_link) != 32:
            raise ValueError(f"root has {len(root_link)} bytes, must have 32")
        self._root = bytes(root_link)
        self._links: list[bytes] = []

    def __len__(self) -> int:
        return len(self._links)

    def append(self, tokens: bytes, extras: bytes = b"") -> bytes:
        """Adds a chunk of packed tokens and returns its link."""
        link = chunk_link(self._links[-1] if self._links else self._root, tokens, extras)
        self._links.append(link)
        return link

    def extend(self, tokens: bytes, chunk_tokens: int) -> int:
        """Adds every whole chunk in ``tokens`` (packed) without extra keys and
        returns how many there were; what is left over is the caller's to keep."""
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}, must be at least 1")
        step = 4 * chunk_tokens
        whole = len(tokens) // step
        view = memoryview(tokens)
        for i in range(whole):
            self.append(bytes(view[i * step : (i + 1) * step]))
        return whole

    def link(self, index: int) -> bytes:
        """Returns the link of a chunk."""
        return self._links[index]

    def keys(self, start: int = 0, stop: int | None = None, shard: int = 0, part: int = PART_ALL_LAYERS) -> bytes:
        """Returns the packed keys of chunks ``start`` to ``stop``."""
        tail = struct.pack("<HH", shard, part)
        return b"".join(link[:DIGEST_BYTES] + tail for link in self._links[start:stop])

    def parents(self, start: int = 0, stop: int | None = None) -> bytes:
        """Returns the packed 28-byte parent digests of those chunks; the first
        chunk's parent is zero."""
        stop = len(self._links) if stop is None else min(stop, len(self._links))
        return b"".join(self._links[i - 1][:DIGEST_BYTES] if i > 0 else bytes(DIGEST_BYTES) for i in range(start, stop))


# --- opaque keys ---


def opaque_text(key: KeyLike) -> tuple[bytes, int]:
    """Returns the bytes and the tag of a caller's key.

    Raises:
        TypeError: neither str, int nor bytes (bool is no int here).
        ValueError: empty, longer than 4096 bytes, or not UTF-8.
    """
    if isinstance(key, str):
        try:
            raw, tag = key.encode("utf-8"), 115
        except UnicodeEncodeError as e:
            raise ValueError(f"key {key!r:.80} is not valid UTF-8: {e.reason}; give it as bytes") from None
    elif isinstance(key, int) and not isinstance(key, bool):
        # str() refuses integers of more than about 4300 digits with an error of
        # its own; those are over the limit anyway.
        too_long = ValueError(f"key is an integer of {key.bit_length()} bits, at most {MAX_OPAQUE_KEY_BYTES} digits are allowed")
        if key.bit_length() > 4 * MAX_OPAQUE_KEY_BYTES:
            raise too_long
        try:
            raw, tag = str(key).encode("ascii"), 105
        except ValueError:
            raise too_long from None
    elif isinstance(key, (bytes, bytearray, memoryview)):
        raw, tag = bytes(key), 98
    else:
        raise TypeError(f"key must be str, int or bytes, not {type(key).__name__}")
    if not 1 <= len(raw) <= MAX_OPAQUE_KEY_BYTES:
        raise ValueError(f"key has {len(raw)} bytes, 1 to {MAX_OPAQUE_KEY_BYTES} are allowed")
    return raw, tag


def opaque_key(key: KeyLike) -> bytes:
    """Returns the 32-byte object key of a caller's key: 5, "5" and b"5" differ."""
    raw, tag = opaque_text(key)
    digest = hashlib.sha256(b"maru-opaque-v1" + bytes((tag,)) + raw).digest()
    return key_of(digest)


def pack_opaque(keys: Sequence[KeyLike]) -> bytes:
    """Returns the packed object keys of a batch of callers' keys."""
    return b"".join([opaque_key(k) for k in keys])


# --- geometry of engine objects ---


def piece_bytes(*runs: int) -> int:
    """Returns the checksum piece for engine objects whose blocks consist of runs
    of these lengths: the largest whole divisor of all of them up to 16 KiB that is
    a multiple of 64 and at least 256, else the smallest such multiple.

    Raises:
        ValueError: no runs, or lengths that no piece up to 1 MiB serves.
    """
    if not runs or any(not 1 <= r <= MAX_OBJECT_BYTES for r in runs):
        raise ValueError(f"runs of {runs} bytes: at least one is needed, each of 1 to {MAX_OBJECT_BYTES} bytes")
    divisor, multiple = 0, PIECE_ALIGN_BYTES
    for r in runs:
        divisor = math.gcd(divisor, r)
        multiple = multiple // math.gcd(multiple, r) * r
    if divisor % PIECE_ALIGN_BYTES == 0 and divisor >= MIN_PIECE_BYTES:
        units = divisor // PIECE_ALIGN_BYTES
        for p in range(TARGET_PIECE_BYTES // PIECE_ALIGN_BYTES, MIN_PIECE_BYTES // PIECE_ALIGN_BYTES - 1, -1):
            if units % p == 0:
                return p * PIECE_ALIGN_BYTES
        if divisor <= MAX_PIECE_BYTES:
            return divisor
    else:
        piece = -(-MIN_PIECE_BYTES // multiple) * multiple
        if piece <= MAX_PIECE_BYTES:
            return piece
    raise ValueError(f"no checksum piece of {MIN_PIECE_BYTES} bytes to 1 MiB serves runs of {runs} bytes")


def engine_page_bytes(value_bytes: int, piece: int) -> int:
    """Returns the page of an engine object: the value, 8 bytes for each piece
    behind it, aligned to 4096."""
    if not 1 <= value_bytes <= MAX_OBJECT_BYTES:
        raise ValueError(f"value of {value_bytes} bytes, 1 to {MAX_OBJECT_BYTES} are allowed")
    if piece < MIN_PIECE_BYTES or piece % PIECE_ALIGN_BYTES:
        raise ValueError(f"piece of {piece} bytes, must be a multiple of {PIECE_ALIGN_BYTES} and at least {MIN_PIECE_BYTES}")
    total = -(-value_bytes // 8) * 8 + 8 * -(-value_bytes // piece)
    return -(-total // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
