"""`polytempo look`: the layers of runs side by side, their similarity, and its refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from torch import Tensor, nn

import polytempo as pt
from command_output import asking
from polytempo.jobs.digits import job
from polytempo.report.pictures.layer_pictures import RunPart, draw_activations, draw_filters
from polytempo.training.observe.layer_activations import layer_activations, layers_of, named_layer

asked = asking("look")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short runs with gradients in time and late, and one of ranks with different models."""
    folder = tmp_path_factory.mktemp("runs")
    named = {
        "sync": pt.strategies.sync_sgd(),
        "late": pt.strategies.delayed_sgd(delay=3),
        "local": pt.strategies.local_sgd(period=50),
    }
    for name, strategy in named.items():
        pt.simulate(job, strategy, workers=2, steps=12, lr=0.02, checkpoint_every=12, out=folder / name)
    return folder


# ---------------------------------------------------------------------- CKA


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("samples", "p", "q"), [(40, 7, 5), (12, 30, 9), (12, 4, 25), (9, 9, 9)])
def test_cka_is_the_papers(samples: int, p: int, q: int) -> None:
    """HSIC(K, L) = tr(K H L H) / (n - 1)², with H = I - 1 1ᵀ / n, normalized (sections 3 and 4)."""
    x, y = random(samples, p, seed=1), random(samples, q, seed=2) + 0.5 * random(samples, p, seed=1)[:, :1]
    h = torch.eye(samples, dtype=torch.float64) - 1 / samples

    def hsic(one: Tensor, other: Tensor) -> float:
        return float(torch.trace(one @ one.T @ h @ other @ other.T @ h)) / (samples - 1) ** 2

    expected = hsic(x, y) / (hsic(x, x) * hsic(y, y)) ** 0.5
    assert pt.training.linear_cka(x, y) == pytest.approx(expected, rel=1e-12)
    assert pt.training.linear_cka(y, x) == pytest.approx(expected, rel=1e-12)
    assert pt.training.linear_cka(x, x) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("p", [6, 50])
def test_cka_does_not_see_rotations_translations_and_one_scale(p: int) -> None:
    x, y = random(20, p, seed=3), random(20, 8, seed=4)
    rotation = torch.linalg.qr(random(p, p, seed=5)).Q
    assert pt.training.linear_cka(3.7 * x @ rotation + random(p, seed=6), y) == pytest.approx(
        pt.training.linear_cka(x, y), rel=1e-10
    )
    stretched = x * torch.linspace(0.1, 10, p, dtype=torch.float64)
    assert abs(pt.training.linear_cka(stretched, y) - pt.training.linear_cka(x, y)) > 0.01


def test_cka_of_independent_features_is_p_of_n_and_p() -> None:
    for samples, p in ((200, 200), (400, 100), (100, 300)):
        found = pt.training.linear_cka(random(samples, p, seed=7), random(samples, p, seed=8))
        assert found == pytest.approx(p / (samples + p), rel=0.05)


def test_cka_takes_maps_as_features_and_says_what_it_cannot_compare() -> None:
    maps = random(10, 3, 4, 4, seed=9)
    assert pt.training.linear_cka(maps.float(), maps.flatten(1)) == pytest.approx(1, rel=1e-6)
    assert torch.tensor(pt.training.linear_cka(maps, torch.ones(10, 2))).isnan()
    with pytest.raises(ValueError, match="got 10 and 9 samples"):
        pt.training.linear_cka(maps, maps[:9])


# ---------------------------------------------------------------------- layers


