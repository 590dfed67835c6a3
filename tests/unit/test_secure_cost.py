"""The cost of secure sums in `explain`: bytes as they are sent, and the numbers of masks and keys that are computed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from command_output import asking
from laws.test_secure_sum import TOY
from polytempo.core.strategy import SecureSum
from polytempo.federated import secure_cost as module
from polytempo.federated.secure_cost import secure_cost
from polytempo.federated.secure_sum import FixedPoint, Primitives, SecureClient, secure_bytes, unmasked


@pytest.mark.parametrize("lost", [0, 1])
def test_keys_and_masks_are_as_many_as_seconds_are_counted_for(lost: int) -> None:
    """A client: 2 public keys, 3 (n - 1) agreements, n masks; the server: n masks, and n - 1 more for a lost client."""
    counted = Counter[str]()

    def counting(name: str) -> Any:
        def call(*given: Any) -> Any:
            counted[name] += 1
            return getattr(TOY, name)(*given)

        return call

    crypto, number = Primitives(*map(counting, Primitives._fields)), 6
    clients = [SecureClient(u, crypto) for u in range(number)]
    everyone = {u: client.keys() for u, client in enumerate(clients)}
    shares = [client.shares(everyone, 5) for client in clients]
    words = FixedPoint().encode(np.ones(4), number)
    given = [{v: shares[v][u] for v in range(number) if v != u} for u in range(number)]
    sent = {u: clients[u].masked(given[u], words) for u in range(number - lost)}
    masking = number - lost
    assert counted["public"] == 2 * number
    assert counted["agree"] == (number - 1) * (number + 2 * masking)
    assert counted["stream"] == number * masking
    counted.clear()
    unmasked(everyone, sent, {u: clients[u].unmasking(sent) for u in sent}, 5, crypto)
    assert counted["stream"] == masking + lost * masking
    assert counted["agree"] == lost * masking


def test_the_cost_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "primitives", lambda: TOY)
    found = secure_cost(SecureSum(64, 40, None), 10, 1000, 4000)
    assert (found.up_bytes, found.plain_bytes) == (secure_bytes(10, 1000, 64), 4000)
    assert found.down_bytes == 10 * 96 + 9 * 82
    assert min(found.client_s or 0, found.server_s or 0, found.lost_s or 0) > 0


def test_a_client_sends_twice_the_bytes_of_16_bits_a_number() -> None:
    """Keys and shares of 1,024 clients are a small part beside 2^20 words of 32 bits."""
    assert secure_bytes(1 << 10, 1 << 20, 32) / (2 << 20) == pytest.approx(2.06, abs=0.005)


def explained(capsys: pytest.CaptureFixture[str], *more: str, inner: str = "fed_avg(cohort=10)") -> str:
    return asking("explain", f"secure({inner})", "--parameters", "1000000")(capsys, *more)[0]


def test_explain_tells_bytes_and_seconds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "primitives", lambda: TOY)
    assert "a client computes masks for" in explained(capsys)
    told = json.loads(explained(capsys, "--json"))["secure"]
    assert told["up_bytes"] > told["plain_bytes"] > 0
    assert told["client_s"] > 0


def test_explain_counts_no_tensors_that_stay_at_a_client(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "primitives", lambda: TOY)
    told = json.loads(explained(capsys, "--json", inner="fed_rep(cohort=10)"))
    assert told["secure"]["plain_bytes"] == told["round"]["plain_bytes"] < told["bytes"]
    assert told["secure"]["up_bytes"] == told["round"]["up_bytes"]


def test_explain_without_the_library(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    assert "pip install 'polytempo[secure]'" in explained(capsys)
    assert json.loads(explained(capsys, "--json"))["secure"]["client_s"] is None
