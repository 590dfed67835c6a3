"""Impossible splits are refused with the names and the remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import polytempo as pt
from polytempo.core import Port
from polytempo.core.suspension import drive
from polytempo.partition.tensor import Rules, column, places
from polytempo.partition.tensor.division import Division, even_sizes
from polytempo.worlds import ProcessWorld
from split_models import RULES, SEQUENCE_RULES, VOCABULARY, Transformer, made, on_ranks


def refused(
    rules: Rules,
    model: Callable[[], nn.Module] = Transformer,
    num_ranks: int = 2,
    *,
    sequence: bool = False,
    then: Callable[[Any], Any] = lambda net: None,
) -> str:
    """The message of the ValueError that all ranks raise."""

    def work(port: Port) -> str:
        with pytest.raises((ValueError, IndexError)) as error:
            then(pt.split(made(model), rules, sequence=sequence, port=port))
        return str(error.value)

    found = on_ranks(num_ranks, work)
    return str(found[0])


def net(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*copy.deepcopy(layers))


INSIDE: Rules = {"blocks.0.attention": "heads", "blocks.0.attention.out_proj": "row"}
INPUT = torch.ones(3, 4, dtype=torch.float64)
IMAGES, GROUPED = net(nn.Conv2d(4, 6, 1)), net(nn.Conv2d(4, 6, 1, groups=2))


@pytest.mark.parametrize(
    ("message", "rules", "more"),
    [
        ("no layer '*.upp' (did you mean 'blocks.0.up'?); it has characters, places", {"*.upp": "column"}, {}),
        ("no way 'colunm' to split a layer (did you mean 'column'?)", {"*.up": "colunm"}, {}),
        ("blocks.0.up is split by column after '*.up', and by row", {"*.up": "column", "*.up*": "row"}, {}),
        ("is a Linear, which cannot be split by heads; its ways are: column, row", {"*.up": "heads"}, {}),
        ("blocks.0.attention.out_proj is inside of blocks.0.attention", INSIDE, {}),
        ("6 heads cannot be split over 7 ranks: some would have none", {"*.attention": "heads"}, {"num_ranks": 7}),
        ("10 features cannot be 4 equal heads", {"*.up": column(heads=4)}, {}),
        ("24 features cannot be 5 equal blocks", {"*.own.out": column(packed=5)}, {}),
        ("characters.weight and scores.weight are one tied parameter", {"scores": "vocabulary"}, {}),
        ("it has groups=2 and padding_mode='zeros'", {"0": "column"}, {"model": GROUPED}),
        ("4 channels cannot be split over 5 ranks", {"0": "row"}, {"model": IMAGES, "num_ranks": 5}),
        ("have no positions; leave out sequence=True", {"0": "column"}, {"model": IMAGES, "sequence": True}),
        ("cut along dimension 1 into (12, 12)", {"characters": "column", "scores": "vocabulary"}, {}),
        ("is for sequence=True", {"norm": "sequence"}, {}),
        ("needs a rule, and places (Embedding) has none", RULES, {"sequence": True}),
        ("leave them out", {"0": "heads"}, {"model": net(nn.MultiheadAttention(4, 2, add_bias_kv=True))}),
        ("with max_norm=1.0", {"0": "embedding"}, {"model": net(nn.Embedding(4, 2, max_norm=1.0))}),
        ("0 cannot be split by places(rows=2, columns=3): 2 ranks cannot be a grid of 2 rows and 3 columns",
         {"0": places(rows=2, columns=3)}, {"model": IMAGES}),
        ("3 ranks cannot be a grid", {"0": places(columns=2)}, {"model": IMAGES, "num_ranks": 3}),
        ("0 is split by places, and 1 by places(columns=2); a model's pictures are cut in one grid",
         {"0": "places", "1": places(columns=2)}, {"model": net(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 1, 1))}),
        ("pictures have no positions; leave out sequence=True", {"0": "places"}, {"model": IMAGES, "sequence": True}),
        ("with batch_first=True", {"0": "heads"}, {"model": net(nn.MultiheadAttention(4, 2)), "sequence": True}),
    ],
)  # fmt: skip
def test_rules(message: str, rules: Rules, more: dict[str, Any]) -> None:
    assert message in refused(rules, **more)


@pytest.mark.parametrize(
    ("message", "rules", "layers", "given"),
    [
        ("rank 0 has 5 of the 10 inputs of a row layer, and got 8", {"0": column(heads=3), "1": "row"},
         [nn.Linear(4, 12), nn.Linear(10, 2)], INPUT),
        ("dropout 1 gets another tensor on each rank", {"0": "column", "2": "row"},
         [nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)], INPUT),
        ("the model's output differs between its ranks", {"0": "column"}, [nn.Linear(4, 6)], INPUT),
        ("an embedding of 4 rows got indices from 0 to 4", {"0": "embedding"}, [nn.Embedding(4, 2)], torch.arange(5)),
        ("a layer by places got a tensor of shape (3, 4)", {"0": "places"}, [nn.Tanh()], INPUT),
        ("has None positions", {"0": "sequence", "1": "row"}, [nn.LayerNorm(4), nn.Linear(4, 4)], INPUT),
    ],
)  # fmt: skip
def test_passes(message: str, rules: Rules, layers: list[nn.Module], given: torch.Tensor) -> None:
    sequence = "sequence" in rules.values()
    assert message in refused(rules, net(*layers), sequence=sequence, then=lambda model: model(given))


def test_classes() -> None:
    logits = torch.ones(3, 3, dtype=torch.float64)
    rules: Rules = {"0": "vocabulary"}

    def loss(*target: int, given: torch.Tensor = logits) -> str:
        layer = net(nn.Linear(4, 6))
        return refused(rules, layer, then=lambda model: model.cross_entropy(given, torch.tensor(target)))

    assert "there are 6 classes, and targets from 0 to 6" in loss(0, 3, 6)
    assert "the target (…); got (3, 3) and (2,)" in loss(0, 3)
    assert "logits have 6 classes; rank 0 has [3] in layers" in loss(0, 3, 5, given=torch.ones(3, 6))


def test_random_states_that_differ() -> None:
    def work(port: Port) -> str:
        model = pt.split(made(net(nn.Linear(4, 4), nn.Dropout(0.5))), {"0": "row"}, port=port)
        torch.manual_seed(port.rank)
        with pytest.raises(ValueError, match="ranks of one model have different random states") as error:
            model(INPUT)
        return str(error.value)

    assert on_ranks(2, work)


def test_a_sequence_that_is_too_short() -> None:
    given = torch.ones(2, 2, dtype=torch.long)
    assert "2 positions cannot be split over 3 ranks" in refused(
        SEQUENCE_RULES, num_ranks=3, sequence=True, then=lambda model: model(given)
    )


def test_waiting_outside_of_suspendable() -> None:
    async def nothing() -> None:
        return None

    with pytest.raises(RuntimeError, match="waits for other ranks outside of suspendable"):
        drive(nothing())


def test_alone_nothing_is_exchanged() -> None:
    whole = made(Transformer)
    model = pt.split(made(Transformer), RULES, world=ProcessWorld(0, (0,)))
    indices = torch.randint(0, VOCABULARY, (2, 5))
    assert torch.allclose(model(indices), whole(indices), rtol=1e-12, atol=1e-12)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in whole.named_parameters()}


def test_sizes() -> None:
    assert even_sizes(10, 4) == (3, 3, 2, 2)
    assert even_sizes(12, 2, unit=4) == (8, 4)
    packed = Division(0, (2, 1), packed=2)
    whole = torch.arange(6)
    assert [packed.take(whole, rank).tolist() for rank in (0, 1)] == [[0, 1, 3, 4], [2, 5]]
    assert packed.join([packed.take(whole, 0), packed.take(whole, 1)]).tolist() == whole.tolist()


def test_a_whole_model_is_loaded_into_another_split() -> None:
    def work(port: Port) -> Any:
        model = pt.split(made(Transformer), RULES, port=port)
        full = {name: tensor + 1 for name, tensor in model.full_parameters().items()}
        model.load_full_parameters(full)
        found = copy.deepcopy(model).full_parameters()
        assert all(torch.equal(found[name], full[name]) for name in full)
        with pytest.raises(ValueError, match=r"lack blocks.0.attention.in_proj_bias, .*; there are 1"):
            model.load_full_parameters({"characters.weight": full["characters.weight"]})
        return full

    two, three = on_ranks(2, work)[0], on_ranks(3, work)[0]
    assert all(torch.equal(two[name], three[name]) for name in two)
    made(Transformer).load_state_dict({**two, "scores.weight": two["characters.weight"]})


def test_a_rank_that_raises_ends_the_threads_of_the_others() -> None:
    """Closed in the middle of a pass, `suspendable` lets its thread unwind."""
    ended: list[int] = []

    async def forever(port: Port) -> Any:
        return await port.recv(torch.empty(1), 1 - port.rank)

    def work(port: Port) -> Any:
        try:
            return drive(forever(port)) if port.rank else 1 / 0
        finally:
            ended.append(port.rank)

    with pytest.raises(ZeroDivisionError):
        on_ranks(2, work)
    assert sorted(ended) == [0, 1]


def test_random_numbers_are_each_rank_s_own() -> None:
    def work(port: Port) -> list[float]:
        torch.manual_seed(port.rank)
        found = [float(torch.rand(()))]
        drive(barrier(port))
        return [*found, float(torch.rand(()))]

    async def barrier(port: Port) -> None:
        await port.barrier()

    expected = []
    for rank in range(3):
        torch.manual_seed(rank)
        expected.append([float(torch.rand(())), float(torch.rand(()))])
    assert on_ranks(3, work) == expected


def test_a_compiled_model_is_refused() -> None:
    def work(port: Port) -> None:
        model = torch.compile(pt.split(made(IMAGES), {"0": "places"}, port=port), backend="eager")
        with pytest.raises(pt.errors.Incompatible, match=r"^PT2101"):
            model(torch.ones(1, 4, 3, 3, dtype=torch.float64))

    on_ranks(2, work)
