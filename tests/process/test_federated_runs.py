"""Federated runs on real processes: the simulation's bits, also when broken off and resumed with other workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import polytempo as pt
from laws import test_private_rounds
from laws.test_federated import SEED, data, job, model, simulated
from laws.test_federated_pairs import CUT, Row, given
from polytempo import federated as fed
from polytempo.federated.client_tests import spread

pytestmark = pytest.mark.process
accountant = test_private_rounds.accountant
CLIENTS = "by_size(6, sigma=0.7)"


@pytest.mark.parametrize(
    "strategy",
    [fed.fed_adam(4, batch_size=4), fed.scaffold(4, batch_size=4), fed.secure(fed.fed_avg_m(4, batch_size=4))],
    ids=str,
)
def test_a_run_that_goes_on_with_another_number_of_workers(strategy: pt.Strategy, tmp_path: Path) -> None:
    def run(workers: int, steps: int, *, resume: bool) -> pt.Result:
        return pt.run(
            job(), strategy, workers, steps=steps, seed=SEED, clients=CLIENTS, threads=1, out=tmp_path, resume=resume
        )

    run(2, 3, resume=False)
    found = run(3, 6, resume=True)
    assert found.parameters_sha256 == simulated(strategy, 6)["hash"]
    assert (found.steps, found.epochs, found.samples) == (6, 6.0, 24)


@pytest.mark.parametrize(
    "row",
    [
        Row("fed_yogi", "bulyan", "both", "one_cycle_betas"),
        Row("fed_rep", "trimmed_mean", "down", "momentum"),
        Row("fed_buff", "mean", "up", "adamw"),
        Row("fed_bn", "secure", "down", "one_cycle_momentum"),
    ],
    ids=str,
)
def test_rows_of_a_merge_codes_and_a_local_optimizer(row: Row, tmp_path: Path) -> None:
    """The rows' pairs are in `laws.test_federated_pairs`, as simulations."""
    strategy, of = row.strategy(), row.job()
    pt.run(of, strategy, 2, threads=1, out=tmp_path, **given(CUT))
    found = pt.run(of, strategy, 3, threads=1, out=tmp_path, resume=True, **given())
    assert found.parameters_sha256 == pt.simulate(of, strategy, 1, **given()).parameters_sha256


@pytest.mark.usefixtures("accountant")
def test_private_samples_of_workers() -> None:
    """Both worlds draw the same parts of the noise."""
    given = {"steps": 4, "seed": SEED, "batch_size": 7}
    strategy = fed.dp_sgd(clip=0.5, noise=1.0)
    found = pt.run(job(), strategy, 2, threads=1, **given)
    again = pt.simulate(job(), strategy, 2, **given)
    assert found.loss == pytest.approx(again.loss, rel=1e-12)
    assert found.metrics == again.metrics
    assert abs(found.loss - pt.simulate(job(), pt.strategies.sync_sgd(), 2, **given).loss) > 1e-3


def test_scores_are_of_each_clients_own_head(tmp_path: Path) -> None:
    """Each client's samples of the test set are judged by its own model, also by another number of workers and in the
    other world; clients without a round have the server's."""
    dealt = fed.clients(data(), fed.by_size(6, sigma=0.7), SEED, test=0.4)
    tests = dealt.test
    assert tests is not None
    own = job(
        data=lambda path: pt.Data(dealt, tests), correct=lambda output, target: output.argmax(1) == target, lr=1.0
    )
    strategy, given = fed.fed_rep(3, 2, 4, head_epochs=4), {"steps": 2, "seed": SEED}
    found = pt.run(own, strategy, 2, threads=1, out=tmp_path, checkpoint_every=1, **given)
    counts = torch.zeros(2, 6, dtype=torch.float64)
    total, seen = 0.0, set[tuple[float, ...]]()
    for client, (first, end) in enumerate(tests.ranges):
        net = model()
        net.load_state_dict(pt.training.client_model(tmp_path, client))
        seen.add(tuple(net[2].bias.tolist()))
        inputs, labels = map(torch.stack, zip(*(tests[number] for number in range(first, end)), strict=True))
        with torch.no_grad():
            output = net(inputs)
        counts[:, client] = torch.tensor([float((output.argmax(1) == labels).sum()), end - first])
        total += float(torch.nn.functional.cross_entropy(output, labels, reduction="sum"))
    assert 3 < len(seen) < 6 + 1
    expected = spread(counts)
    assert {name: found.metrics[name] for name in expected} == expected
    assert found.accuracy == float(counts[0].sum() / counts[1].sum())
    assert found.loss == pytest.approx(total / len(tests), rel=1e-12)
    for workers in (1, 2, 3):
        again = pt.simulate(own, strategy, workers, **given)
        assert {name: again.metrics[name] for name in expected} == expected
        assert again.loss == pytest.approx(found.loss, rel=1e-12)
