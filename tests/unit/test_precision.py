"""`precision` as a value and as text, the loss scale's decisions, and masters on one model."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import polytempo as pt
from polytempo.core import NotFinite
from polytempo.spec.precision import Precision, parse_precision
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.training.precision import masters as module_of_masters
from polytempo.training.precision.masters import LossScaling, Masters

BF16 = pt.precision("bf16")
FP16 = pt.precision("fp16", loss_scale=256)


@pytest.mark.parametrize(
    "text", ["bf16", "autocast", "fp16(loss_scale=dynamic)", "fp16(loss_scale=1024)", "fp16(loss_scale=0.5)"]
)
def test_text_is_read_again(text: str) -> None:
    assert str(parse_precision(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fp16", r"losses must be scaled; give loss_scale='dynamic'"),
        ("bf16(loss_scale=8)", "bf16 has the range of float32"),
        ("bf17", "did you mean bf16"),
        ("autocast(loss_scale=8)", "no argument|unexpected|takes no"),
        ("amp", "write 'autocast'"),
        ("half", "write 'fp16'"),
        ("float32", "models compute in float32 anyway"),
        ("fp16(loss_scale=-1)", "a number above 0, or 'dynamic', got -1"),
        ("fp16(loss_scale=auto)", "a number above 0, or 'dynamic', got 'auto'"),
        ("fp16(scale=2)", "did you mean loss_scale"),
    ],
)
def test_what_could_not_train_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_precision(text)


def test_autocast_has_the_bits_of_a_plain_loop_with_autocast() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in (ours, theirs)]
    handle = pt.attach(ours, optimizers[0], "sync_sgd()", precision="autocast")
    for _ in range(4):
        x, y = torch.randn(12, 6), torch.randn(12, 3)
        with torch.autocast("cpu", torch.bfloat16):
            answer = theirs(x)
        found = ours(x)
        assert (answer.dtype, found.dtype) == (torch.bfloat16, torch.float32)
        for output, optimizer in zip((found, answer.float()), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(output, y).backward()
            optimizer.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert mine.dtype == torch.float32
            assert mine.grad is not None
            assert other.grad is not None
            assert torch.equal(mine, other)
            assert torch.equal(mine.grad, other.grad)
    handle.detach()
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_a_run_that_travels_as_text_keeps_its_precision() -> None:
    job, strategy = pt.jobs.find("digits"), pt.strategies.sync_sgd()
    spec = RunSpec.of(job, strategy, 2, RunOptions(precision="fp16(loss_scale=dynamic)"))  # type: ignore[arg-type]
    assert RunSpec.from_json(spec.to_json(), pt.jobs.find).options.precision == Precision("fp16", "dynamic")


@pytest.mark.parametrize(
    ("strategy", "given", "said"),
    [
        (pt.strategies.shared_memory(), "bf16", "PT1401"),
        (pt.strategies.downpour(), "fp16(loss_scale=8)", "PT1402"),
        (pt.strategies.gpipe(inner=pt.strategies.async_sgd()), "bf16", "PT1403"),
        (pt.strategies.flexrr(), "bf16", "PT1404"),
        (pt.strategies.shared_memory(), "autocast", "PT1411"),
        (pt.strategies.gpipe(inner=pt.strategies.async_sgd()), "autocast", "PT1412"),
        (pt.strategies.flexrr(), "autocast", "PT1413"),
        (pt.strategies.gpipe(), "fp16(loss_scale=8)", "PT1405"),
        (pt.strategies.split(), "fp16(loss_scale=dynamic)", "PT1406"),
    ],
)
def test_strategies_that_cannot_are_named(strategy: pt.Strategy, given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunSpec.of(pt.jobs.find("digits"), strategy, 2, RunOptions(precision=parse_precision(given)))


def test_elastic_workers_cannot_agree_on_overflows() -> None:
    options = RunOptions(precision=parse_precision("fp16(loss_scale=dynamic)"), min_workers=1)
    with pytest.raises(ValueError, match="PT1407"):
        RunSpec.of(pt.jobs.find("digits"), pt.strategies.sync_sgd(), 2, options)


# ---------------------------------------------------------------------- the loss scale

O, X = False, True  # noqa: E741 - fine, and overflowed
DYNAMIC = LossScaling.of(pt.precision("fp16", loss_scale="dynamic"))


@pytest.mark.parametrize(
    ("steps", "scale", "skipped"),
    [
        ([], 2.0**16, 0),
        ([X], 2.0**15, 1),
        ([X, O, X], 2.0**14, 2),
        ([O] * 1999, 2.0**16, 0),
        ([O] * 2000, 2.0**17, 0),
        ([O] * 1999 + [X] + [O] * 1999, 2.0**15, 1),
        ([O] * 1999 + [X] + [O] * 2000, 2.0**16, 1),
        ([O] * 2000 * 20, 2.0**24, 0),
    ],
)
def test_a_dynamic_scale(steps: list[bool], scale: float, skipped: int) -> None:
    state = DYNAMIC
    for overflowed in steps:
        state = state.after(overflowed=overflowed)
    assert (state.scale, state.skipped) == (scale, skipped)


def test_a_scale_that_no_gradient_fits_ends_the_run() -> None:
    state = DYNAMIC
    for step in range(30):
        state = state.after(overflowed=True)
        state.check(step)
    with pytest.raises(NotFinite, match="31 steps were left out"):
        state.after(overflowed=True).check(30)


def test_a_constant_scale_stays() -> None:
    state = LossScaling.of(FP16)
    assert state.after(overflowed=False) == state


# ---------------------------------------------------------------------- masters


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def batches(steps: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(8, 4, generator=random), torch.randn(8, 3, generator=random)


def sgd(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def trained(precision: Precision, steps: int = 4) -> nn.Module:
    net = model()
    optimizer = sgd(net)
    handle = pt.attach(net, optimizer, precision=precision)
    for x, y in batches(steps):
        optimizer.zero_grad()
        handle.scaled((net(x) - y).square().mean()).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("precision", [BF16, FP16], ids=str)
def test_a_step_is_the_definition(precision: Precision) -> None:
    """Against a loop that holds two models: one of 16 bits for the gradient, one of float32 for the optimizer."""
    dtype, scale = (torch.bfloat16, 1) if precision is BF16 else (torch.float16, 256)
    whole, low = model(), model()
    optimizer = sgd(whole)
    linear = [low[0], low[3]]
    for layer in linear:
        layer.to(dtype)
    for x, y in batches():
        low.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            answer = low(x)
        (scale * (answer.float() - y).square().mean()).backward()
        for master, parameter in zip(whole.parameters(), low.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(whole.parameters(), low.parameters(), strict=True):
                parameter.copy_(master)
    whole[1].load_state_dict({**whole[1].state_dict(), **dict(low[1].named_buffers())})
    found = trained(precision).state_dict()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_who_has_which_bits() -> None:
    net = model()
    optimizer = sgd(net)
    pt.attach(net, optimizer, precision="bf16")
    x, y = next(batches())
    answer = net(x)
    (answer - y).square().mean().backward()
    optimizer.step()
    low, wide = torch.bfloat16, torch.float32
    assert [(p.dtype, p.grad.dtype) for p in net.parameters()] == [
        *[(low, low), (low, low)],
        *[(wide, wide), (wide, wide)],  # of the norm
        *[(low, low), (low, low)],
    ]
    assert {buffer.dtype for buffer in net.buffers()} == {wide, torch.int64}
    assert {entry["momentum_buffer"].dtype for entry in optimizer.state.values()} == {wide}
    assert answer.dtype == wide
    assert {tensor.dtype for tensor in net.state_dict().values()} == {wide, torch.int64}


def test_what_is_saved_loads_into_a_float32_model_and_goes_on() -> None:
    net = trained(BF16)
    plain = model()
    plain.load_state_dict(net.state_dict())
    again = model()
    pt.attach(again, sgd(again), precision=BF16)
    again.load_state_dict(plain.state_dict())
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name
    assert torch.equal(again[0].weight, plain[0].weight.bfloat16())


def test_masters_outlive_the_optimizer() -> None:
    """A function that trains a model and returns it drops its optimizer."""
    net = trained(BF16)
    saved = net.state_dict()
    gc.collect()
    assert not torch.equal(saved["0.weight"], saved["0.weight"].bfloat16().float()), "it was trained in float32"
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    known = ref(net)
    del net
    gc.collect()
    assert known() is None, "nothing else keeps the model"


def test_an_optimizers_state_is_loaded_in_float32() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    (net(next(batches())[0])).square().mean().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    pt.attach(net, optimizer, precision="bf16")
    optimizer.load_state_dict(saved)
    assert {entry["exp_avg"].dtype for entry in optimizer.state.values()} == {torch.float32}
    assert torch.equal(optimizer.state[net[0].weight]["exp_avg"], saved["state"][0]["exp_avg"])


def test_a_change_in_place_is_a_movement_of_the_step() -> None:
    """Clipped weights: changed ones begin the next step at their new place; the others keep their bits."""
    net = trained(BF16, 1)
    before = net.state_dict()["0.weight"].clone()
    with torch.no_grad():
        net[0].weight.clamp_(-0.1, 0.1)
    after = net.state_dict()["0.weight"]
    inside = before.bfloat16().abs() <= 0.1
    assert torch.equal(after[inside], before[inside])
    assert not torch.equal(after, after.bfloat16().float()), "masters keep what 16 bits cannot hold"
    assert bool((after.abs() <= 0.1001).all())


def test_steps_in_chunks_are_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(BF16).state_dict()
    monkeypatch.setattr(module_of_masters, "_CHUNK_BYTES", 1)
    for name, tensor in trained(BF16).state_dict().items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("given", ["bf16", "fp16(loss_scale=256)", "fp16(loss_scale=dynamic)"])
@pytest.mark.parametrize("allow_nan", [True, False])
def test_one_worker_alone_widens_no_gradient(given: str, allow_nan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec with feedback is not left out with one worker, who may have residuals of when there were others."""
    widened: list[torch.Size] = []
    convert = torch.Tensor.to

    def spied(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        found: Tensor = convert(tensor, *args, **kwargs)  # type: ignore[call-overload]
        widened.extend([tensor.shape] * (found.dtype == torch.float32 != tensor.dtype))
        return found

    def exchanged(strategy: pt.Strategy) -> tuple[list[torch.Size], list[bool], dict[str, Tensor]]:
        net = model()
        optimizer = sgd(net)
        handle = pt.attach(net, optimizer, strategy, precision=parse_precision(given), allow_nan=allow_nan)
        for x, y in batches():
            optimizer.zero_grad()
            loss = handle.scaled((net(x) - y).square().mean())
            widened.clear()
            monkeypatch.setattr(torch.Tensor, "to", spied)
            loss.backward()
            monkeypatch.undo()
            of_a_step, narrow = (
                list(widened),
                [p.grad is not None and p.grad.dtype == p.dtype for p in net.parameters()],
            )
            optimizer.step()
        return of_a_step, narrow, net.state_dict()

    found, narrow, trained = exchanged(pt.strategies.one_bit_sgd())
    assert (found, narrow) == ([], [True] * 6)
    plain = exchanged(pt.strategies.sync_sgd())[2]
    assert all(torch.equal(trained[name], tensor) for name, tensor in plain.items())
    late, _, _ = exchanged(pt.strategies.delayed_sgd())
    assert len(late) == 4, "what is remembered is float32: both linear layers' weights and biases"


@pytest.mark.parametrize("precision", [BF16, FP16], ids=str)
def test_clipping_is_by_the_norm_of_what_the_optimizer_sees(precision: Precision) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    handle = pt.attach(net, optimizer, precision=precision)
    x, y = next(batches())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    handle.scaled((net(x) - y).square().mean()).backward()
    norm = handle.clip_grad_norm_(0.01)
    optimizer.step()
    moved = sum(float((net.state_dict()[n] - before[n]).square().sum()) for n, _ in net.named_parameters()) ** 0.5
    assert moved == pytest.approx(0.01, rel=1e-3)
    assert 0.1 < float(norm) < 10


class Tied(nn.Module):
    """A table that is also the last layer, and two layers unknown to autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.lstm, self.last = nn.Embedding(7, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 7)
        self.both = nn.Bilinear(4, 4, 4)
        self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.table(x))
        return self.last(self.both(hidden, hidden))


def test_tied_weights_stay_one_parameter() -> None:
    net = Tied()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = pt.attach(net, optimizer, precision="bf16")
    before = net.state_dict()["table.weight"].clone()
    net(torch.arange(6).view(2, 3)).square().mean().backward()
    optimizer.step()
    assert net.last.weight is net.table.weight
    assert not torch.equal(net.state_dict()["table.weight"], before)
    handle.detach()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    net(torch.arange(6).view(2, 3)).square().mean().backward()
    assert net.last.weight.grad is not None
    assert net.last.weight.grad.dtype == torch.float32


# ---------------------------------------------------------------------- mistakes


def test_mistakes_in_a_loop() -> None:
    net = model()
    optimizer = sgd(net)
    handle = pt.attach(net, optimizer, precision=FP16)
    x, y = next(batches())
    (net(x) - y).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"handle\.scaled\(loss\)\.backward"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="was given a closure"):
        optimizer.step(lambda: handle.scaled((net(x) - y).square().mean()))


@pytest.mark.parametrize(
    ("net", "make", "said"),
    [
        (model().double(), sgd, "parameter '0.weight' is float64"),
        (model().bfloat16(), sgd, "parameter '0.weight' is bfloat16"),
        (model(), lambda net: torch.optim.LBFGS(net.parameters()), "LBFGS calls a closure"),
    ],
)
def test_models_that_have_no_masters(net: nn.Module, make, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=said):
        pt.attach(net, make(net), precision=BF16)


def test_a_scaler_beside_it_is_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="scales losses itself"):
        pt.attach(net, sgd(net), scaler=torch.amp.GradScaler("cpu"), precision=FP16)


def test_branches_on_threads_are_refused_beside_it() -> None:
    net = model()
    with pytest.raises(ValueError, match="both replace the model's forward"):
        pt.attach(net, sgd(net), precision=BF16, inter_threads=2)


def test_another_value_is_no_precision() -> None:
    net = model()
    with pytest.raises(TypeError, match=r'pt\.precision\("bf16"\)'):
        pt.attach(net, sgd(net), precision=torch.bfloat16)  # type: ignore[arg-type]


def test_windows_may_be_nested() -> None:
    net = model()
    masters = Masters(net, sgd(net), BF16)
    with masters.in_float32(), masters.in_float32():
        assert net[0].weight.dtype == torch.float32
        net[0].weight.detach().fill_(1.001)
    assert bool((net[0].weight == 1).all())
    assert bool((net.state_dict()["0.weight"] == 1.001).all())