class Several(nn.Module):
    """A layer that is called twice, one that is not called, and two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.second = nn.ConvTranspose2d(2, 2, 1)
        self.norm = nn.BatchNorm2d(2)
        self.twice = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)
        self.last = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.first(x.view(-1, 1, 8, 8)))).mean(-1)[..., :2].flatten(1)
        answer: Tensor = self.last(self.twice(self.twice(x).relu()))
        return answer


def test_layers_have_their_own_names_and_short_ones() -> None:
    layers = layers_of(Several())
    assert [(each.name, each.short) for each in layers] == [
        ("first", "conv1"),
        ("second", "conv2"),
        ("twice", "linear1"),
        ("spare", "linear2"),
        ("last", "linear3"),
    ]
    assert named_layer(layers, "last").short == named_layer(layers, "linear3").short == "linear3"
    with pytest.raises(ValueError, match=r"there is no layer 'conv9' with a weight; there are first \(conv1\), second"):
        named_layer(layers, "conv9")
    assert [each.name for each in layers_of(nn.Linear(2, 2))] == [""]


def test_activations_are_those_of_plain_torch() -> None:
    model = Several()
    x, y = (torch.stack(list(each)) for each in zip(*(pt.data.digits()[1][i] for i in range(16)), strict=True))
    found = layer_activations(replace(job, model=Several), model, layers_of(model), (x, y), 16)
    assert list(found.by_layer) == ["first", "second", "twice", "last"]
    torch.testing.assert_close(found.by_layer["first"], model.first(x.view(-1, 1, 8, 8)).detach())
    assert found.by_layer["twice"].shape == (16, 8)
    torch.testing.assert_close(found.by_layer["last"], model(x).detach())
    assert found.loss == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-6)
    assert found.accuracy == pytest.approx(float((model(x).argmax(1) == y).float().mean()))
    assert not model.first._forward_hooks


# ---------------------------------------------------------------------- the command


def test_all_layers_of_runs_side_by_side(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(runs / name) for name in ("sync", "late", "local")]
    found: dict[str, Any] = json.loads(asked(capsys, *folders, "--out", str(tmp_path), "--samples", "300", "--json")[0])
    data = pt.data.digits()[1]
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:300].sort().values.tolist()
    x = torch.stack([data[i][0] for i in chosen])
    models = [job.model() for _ in folders]
    for model, folder in zip(models, folders, strict=True):
        model.load_state_dict(pt.training.checkpoint_model(folder))
    first = [model.get_submodule("0")(x).detach() for model in models]
    last = [model(x).detach() for model in models]
    assert [each["layer"] for each in found["layers"]] == ["0", "2"]
    for each, answers in zip(found["layers"], (first, last), strict=True):
        assert each["cka"] == pytest.approx(
            [pt.training.linear_cka(answers[0], other) for other in answers[1:]], rel=1e-6
        )
    assert (found["samples"], found["of"]) == (300, "test")
    assert [each["run"] for each in found["runs"]] == ["sync", "late", "local"]
    assert found["pictures"] == [str(tmp_path / "similarity.png")]
    assert imread(tmp_path / "similarity.png").shape[2] == 4
    shown, _ = asked(capsys, *folders, "--out", str(tmp_path), "--samples", "300")
    assert "CKA with late" in shown
    assert "128 x 64" in shown


def test_one_layer_of_runs_side_by_side(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = str(runs / "sync"), str(runs / "late" / "checkpoint" / "step-00000012")
    found = json.loads(asked(capsys, one, other, "--layer", "linear2", "--out", str(tmp_path), "--json")[0])
    assert (found["layer"], found["short"], found["weight"], found["samples"]) == ("2", "linear2", [10, 128], 360)
    assert found["cka"][0][0] == pytest.approx(1)
    assert found["cka"][0][1] == found["cka"][1][0]
    a, b = (pt.training.checkpoint_model(each)["2.weight"].flatten() for each in (one, other))
    cosine = float(a @ b / (a.norm() * b.norm()))
    assert [each["weights_cosine"] for each in found["runs"]] == pytest.approx([1, cosine], rel=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linear2-activations.png", "linear2-weights.png"]
    assert found["pictures"] == [str(tmp_path / f"linear2-{name}.png") for name in ("weights", "activations")]
    assert "weights' cosine with sync" in asked(capsys, one, other, "--layer", "2", "--out", str(tmp_path))[0]


@pytest.mark.parametrize(
    ("shape", "picture", "said"),
    [
        ((70, 1, 5, 5), None, "the first 64 of 70 filters"),
        ((5, 3, 3, 3), None, "5 filters, red, green and blue"),
        ((4, 20, 3, 3), None, "4 outputs (rows), the first 16 of 20 inputs (columns)"),
        ((6, 4, 3), None, "6 units (rows), 12 inputs (columns)"),
        ((100, 12), (3, 4), "the first 64 of 100 units, their inputs as a picture"),
        ((3, 7), (3, 4), "3 units (rows), 7 inputs (columns)"),
    ],
)
def test_weights_of_every_shape_are_drawn(
    shape: tuple[int, ...], picture: tuple[int, ...] | None, said: str, tmp_path: Path
) -> None:
    parts = [RunPart(name, "$about", random(*shape, seed=1).numpy()) for name in ("one", "$other")]
    assert draw_filters(tmp_path / "weights.png", "layer", parts, picture).startswith(said)
    assert imread(tmp_path / "weights.png").shape[2] == 4


@pytest.mark.parametrize("shape", [(9, 4, 5, 6), (70, 600), (3, 2, 2), (2, 1)])
def test_activations_of_every_shape_are_drawn(shape: tuple[int, ...], tmp_path: Path) -> None:
    parts = [RunPart("one", "about", torch.zeros(shape).double().numpy())]
    draw_activations(tmp_path / "maps.png", "layer", parts, random(shape[0], 5, 6, seed=2).numpy())
    assert imread(tmp_path / "maps.png").shape[2] == 4


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["none"], "RUN none: there is no such folder"),
        (["sync", "--layer", "conv1"], "there is no layer 'conv1' with a weight; there are 0 (linear1), 2 (linear2)"),
        (["empty"], "there is no checkpoint in"),
        (["sync", "--samples", "1"], "--samples 1: must be a "),
        (["sync", "--job", "mnist"], "sync is a run of 'digits', and --job mnist is 'mnist'; name the same"),
        (["sync", "other"], "the runs are of jobs digits, mine; compare runs of one job"),
        (["other"], "other is a run of 'mine', a job of your own; name it: --job path/to/file.py:job"),
        (["sync", "--out", "nowhere"], "--out nowhere: there is no such folder"),
    ],
)
def test_runs_that_cannot_be_shown_are_refused(
    arguments: list[str],
    complaint: str,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(runs)
    (runs / "empty").mkdir(exist_ok=True)
    (runs / "other").mkdir(exist_ok=True)
    (runs / "other" / "result.json").write_text('{"world": "virtual", "strategy": "sync_sgd", "job": "mine"}')
    assert complaint in asked(capsys, *arguments, code=2)[1]
