"""Models with buffers, sparse gradients, several dtypes, tied weights, many buckets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, SparseAdam

import polytempo as pt
from polytempo.aggregation import krum
from polytempo.core import Strategy
from polytempo.engines.processes.worker import Result
from polytempo.training.step.bucket_cuts import buckets
from polytempo.worlds import ProcessWorld
from process.crew import batches, close, flat, loop, mine, small, squared, together

pytestmark = pytest.mark.process

s = pt.strategies
all_gather = pt.compression.all_gather

STRATEGIES: dict[str, tuple[Strategy, int]] = {
    "acco": (s.acco(), 3),
    "adasum": (s.adasum(), 3),
    "delayed_sgd": (s.delayed_sgd(), 3),
    "co2": (s.co2(period=3), 6),
    "des_loc": (s.des_loc(3, 2, 2), 6),
    "diloco": (s.diloco(), 16),
    "gossip": (s.gossip(), 3),  # a ring of two is the exact mean
    "islands": (s.islands(outer=s.diloco(period=3), number=1), 3),
    "local_sgd": (s.local_sgd(), 8),
    "noloco": (s.noloco(period=3), 6),
    "quasi_global_momentum": (s.quasi_global_momentum(), 3),
    "parameter_averaging": (s.parameter_averaging(), 10),
    "post_local_sgd": (s.post_local_sgd(switch_step=2, period=3), 5),
    "robust_sgd": (s.robust_sgd(), 3),
    "shared_memory": (s.shared_memory(), 3),
    "slowmo": (s.slowmo(period=4), 8),
    "stochastic_gradient_push": (s.stochastic_gradient_push(), 3),
    "sync_sgd": (s.sync_sgd(), 3),
    "bf16_sgd": (s.bf16_sgd(), 3),
    "dgc": (s.dgc(0.1, momentum=0.0), 3),  # Adam has momentum of its own
    "ef21": (s.ef21(pt.compression.top_k(0.3), exact_below=4), 3),
    "int8_sgd": (s.int8_sgd(route=all_gather, exact_below=4), 3),  # two-sided, another rank would own another stripe
    "one_bit_sgd": (s.one_bit_sgd(route=all_gather, exact_below=4), 3),
    "power_sgd": (s.power_sgd(1, exact_below=4), 3),
    "qsgd": (s.qsgd(route=all_gather, exact_below=4), 3),
    "sign_sgd": (s.sign_sgd(exact_below=4), 3),
    "terngrad": (s.terngrad(), 3),
    "demo": (s.demo(0.3, exact_below=4), 3),
    "dion": (s.dion(2, exact_below=4), 3),
    "distributed_lion": (s.distributed_lion(exact_below=4), 3),
    "distributed_muon": (s.distributed_muon(), 3),
    "one_bit_adam": (s.one_bit_adam(warmup_steps=1), 3),  # encoded, stripes would differ
    "zero_one_adam": (s.zero_one_adam(2, 2, 2), 4),  # encoded, stripes would differ
    "sparse_loco": (s.sparse_loco(period=3, exact_below=4), 6),
    "sparta": (s.sparta(outer=s.local_sgd(period=3)), 3),
    "streaming_diloco": (s.streaming_diloco(period=3, fragments=1, delay=0, blend=0.0), 3),
    "threshold_sgd": (s.threshold_sgd(0.05, exact_below=4), 3),
    "top_k_sgd": (s.top_k_sgd(0.1, exact_below=4), 3),
}
"""Every strategy, and a number of steps until all ranks have met."""


# --- buckets


def test_every_strategy_is_here() -> None:
    served = {name for name in s.__all__ if getattr(s, name)().server is not None}  # they have tests of their own
    staged = {name for name in s.__all__ if getattr(s, name)().schedule is not None}  # pt.pipeline takes them
    parted = {name for name in s.__all__ if getattr(s, name)().parted is not None}  # pt.split, pt.hybrid
    hogwild = {"hogwild"}  # where no worker waits nothing repeats
    grouped = {name for name in s.__all__ if getattr(s, name)().groups > 1}  # for jobs alone
    assert set(STRATEGIES) | served | staged | parted | grouped | hogwild == set(s.__all__)


def test_many_buckets_equal_one_bucket_bitwise() -> None:
    def work(world: ProcessWorld) -> Result:
        found = {}
        for name, (strategy, num_steps) in STRATEGIES.items():
            for bucket_bytes in (1, 200, 2**20):
                net = small()
                optimizer = Adam(net.parameters(), lr=0.01)
                handle = pt.attach(net, optimizer, strategy, bucket_bytes=bucket_bytes)
                loop(net, optimizer, mine(batches(num_steps), world))
                found[f"{name} {bucket_bytes}"] = flat(net)
                handle.detach()
        return found

    first, second = together(2, work)
    assert first == second
    for name in STRATEGIES:
        assert first[f"{name} 1"] == first[f"{name} 200"] == first[f"{name} {2**20}"], name


def test_alternating_dtypes_make_no_small_buckets() -> None:
    """One bucket of each dtype, numbered in the order of completion in backward."""
    layers = [nn.Parameter(torch.ones(1, dtype=[torch.float32, torch.float64][i % 2])) for i in range(600)]
    cut = buckets({str(i): layer for i, layer in enumerate(layers)}, 2**20)
    assert [bucket.index for bucket in cut] == [0, 1]
    assert [next(reversed(bucket.parameters)) for bucket in cut] == ["1", "0"]
    assert [len(bucket.parameters) for bucket in cut] == [300, 300]


def test_there_are_not_many_more_than_400_buckets() -> None:
    layers = [nn.Parameter(torch.ones(3, dtype=[torch.float32, torch.float64][i % 3 // 2])) for i in range(2000)]
    cut = buckets({str(i): layer for i, layer in enumerate(layers)}, 1)
    assert 200 < len(cut) <= 403
    assert sorted(int(name) for bucket in cut for name in bucket.parameters) == list(range(2000))


def test_a_model_of_alternating_dtypes_trains() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.ParameterList([torch.ones(2, dtype=[torch.float32, torch.float64][i % 2]) for i in range(7)])
        optimizer = SGD(net.parameters(), lr=0.5)
        pt.attach(net, optimizer, bucket_bytes=16)
        sum(i * p.double().sum() * (world.rank + 1.0) for i, p in enumerate(net)).backward()
        optimizer.step()
        return [p.tolist() for p in net]

    assert together(2, work) == [[[1 - 0.75 * i] * 2 for i in range(7)]] * 2


def test_a_parameter_without_elements() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 0))])
        net.append(nn.Parameter(torch.ones(0, dtype=torch.float64)))
        optimizer = SGD(net.parameters(), lr=0.5)
        pt.attach(net, optimizer, s.sync_sgd())
        sum(p.sum() * (world.rank + 1.0) for p in net).backward()
        optimizer.step()
        return [p.tolist() for p in net]

    assert together(2, work) == [[[0.25, 0.25], [[], []], []]] * 2


# --- dtypes


class Mixed(nn.Module):
    """float32, then float64, then bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 5)
        self.b = nn.Linear(5, 5).double()
        self.c = nn.Linear(5, 3).bfloat16()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.b(torch.tanh(self.a(inputs)).double()))
        out: Tensor = self.c(hidden.bfloat16()).float()
        return out


