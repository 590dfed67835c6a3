"""Laws of secure sums, with a stand-in for the cryptography that needs no library. Seeds are literals."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polytempo import federated as fed
from polytempo.core.calls.refusals import Incompatible
from polytempo.federated.secure_sum import (
    _FIELD,
    FixedPoint,
    Primitives,
    SecureClient,
    joined,
    lagrange_factors,
    secure_bytes,
    secure_sum,
    split,
    unmasked,
)

_PRIME = 2**255 - 19
secure_module = sys.modules["polytempo.federated.secure_sum"]
"""The package's name of it is the function."""


def _seal(key: bytes, nonce: bytes, message: bytes) -> bytes:
    pad = hashlib.shake_256(key + nonce).digest(len(message))
    hidden = bytes(a ^ b for a, b in zip(message, pad, strict=True))
    return hidden + hashlib.sha256(key + nonce + hidden).digest()[:16]


def _unseal(key: bytes, nonce: bytes, sealed: bytes) -> bytes:
    message = _seal(key, nonce, sealed[:-16])[:-16]
    if _seal(key, nonce, message) != sealed:
        raise ValueError("changed on the way")
    return message


def _power(base: int, exponent: bytes) -> bytes:
    return pow(base, int.from_bytes(exponent, "big"), _PRIME).to_bytes(32, "big")


TOY = Primitives(
    public=lambda own: _power(9, own),
    agree=lambda own, other: hashlib.sha256(_power(int.from_bytes(other, "big"), own)).digest(),
    stream=lambda key, length: hashlib.shake_256(key).digest(length),
    seal=_seal,
    unseal=_unseal,
)


def vectors(count: int, numel: int = 300) -> list[Any]:
    return list(np.random.default_rng(7).normal(size=(count, numel)))


def summed(given: list[Any], **more: Any) -> Any:
    return secure_sum(given, crypto=TOY, random=random.Random(3).randbytes, **more)


def plain(given: list[Any], count: int, point: FixedPoint) -> Any:
    return point.decode(sum((point.encode(each, count) for each in given), np.zeros(len(given[0]), point.words)))


@pytest.mark.parametrize("point", [FixedPoint(32, 16), FixedPoint(64, 40), FixedPoint(32, 4)])
@pytest.mark.parametrize("count", [2, 3, 9])
def test_the_masked_sum_is_the_plain_one_to_the_bit(point: FixedPoint, count: int) -> None:
    given = vectors(count)
    found = summed(given, point=point)
    assert np.array_equal(found, plain(given, count, point))
    assert np.abs(found - sum(given)).max() <= count / 2 ** (point.fraction + 1)


@pytest.mark.parametrize("phase", range(4))
def test_a_quarter_of_the_clients_is_lost_before_any_phase(phase: int) -> None:
    given, lost = vectors(12), (1, 5, 11)
    found = summed(given, leave=dict.fromkeys(lost, phase))
    there = [each for u, each in enumerate(given) if u not in lost or phase == 3]
    assert np.array_equal(found, plain(there, 12, FixedPoint()))


def test_clients_are_lost_in_every_phase_of_one_sum() -> None:
    given = vectors(16)
    found = summed(given, leave={0: 0, 3: 1, 8: 2, 15: 3})
    assert np.array_equal(found, plain([each for u, each in enumerate(given) if u not in (0, 3, 8)], 16, FixedPoint()))


@pytest.mark.parametrize("phase", range(4))
def test_fewer_than_the_threshold_are_refused(phase: int) -> None:
    with pytest.raises(ValueError, match=r"4 clients are left .* needs 5"):
        summed(vectors(6), leave={1: phase, 2: phase}, threshold=5)


