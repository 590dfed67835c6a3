"""Encoded pushes and pulls between real processes: they learn, send less, and a replay reaches the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import polytempo as pt
from polytempo.compression import bf16, delta, feedback, one_bit
from polytempo.jobs import find
from polytempo.replay.replay import replay

pytestmark = pytest.mark.process


def test_digits_learn_from_one_bit_pushes_and_repeat_to_the_bit(tmp_path: Path) -> None:
    strategy = pt.strategies.async_sgd(shards=2, codec=feedback(one_bit()), pull_codec=delta(bf16()))
    result = pt.run(find("digits"), strategy, workers=2, epochs=2, threads=1, out=tmp_path)
    assert result.accuracy is not None
    assert result.accuracy > 0.8
    assert result.server is not None
    assert result.server["refused"] == 0
    replayed = replay(tmp_path, find("digits"), strategy)
    assert (replayed.difference, replayed.ends) == (None, [])
    assert replayed.parameters_sha256 == replayed.recorded_sha256 == result.parameters_sha256
    assert all(push.norm > 0 for push in replayed.pushes)