@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.local_sgd(period=5), s.diloco(period=5)], ids=str)
def test_several_dtypes(strategy: Strategy) -> None:
    def work(world: ProcessWorld) -> Result:
        net = Mixed()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, strategy)
        loop(net, optimizer, mine(batches(5, torch.float32), world))
        return flat(net)

    alone = Mixed()
    loop(alone, SGD(alone.parameters(), lr=0.1), batches(5, torch.float32))
    first, second = together(2, work)
    assert first == second
    assert close(first, flat(alone), 0.02 if "diloco" not in str(strategy) else 0.2)


def test_a_strategy_that_looks_at_the_whole_gradient_wants_one_dtype() -> None:
    net = Mixed()

    def work(world: ProcessWorld) -> Result:
        with pytest.raises(ValueError, match="all parameters must share one dtype"):
            pt.attach(net, SGD(net.parameters(), lr=0.1), s.robust_sgd(krum()))
        return None

    together(2, work)


# --- tied weights and sparse gradients


class Tied(nn.Module):
    """One matrix reads symbols and writes them."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.Embedding(7, 4, sparse=sparse)
        self.write = nn.Linear(4, 7, bias=False)
        self.write.weight = self.read.weight
        self.double()

    def forward(self, symbols: Tensor) -> Tensor:
        out: Tensor = self.write(torch.tanh(self.read(symbols)))
        return out


def symbols(num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs (12,) and targets (12, 7)."""
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randint(7, (12,), generator=random), torch.randn(12, 7, generator=random, dtype=torch.float64))
        for _ in range(num_steps)
    ]


