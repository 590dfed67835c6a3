"""Every codec on a device: the CPU's wires to the bit; decoded tensors stay on the device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from device.crew import check_all, last_line, together
from laws.codec_cases import MODERATE, Case, raw
from laws.codecs import ROWS, text
from polytempo.compression import feedback
from polytempo.core import Codec, CodecState, EncodeContext
from polytempo.worlds import ProcessWorld

pytestmark = pytest.mark.process

CASES = [Case(shape, kind, torch.float32, seed=3) for shape in [(1,), (257,), (64, 40)] for kind in MODERATE]
WHEN = EncodeContext(5, 1, 77)
TOLERANCE = {"pretend": 0.0, "cuda": 2e-2}
"""The tolerance of decoded values, relative to the largest of the tensor; a device may round a code the other way."""


def test_every_codec_encodes_as_on_the_cpu(device: str) -> None:
    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        codecs = {text(row): row.make() for row in ROWS}
        codecs |= {f"feedback({text(row)})": feedback(row.make()) for row in ROWS if row.feedable}
        cases = {f"{name} of {case}": (codec, case) for name, codec in codecs.items() for case in CASES}
        return {name: wrong for name, (codec, case) in cases.items() if (wrong := fault(codec, case, card))}

    check_all(together(device, 1, work))


def fault(codec: Codec, case: Case, card: torch.device) -> str:
    """The error of two rounds of a codec, or nothing."""
    states = (codec.init(case.tensor()), codec.init(case.tensor().to(card)))
    for number in range(2):
        x = case.tensor(number)
        try:
            there = taken(codec, x.to(card), states[1])
        except Exception as error:
            return last_line(error)
        here = taken(codec, x, states[0])
        states = (here.state, there.state)
        if strays := [tensor.device for tensor in there[:3] if tensor.device != card]:
            return f"on {strays[0]}"
        if card.type == "pretend" and raw(here.wire) != raw(there.wire.cpu()):
            return f"another wire in round {number}"
        largest = max(float(x.abs().max()), 1e-30)
        for a, b in ((here.decoded, there.decoded), (here.total, there.total)):
            if not float((a - b.cpu()).abs().max()) <= TOLERANCE[card.type] * largest:
                return f"other values in round {number}"
    return ""


class Round(NamedTuple):
    """A wire, the decoded tensor, a sum with it, and the codec's next state."""

    wire: Tensor
    decoded: Tensor
    total: Tensor
    state: CodecState


def taken(codec: Codec, x: Tensor, state: CodecState) -> Round:
    wire, state = codec.encode(x, state, WHEN)
    total = torch.ones_like(x)
    codec.add_(wire, total, WHEN)
    return Round(wire, codec.decode(wire, x, WHEN), total, state)
