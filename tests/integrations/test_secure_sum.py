"""Secure sums by X25519 and ChaCha20 of `cryptography`."""

from __future__ import annotations

import numpy as np
import pytest

from polytempo.federated.secure_sum import FixedPoint, SecureClient, WrongShares, primitives, secure_sum


def test_the_masked_sum_is_the_plain_one_with_a_quarter_lost() -> None:
    vectors = list(np.random.default_rng(7).normal(size=(12, 1000)))
    for phase in range(4):
        there = [each for u, each in enumerate(vectors) if u > 2 or phase == 3]
        point = FixedPoint(64, 32)
        plain = sum((point.encode(each, 12) for each in there), np.zeros(1000, np.uint64))
        found = secure_sum(vectors, point=point, leave=dict.fromkeys(range(3), phase))
        assert np.array_equal(found, point.decode(plain))


def test_a_changed_share_is_refused() -> None:
    crypto = primitives()
    clients = [SecureClient(u, crypto) for u in range(3)]
    everyone = {u: client.keys() for u, client in enumerate(clients)}
    [_, *sealed] = [client.shares(everyone, 2)[0] if u else b"" for u, client in enumerate(clients)]
    clients[0].shares(everyone, 2)
    with pytest.raises(WrongShares, match=r"clients \[1\] were changed"):
        clients[0].masked(
            {1: bytes([sealed[0][0] ^ 1]) + sealed[0][1:], 2: sealed[1]}, FixedPoint().encode(np.ones(2), 3)
        )