def test_tied_weights_are_exchanged_once() -> None:
    def work(world: ProcessWorld) -> Result:
        net = Tied()
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        handle = pt.attach(net, optimizer)
        loop(net, optimizer, mine(symbols(5), world))
        assert net.write.weight is net.read.weight
        return [sum(len(bucket.parameters) for bucket in handle.replica.buckets), *flat(net)]

    alone = Tied()
    loop(alone, SGD(alone.parameters(), lr=0.1, momentum=0.9), symbols(5))
    first, second = together(2, work)
    assert first == second
    assert close(first, [1, *flat(alone)], 1e-12)


SPARSE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda net: SGD(net.parameters(), lr=0.5),
    "SparseAdam": lambda net: SparseAdam(list(net.parameters()), lr=0.1),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_sparse_gradients_stay_sparse(name: str, accumulate: int) -> None:
    data = [(inputs % 5, targets[:, :4]) for inputs, targets in symbols(4)]  # rows 5 and 6 have no gradient

    def table(sparse: bool) -> nn.Embedding:
        torch.manual_seed(0)
        return nn.Embedding(7, 4, sparse=sparse).double()

    def train(net: nn.Module, optimizer: Optimizer, steps: list[tuple[Tensor, Tensor]]) -> None:
        for first in range(0, 4, accumulate):
            optimizer.zero_grad()
            for inputs, targets in steps[first : first + accumulate]:
                squared(net(inputs), targets).backward()
            optimizer.step()

    def work(world: ProcessWorld) -> Result:
        net = table(sparse=True)
        optimizer = SPARSE[name](net)
        pt.attach(net, optimizer)
        train(net, optimizer, list(mine(data, world)))
        assert net.weight.grad is not None
        assert net.weight.grad.is_sparse
        return [net.weight.grad.coalesce().indices()[0].tolist(), flat(net)]

    alone = table(sparse=name == "SparseAdam")
    train(alone, SPARSE[name](alone), data)
    first, second = together(2, work)
    assert first == second
    rows, values = first
    assert rows == sorted({int(i) for inputs, _ in data[-accumulate:] for i in inputs})
    assert close(values, flat(alone), 1e-12)


def test_a_rank_whose_batch_leaves_a_sparse_table_out() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.Embedding(3, 2, sparse=True)
        nn.init.ones_(net.weight)
        optimizer = SparseAdam(list(net.parameters()), lr=0.5)
        pt.attach(net, optimizer)
        if world.rank == 0:
            net(torch.tensor([1])).sum().backward()
        optimizer.step()
        return net.weight.tolist()

    first, second = together(2, work)
    assert first == second
    assert first[0] == first[2] == [1.0, 1.0]
    assert close(first[1], [0.5, 0.5], 1e-6)


# --- buffers


@pytest.mark.parametrize("rule", ["average", "broadcast", "leave"])
@pytest.mark.parametrize("strategy", [s.sync_sgd(), s.local_sgd(period=1)], ids=str)
def test_batch_norm_statistics_meet_by_rule(rule: str, strategy: Strategy) -> None:
    def work(world: ProcessWorld) -> Result:
        torch.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, strategy, buffers=rule)  # type: ignore[arg-type]
        loop(net, optimizer, mine(batches(1), world))
        return [buffer.tolist() for buffer in net.buffers()]

    (inputs, _), *_ = batches(1)
    first, second = (torch.stack([0.1 * part.mean(0), 0.9 + 0.1 * part.var(0)]) for part in inputs.chunk(2))
    expected = {"average": [(first + second) / 2] * 2, "broadcast": [first] * 2, "leave": [first, second]}[rule]
    for (mean, variance, num_batches), wanted in zip(together(2, work), expected, strict=True):
        assert num_batches == 1
        assert close([*mean, *variance], wanted.flatten().tolist(), 1e-12)


