"""Models that cannot be cut, and cuts that separate inseparable parts."""

from __future__ import annotations

import math
from itertools import pairwise
from threading import Thread

import pytest
import torch
from torch import Tensor, nn

from cut_models import Opaque, chained, cnn
from polytempo.partition.cutting import cut


class Lambda(nn.Module):
    """A model of a function and three layers."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.function = function

    def forward(self, x: Tensor, *more: Tensor, flag: bool = False) -> Tensor:
        return self.function(self.layers, x, *more)  # type: ignore[operator]


def export_follows(layers: nn.ModuleList, x: Tensor) -> Tensor:
    y = layers[0](x) if x.dim() == 2 else x
    return layers[1](y) if x.shape[0] < 10 else y


def test_a_cut_by_the_sample_s_sizes_refuses_others() -> None:
    """`torch.fx` cannot decide by sizes; `torch.export` decides as with the sample, and says where that is right."""
    model = Lambda(export_follows)
    found = cut(model, 2, sample=X)
    for samples in (1, 2, 9):
        x = torch.randn(samples, 4)
        assert torch.equal(chained(found, (x,)), model(x))
        assert [shape for shape, _ in found.layouts(x).values()] == [(samples, 4)]
    with pytest.raises(ValueError, match=r"was cut for x.size\(\)\[0\] <= 9, as the sample has it; call it with such"):
        found.layouts(torch.randn(10, 4))


class Follows(nn.Module):
    """A module, not the whole model, that `torch.fx` cannot trace: it is cut if that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) if x.dim() == 2 else x


def test_a_module_that_stays_whole_is_traced_by_export_where_a_cut_must_divide_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Follows())
    assert [cost.layers for cost in cut(model, 2, sample=X).costs] == [("0",), ("1",)]
    by_count, by_name = cut(model, 3, sample=X), cut(model, sample=X, by=["1.one", "1.two"])
    for found in (by_count, by_name):
        assert found.begins == ("1", "1.two")
        assert cut(model, sample=X, by=found.begins).values == found.values
        assert torch.equal(chained(found, (X,)), model(X))
        assert {key for stage in found.stages for key in stage.module.state_dict()} == set(model.state_dict())


def both_refuse(layers: nn.ModuleList, x: Tensor) -> Tensor:
    y = layers[0](x) if x.dim() == 2 else x
    if y.sum() > 0:
        y = layers[1](y)
    return layers[2](y)


class WithoutGradients(Follows):
    """A part of it computes no gradients, which export has as a graph of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x) if x.dim() == 2 else x
        with torch.no_grad():
            z = y.sin() + 1
        return self.two(y) * z


def asks_what_it_is(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """Each branch silently takes another way for the stand-ins of `torch.fx`."""
    x = layers[0](x) if isinstance(x, Tensor) else layers[1](x)
    if hasattr(x, "quantiles"):
        x = layers[1](x)
    try:
        x = x * len(x)
    except Exception:
        x = x + 1
    return layers[2](x)


def asks_for_a_size(layers: nn.ModuleList, x: Tensor) -> Tensor:
    if isinstance(x.shape[1], int):
        x = layers[1](x)
    return layers[2](layers[0](x) * {4: 2.0}.get(x.shape[1], 3.0))


@pytest.mark.parametrize("function", [asks_what_it_is, asks_for_a_size])
def test_what_decides_otherwise_for_stand_ins_is_left_to_export(function: object) -> None:
    model = Lambda(function)
    assert torch.equal(chained(cut(model, 2, sample=X), (X,)), model(X))


class InPartWithoutGradients(nn.Module):
    """`torch.fx` would record the region as if it were none."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        with torch.no_grad():
            z = y.sin()
        return self.two(y) * z


