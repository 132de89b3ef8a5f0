"""Identities against the golden vectors that the Go package wrote."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from maru import keys

VECTORS = Path(__file__).parents[2] / "internal/keys/testdata/identity_vectors.json"


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(VECTORS.read_text())
    return data


def test_namespaces(vectors: dict[str, Any]) -> None:
    assert keys.OPAQUE_NAMESPACE.hex() == vectors["opaque_namespace_hex"]
    assert vectors["format"] == keys.FORMAT_VERSION
    for v in vectors["namespaces"]:
        fields = dict(v["fields"])
        fields["layers"] = tuple(fields["layers"] or ())
        fields["run_bytes"] = tuple(fields["run_bytes"] or ())
        fields["extra"] = fields["extra"] or {}
        ns = keys.Namespace(**fields)
        assert ns.encode().hex() == v["cbor_hex"], v["name"]
        assert ns.id().hex() == v["id_hex"], v["name"]


def test_chains(vectors: dict[str, Any]) -> None:
    for v in vectors["chains"]:
        root = keys.root(bytes.fromhex(v["namespace_id_hex"]), bytes.fromhex(v["salt_hex"]))
        assert root.hex() == v["root_hex"]
        chain = keys.Chain(root)
        for i, c in enumerate(v["chunks"]):
            extras = keys.encode_extras([keys.Extra(e["kind"], bytes.fromhex(e["id_hex"]), e["offset"]) for e in c["extras"]])
            assert extras.hex() == c["extras_cbor_hex"]
            assert chain.append(keys.pack_tokens(c["tokens"]), extras).hex() == c["link_hex"]
            assert chain.keys(i, i + 1, v["shard"], v["part"]).hex() == c["key_hex"]
            assert chain.parents(i, i + 1).hex() == c["parent_hex"]
        assert len(chain) == len(v["chunks"])
        assert chain.keys(shard=v["shard"], part=v["part"]) == b"".join(bytes.fromhex(c["key_hex"]) for c in v["chunks"])


def test_opaque(vectors: dict[str, Any]) -> None:
    make = {"s": lambda b: b.decode(), "i": int, "b": bytes}
    packed, want = [], b""
    for v in vectors["opaque"]:
        key = make[v["tag"]](base64.b64decode(v["key_base64"]))
        assert keys.opaque_key(key).hex() == v["object_key_hex"]
        packed.append(key)
        want += bytes.fromhex(v["object_key_hex"])
    assert keys.pack_opaque(packed) == want
    assert len({keys.opaque_key(k) for k in (5, "5", b"5")}) == 3


def test_configs(vectors: dict[str, Any]) -> None:
    for v in vectors["configs"]:
        assert keys.fingerprint_config(v["config"]) == v["fingerprint"], v["config"]


def test_pieces(vectors: dict[str, Any]) -> None:
    for v in vectors["pieces"]:
        if not v["piece_bytes"]:
            with pytest.raises(ValueError, match="no checksum piece"):
                keys.piece_bytes(*v["runs"])
            continue
        assert keys.piece_bytes(*v["runs"]) == v["piece_bytes"], v["runs"]
        assert keys.engine_page_bytes(v["value_bytes"], v["piece_bytes"]) == v["page_bytes"]


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        ("", ValueError, "0 bytes"),
        (b"", ValueError, "0 bytes"),
        ("x" * 4097, ValueError, "4097 bytes"),
        (b"x" * 4097, ValueError, "4097 bytes"),
        ("\ud800", ValueError, "UTF-8"),
        (True, TypeError, "bool"),
        (None, TypeError, "NoneType"),
        (1.5, TypeError, "float"),
        (10**5000, ValueError, "digits"),
        (1 << 100_000, ValueError, "digits"),
    ],
    ids=range(10),
)
def test_bad_opaque_keys(key: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        keys.opaque_key(key)


def test_namespace_problems_name_every_field() -> None:
    ns = keys.Namespace(weights="", engine="", layers=(-1,), block_tokens=1 << 32, tenant="\ud800")
    with pytest.raises(ValueError) as e:
        ns.encode()
    for field in ("weights", "engine", "layers", "block_tokens", "tenant"):
        assert field in str(e.value)
    assert keys.Namespace(weights="a", engine="e").diff(keys.Namespace(weights="b", engine="e", extra={"k": "v"})) == [
        "weights: 'a' / 'b'",
        "extra.k: None / 'v'",
    ]


def test_extend_takes_whole_chunks() -> None:
    root = hashlib.sha256(b"n").digest()
    tokens = keys.pack_tokens(range(10))
    whole = keys.Chain(root)
    assert whole.extend(tokens, 4) == 2
    by_hand = keys.Chain(root)
    by_hand.append(tokens[:16])
    by_hand.append(tokens[16:32])
    assert whole.keys() == by_hand.keys()
    assert whole.parents(0, 1) == bytes(28)
    with pytest.raises(ValueError):
        whole.extend(tokens, 0)
    with pytest.raises(ValueError):
        whole.append(b"")
    with pytest.raises(OverflowError):
        keys.pack_tokens([-1])