def test_only_running_statistics_are_averaged() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        table = torch.full((2,), 5.0, dtype=torch.float64)
        net.register_buffer("table", table)
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer)
        table.fill_(world.rank)
        loop(net, optimizer, mine(batches(1), world))
        return [table.tolist(), net.state_dict()["0.running_mean"].tolist()]

    first, second = together(2, work)
    assert (first[0], second[0]) == ([0.0, 0.0], [1.0, 1.0])
    assert first[1] == second[1]


def test_the_consensus_has_the_mean_of_the_running_statistics() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        optimizer = SGD(net.parameters(), lr=0.1)
        replica = pt.attach(net, optimizer, s.local_sgd(period=2)).replica
        seen = []
        for batch in mine(batches(1), world):
            loop(net, optimizer, [batch])
            agreed = world.drive(replica.consensus_buffers(world.port))
            seen += [
                net.state_dict()["0.running_mean"].tolist(),
                {name: buffer.tolist() for name, buffer in agreed.items()},
            ]
        return seen

    (mine_0, agreed_0), (mine_1, agreed_1) = together(2, work)
    assert agreed_0 == agreed_1
    assert list(agreed_0) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    assert close(agreed_0["0.running_mean"], [(a + b) / 2 for a, b in zip(mine_0, mine_1, strict=True)], 1e-12)
    assert mine_0 != mine_1


def test_models_in_turns_and_behind_one_that_is_left_have_messages_of_their_own() -> None:
    """Exchanges under way past a step: a ring that goes on while another model computes, and models that are mixed."""
    strategies = [s.delayed_sgd(2, route=pt.collectives.ring), s.gossip(overlap=True)]

    def work(world: ProcessWorld) -> list[list[list[float]]]:
        def begun(strategy: Strategy) -> tuple[nn.Module, Optimizer]:
            net = nn.Sequential(nn.Linear(4, 9000, dtype=torch.float64), nn.Linear(9000, 3, dtype=torch.float64))
            optimizer = SGD(net.parameters(), lr=1e-4)
            pt.attach(net, optimizer, strategy)
            return net, optimizer

        def trained(strategy: Strategy, *, in_turns: bool) -> list[list[float]]:
            torch.manual_seed(0)
            both = [begun(strategy), begun(strategy)]
            data = list(mine(batches(20), world))
            for part in [data[i : i + 1] for i in range(20)] if in_turns else [data]:
                for net, optimizer in both:
                    loop(net, optimizer, part)
            return [[float(p.detach().sum()) for p in net.parameters()] for net, _ in both]

        found = []
        for strategy in strategies:
            alone = trained(strategy, in_turns=False)
            found.append([alone, trained(strategy, in_turns=True), trained(strategy, in_turns=False)])
        return [[each == alone for each in more] for alone, *more in found]

    assert together(3, work) == [[[True, True]] * 2] * 3


def test_where_ranks_are_in_step_the_consensus_needs_no_buffers() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.BatchNorm1d(4)
        replica = pt.attach(net, SGD(net.parameters(), lr=0.1)).replica
        return list(world.drive(replica.consensus_buffers(world.port)))

    assert together(2, work) == [[], []]


def test_buffers_do_not_meet_between_the_models_meetings() -> None:
    def work(world: ProcessWorld) -> Result:
        net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        optimizer = SGD(net.parameters(), lr=0.1)
        pt.attach(net, optimizer, s.local_sgd(period=2))
        means = []
        for batch in mine(batches(2), world):
            loop(net, optimizer, [batch])
            means.append(next(net.buffers()).tolist())
        return means

    first, second = together(2, work)
    assert first[0] != second[0]
    assert first[1] == second[1]