class Kinds(nn.Module):
    """Asks for the kind of its input, and keeps something for later."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = x.detach().mean()
        if torch.is_tensor(x):
            x = self.one(x)
        return self.two(x)


def test_what_is_decided_otherwise_is_named_or_stays_whole() -> None:
    with pytest.raises(ValueError, match=r"test_cut_mistakes.py:\d+: `z = y.sin\(\)` is in a region .*set_grad"):
        cut(InPartWithoutGradients(), 2, sample=X)
    model = nn.Sequential(nn.Linear(4, 4), Kinds())
    found = cut(model, 2, sample=X)
    assert [cost.layers for cost in found.costs] == [("0",), ("1",)]
    assert model[1].kept is None
    assert torch.equal(chained(found, (X,)), model(X))
    with pytest.raises(
        ValueError, match=r"at most 2 parts .*; 1 stays whole: .*: `if torch.is_tensor\(x\):` does some"
    ):
        cut(model, 4, sample=X)


def test_of_two_obstacles_the_one_is_named_that_remains() -> None:
    with pytest.raises(
        ValueError, match=r"test_cut_mistakes.py:\d+: `if y.sum\(\) > 0:` cannot be traced .*data-dep"
    ) as caught:
        cut(Lambda(both_refuse), 2, sample=X)
    assert "nn.Sequential" in str(caught.value)
    with pytest.raises(ValueError, match=r"test_cut_mistakes.py:\d+: `z = y.sin\(\) \+ 1` is in a region .*set_grad"):
        cut(WithoutGradients(), 2, sample=X)


def test_what_export_would_fix_is_not_fixed_in_silence() -> None:
    def scaled(layers: nn.ModuleList, x: Tensor, factor: float) -> Tensor:
        return layers[1](layers[0](x)) * factor if x.dim() == 2 else x

    with pytest.raises(ValueError, match=r"`return .* if x.dim\(\) == 2 else x` cannot be traced \(TraceError"):
        cut(Lambda(scaled), 2, sample=(X, 2.0))


def linear(stages: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages)))


X = torch.ones(2, 4)


def decides(layers: nn.ModuleList, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return layers[0](x)
    return layers[1](x)


def test_a_decision_by_value_is_named_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"test_cut_mistakes.py:\d+: `if x.sum\(\) > 0:` cannot be traced") as caught:
        cut(Lambda(decides), 2, sample=X)
    assert "nn.Sequential" in str(caught.value)


def test_a_submodule_that_cannot_be_traced_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Opaque(), nn.Linear(6, 3))
    found = cut(model, 3, sample=X)
    assert [cost.layers for cost in found.costs] == [("0",), ("1",), ("2",)]
    with pytest.raises(ValueError, match=r"stages=4, .* at most 3 parts .*; 1 stays whole: .*cut_models.py:\d+"):
        cut(model, 4, sample=X)


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        (4, {}, "stages=4, and the model can be cut into at most 3 parts that have parameters"),
        (0, {}, "stages=0: must be at least 1"),
        (None, {}, "by='operations' needs the number of stages"),
        (2, {"by": "speed"}, "by='speed': must be one of operations, time, memory, traffic"),
        (3, {"by": ["1"]}, "stages=3, and 1 names begin stages behind the first: 2 stages"),
        (None, {"by": ["2", "1"]}, "stage 1 would be empty: 1 does not come behind"),
        (None, {"by": ["0"]}, "stage 0 would be empty"),
        (None, {"by": ["11"]}, "no layer or operation of the model is called 11; did you mean 1"),
        (2, {"memory_bytes": 100}, "memory_bytes=100: no cut into 2 stages fits, .* is [0-9,]+ bytes"),
        (2, {"within": 0.5}, "within=0.5: must be at least 1"),
    ],
)
def test_a_mistake_names_the_numbers(stages: int | None, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(linear(), stages, sample=X, **options)  # type: ignore[arg-type]


def test_a_sample_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="cannot be run on the sample: call_module 0 raised RuntimeError"):
        cut(linear(), 2, sample=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"Sequential.forward cannot be called with the 2 inputs"):
        cut(linear(), 2, sample=(X, X))
    with pytest.raises(ValueError, match="cut for the inputs input; got 2"):
        cut(linear(), 2, sample=X).layouts(X, X)


def checks(layers: nn.ModuleList, x: Tensor) -> Tensor:
    assert 0 < x.shape[1] <= 4, f"{x.shape[1]} columns"
    assert not x.is_complex()
    if x.shape[1] != 4 or x.dim() == 1:
        raise ValueError("expected four columns")
    return layers[2](layers[1](layers[0](x)))


def test_checks_are_taken_as_passed() -> None:
    model = Lambda(checks)
    assert torch.equal(chained(cut(model, 3, sample=X), (X,)), model(X))


def test_another_thread_computes_while_one_traces() -> None:
    """Tracing replaces `nn.Module.__call__` for all threads."""
    other = linear()
    answers: list[Tensor] = []

    def meanwhile(layers: nn.ModuleList, x: Tensor) -> Tensor:
        thread = Thread(target=lambda: answers.append(other(X) + torch.rand(2, 4) * other[0].weight.sum()))
        thread.start()
        thread.join()
        return layers[2](layers[0](x))

    cut(Lambda(meanwhile), 2, sample=X)
    assert len(answers) == 3, "traced for training and for evaluation, and called"
    assert all(type(each) is Tensor for each in answers)


def changes(layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = layers[0](x)
    view = x.view(-1, 2)
    y = layers[1](x.tanh())
    view += 1
    return layers[2](y + x)


def test_a_tensor_and_what_changes_it_in_place_stay_together() -> None:
    model = Lambda(changes)
    expected = model(X)
    found = cut(model, 2, sample=X)
    assert torch.equal(chained(found, (X,)), expected)
    with pytest.raises(ValueError, match=r"no stage can begin at layers\.1: iadd changes it in place"):
        cut(model, sample=X, by=["layers.1"])
    assert len(cut(cnn(), sample=torch.ones(2, 2, 6, 6), by=["3"]).stages) == 2
    with pytest.raises(ValueError, match=r"no stage can begin at 2: 2 changes it in place, and 1 … 2 stay together"):
        cut(cnn(), sample=torch.ones(2, 2, 6, 6), by=["2"])


def repeats(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for _ in range(2):
        x = layers[1](layers[0](x))
    return layers[2](x)


def test_a_module_with_buffers_is_in_one_stage_and_others_are_shared() -> None:
    model = Lambda(repeats)
    shared = cut(model, sample=X, by=["layers.0#2", "layers.2"]).shared
    assert shared == {
        f"layers.{k}.{name}": dict.fromkeys((0, 1), f"layers.{k}.{name}") for k in (0, 1) for name in ("weight", "bias")
    }
    model.layers[1] = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match=r"layers\.1 has buffers and is called there and before"):
        cut(model, sample=X, by=["layers.0#2"])


def drawn(layers: nn.ModuleList, x: Tensor) -> Tensor:
    x = layers[0](x + torch.rand(x.shape[0], 1) + torch.rand(1))
    x[:, 0] = 0.0
    n = math.prod(x.shape) + torch.tensor([1.0, 2.0]).sum()
    return layers[2](layers[1](x) / n)


def test_what_is_drawn_is_drawn_anew_and_constants_are_no_parameters() -> None:
    model = Lambda(drawn)
    found = cut(model, 3, sample=X)
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = model(X)
        torch.manual_seed(seed)
        assert torch.equal(chained(found, (X,)), expected)
    assert {key for stage in found.stages for key in stage.module.state_dict()} == set(model.state_dict())
    assert not [name for name in vars(model) if "constant" in name]


def follows(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[2](layers[1](layers[0](x)))


def test_unused_parameters_stay_and_frozen_ones_get_no_gradient() -> None:
    model = Lambda(follows)
    model.spare = nn.Linear(2, 2)
    model.layers[0].requires_grad_(False)
    found = cut(model, 3, sample=X)
    assert [value.requires_grad for value in found.values] == [False, True]
    assert set(found.stages[2].module.state_dict()) == {
        "layers.2.weight", "layers.2.bias", "spare.weight", "spare.bias"
    }  # fmt: skip


class OtherInTraining(nn.Module):
    """Two ways through a model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2 if self.training else self.layer(x)