def _spread(words: Any) -> float:
    """χ² of bytes, in deviations from its mean: 255 ± √510 for uniform ones."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float((((counts - expected) ** 2 / expected).sum() - 255) / 510**0.5)


def test_the_server_sees_uniform_numbers_of_one_client() -> None:
    point, draw = FixedPoint(), random.Random(5).randbytes
    given = [point.encode(np.full(1 << 15, 0.25 * u), 3) for u in range(3)]
    clients = [SecureClient(u, TOY, draw) for u in range(3)]
    everyone = {u: client.keys() for u, client in enumerate(clients)}
    shares = [client.shares(everyone, 2) for client in clients]
    sent = {u: clients[u].masked({v: shares[v][u] for v in range(3) if v != u}, each) for u, each in enumerate(given)}
    for u in range(3):
        assert abs(_spread(sent[u])) < 4
        assert _spread(given[u]) > 1000
    assert abs(_spread(sent[0] + sent[1])) < 4
    total = unmasked(everyone, sent, {u: client.unmasking(sent) for u, client in enumerate(clients)}, 2, TOY)
    assert np.array_equal(point.decode(total), np.full(1 << 15, 0.75))


def test_what_a_client_sends_is_what_the_formula_says() -> None:
    given = [FixedPoint().encode(each, 5) for each in vectors(5, numel=11)]
    clients = [SecureClient(u, TOY) for u in range(5)]
    everyone = {u: client.keys() for u, client in enumerate(clients)}
    shares = [client.shares(everyone, 4) for client in clients]
    sent = [clients[u].masked({v: shares[v][u] for v in range(5) if v != u}, each) for u, each in enumerate(given)]
    told = clients[0].unmasking(range(5))
    num_bytes = sum(map(len, everyone[0])) + sum(map(len, [*shares[0].values(), *told.values()])) + sent[0].nbytes
    assert num_bytes == secure_bytes(5, 11)


def test_any_threshold_of_shares_give_the_secret_and_fewer_do_not() -> None:
    draw = random.Random(1).randbytes
    for secret in (draw(32), bytes(32), b"\xff" * 32):
        shares = split(secret, 3, range(6), draw)
        for some in ((0, 1, 2), (5, 3, 1), (0, 1, 2, 3, 4, 5)):
            assert joined({u: shares[u] for u in some}, 3) == secret
        assert joined({u: shares[u] for u in (0, 1)}, 2) != secret


def test_the_holders_factors_are_computed_once_for_all_secrets_of_a_sum() -> None:
    before = secure_module._known_factors.cache_info().misses
    summed(vectors(24), leave=dict.fromkeys((2, 7, 11, 13, 17, 23), 2))
    assert secure_module._known_factors.cache_info().misses <= before + 1
    factors = lagrange_factors((3, 0, 5))
    assert sum(f * (7 + 4 * (x + 1) + 9 * (x + 1) ** 2) for f, x in zip(factors, (3, 0, 5), strict=True)) % _FIELD == 7


def _after_shares(change: Callable[[bytes], bytes] = bytes) -> SecureClient:
    clients = [SecureClient(u, TOY) for u in range(3)]
    everyone = {u: client.keys() for u, client in enumerate(clients)}
    shares = [client.shares(everyone, 2) for client in clients]
    clients[0].masked({v: change(shares[v][0]) for v in (1, 2)}, FixedPoint().encode(np.ones(2), 3))
    return clients[0]


def test_a_client_unmasks_once() -> None:
    client = _after_shares()
    client.unmasking({0, 1})
    with pytest.raises(ValueError, match="once"):
        client.unmasking({0, 2})


@pytest.mark.parametrize(
    ("attempt", "told"),
    [
        (lambda: _after_shares().unmasking({0}), "needs 2"),
        (lambda: _after_shares().unmasking({0, 7}), "shares are given"),
        (lambda: _after_shares(lambda sealed: bytes([sealed[0] ^ 1]) + sealed[1:]), "changed"),
        (lambda: summed(vectors(6), threshold=3), "two halves"),
        (lambda: summed([np.array([np.nan]), np.array([1.0])]), "one is nan"),
        (lambda: summed([np.array([2.0**14]), np.array([1.0])]), "takes values below 16384"),
        (lambda: FixedPoint(16, 4), "bits are 32 or 64"),
    ],
)
def test_refusals(attempt: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        attempt()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    with pytest.raises(Incompatible, match="PT2514"):
        fed.secure_sum(vectors(2))