def test_a_module_of_two_modes_stays_whole_and_a_model_of_two_modes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), OtherInTraining())
    model.eval()
    found = cut(model, 2, sample=X)
    assert not any(module.training for stage in found.stages for module in stage.module.modules())
    assert torch.equal(chained(found, (X,)), model(X))
    with pytest.raises(ValueError, match=r"OtherInTraining\.forward does other things in training"):
        cut(OtherInTraining(), 1, sample=X)


def test_the_least_traffic_keeps_the_balance_if_asked() -> None:
    """The least is sent behind the narrow layer, which leaves next to nothing to the last stage."""
    widths = (64, 64, 64, 2, 64)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    sample = torch.ones(8, 64)
    assert cut(model, 2, sample=sample).begins == ("1",)
    assert cut(model, 2, sample=sample, by="traffic").begins == ("1",)
    assert cut(model, 2, sample=sample, by="traffic", within=math.inf).begins == ("3",)
    largest = [
        max(cost.memory_bytes(2.0) for cost in cut(model, 3, sample=sample, by=by).costs)
        for by in ("memory", "operations")
    ]
    assert largest[0] <= largest[1]


def test_costs_of_a_known_chain() -> None:
    """Linear(4, 4) on 2 samples: 2·2·4·4 operations forward, as many for the weights, and for the input if any."""
    found = cut(linear(), 3, sample=X)
    bytes_each = 2 * 4 * 4
    assert [cost.operations for cost in found.costs] == [64 * 2 + 6 * bytes_each, *[64 * 3 + 6 * bytes_each] * 2]
    assert [cost.parameters for cost in found.costs] == [20] * 3
    assert [cost.saved_bytes for cost in found.costs] == [bytes_each] * 3
    assert [(cost.bytes_in, cost.bytes_out) for cost in found.costs] == [(0, 32), (32, 32), (32, 0)]
    assert cut(linear(), 3, sample=X, by="time").costs[0].seconds > 0  # type: ignore[operator]
