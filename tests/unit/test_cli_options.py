"""Options: files in two formats, the command line over them, and what a mistake is told."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from polytempo.cli.options.run_options import TrainOptions, load_file, parse_until, train_options
from polytempo.core.system.url_path import place

TOML = """
job = "digits"
strategy = "local_sgd(period=8)"
workers = 4
batch-size = 64
lr = 0.05
until = "accuracy=0.97"
dry_run = true
"""
YAML = """
job: digits
strategy: local_sgd(period=8)
workers: 4
batch-size: 64
lr: 5e-2
until: {accuracy: 0.97}
dry_run: yes
"""
MEANING = TrainOptions(
    job="digits",
    strategy="local_sgd(period=8)",
    workers=4,
    batch_size=64,
    lr=0.05,
    until={"accuracy": 0.97},
    dry_run=True,
)


def test_a_list_without_names_is_refused(tmp_path: Path) -> None:
    """It would mean the usual strategies, which nobody who writes it wants."""
    path = tmp_path / "run.toml"
    path.write_text("strategies = []", encoding="utf-8")
    with pytest.raises(ValueError, match=r"strategies = \[\]: the value is empty"):
        load_file(path)


@pytest.mark.parametrize(("name", "text"), [("run.toml", TOML), ("run.yaml", YAML), ("run.yml", YAML)])
def test_a_file_holds_the_options(tmp_path: Path, name: str, text: str) -> None:
    """Both formats, dashes or underscores, the same meaning."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert train_options({}, path) == MEANING


def test_the_command_line_goes_first(tmp_path: Path) -> None:
    """What it gives replaces the file's; what it leaves out (None) does not."""
    path = tmp_path / "run.toml"
    path.write_text("workers = 4\nlr = 0.05\nresume = true\n", encoding="utf-8")
    options = train_options({"workers": 3, "lr": None, "resume": False}, path)
    assert (options.workers, options.lr, options.resume) == (3, 0.05, False)


def test_defaults() -> None:
    """Nothing given: synchronous SGD with two workers; the job says the rest."""
    options = train_options({})
    assert (options.strategy, options.workers, options.seed) == ("sync_sgd", 2, 0)
    assert (options.epochs, options.steps, options.until, options.batch_size, options.lr) == (
        None,
        None,
        {},
        None,
        None,
    )


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    """In both formats."""
    for name in ("a.toml", "a.yaml"):
        (tmp_path / name).write_text("", encoding="utf-8")
        assert load_file(tmp_path / name) == {}


def test_strategies_may_be_a_list(tmp_path: Path) -> None:
    """As a list, or as on the command line."""
    path = tmp_path / "run.yaml"
    path.write_text("strategies: [sync_sgd, 'local_sgd(period=2)']\n", encoding="utf-8")
    assert train_options({}, path).strategies == "sync_sgd, local_sgd(period=2)"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "workers = 0", "a.toml: workers = 0: must be greater than or equal to 1"),
        ("a.toml", "workers = 'x'", "a.toml: workers = 'x': must be a valid integer"),
        ("a.toml", "workers = true", "a.toml: workers = True: must be a number, not true or false"),
        ("a.toml", "lr = inf", "a.toml: lr = inf: must be a finite number"),
        ("a.toml", "lr = -1", "a.toml: lr = -1: must be greater than 0"),
        (
            "a.toml",
            "worker = 2",
            "a.toml: worker = 2: there is no option 'worker' (did you mean workers?); there are: ",
        ),
        ("a.toml", "until = 'accuracy=97'", "a.toml: until = 'accuracy=97': accuracy is a number between 0 and 1"),
        ("a.toml", "workers = ", "a.toml: this is not TOML: "),
        ("a.yaml", "workers: [", "a.yaml: this is not YAML: "),
        ("a.yaml", "- 1", "a.yaml: expected lines like 'workers: 4', not [1]"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "a.yaml: this is not YAML: "),
        ("a.json", "{}", "a.json: options are read from .toml, .yaml and .yml files"),
        ("a.yaml", "# " + "-" * 100_000, "a.yaml: a file of options has at most 100,000 bytes"),
    ],
)
def test_a_mistake_in_a_file(tmp_path: Path, name: str, text: str, message: str) -> None:
    """File, key, value, and what would be right."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        train_options({}, path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "--workers 0: must be greater than or equal to 1"),
        ({"batch_size": 0}, "--batch-size 0: must be"),
        ({"seed": -1}, "--seed -1: must be"),
        ({"until": "accuracy"}, "--until accuracy: must be written accuracy=0.97 or loss=0.1"),
        ({"until": "precision=0.9"}, "--until precision=0.9: accepts accuracy and loss, not precision"),
        ({"until": "loss=nan"}, "--until loss=nan: loss must be a number, not nan"),
        ({"data": Path("missing")}, "--data missing: there is no such file or folder"),
    ],
)
def test_a_mistake_on_the_command_line(given: dict[str, object], message: str) -> None:
    """The option as it was written, and what would be right."""
    with pytest.raises(ValueError, match=re.escape(message)):
        train_options(given)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """By name."""
    with pytest.raises(ValueError, match=r"missing\.toml: there is no such file"):
        train_options({}, tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("text", "goals"),
    [
        ("accuracy=0.97", {"accuracy": 0.97}),
        ("loss=0.1", {"loss": 0.1}),
        (" accuracy = 0.9 , loss = 1e-2 ", {"accuracy": 0.9, "loss": 0.01}),
    ],
)
def test_until(text: str, goals: dict[str, float]) -> None:
    """One goal, or both."""
    assert parse_until(text) == goals


@pytest.mark.parametrize("text", ["", "accuracy", "accuracy=", "accuracy=high", "loss=1,loss=2", "loss=1,"])
def test_until_with_mistakes(text: str) -> None:
    """A goal has a measure and a number, once."""
    with pytest.raises(ValueError, match=r"written accuracy=0\.97|gives loss twice"):
        parse_until(text)


def doubling(kind: str) -> str:
    """A kilobyte of aliases that stands for 2^40 values."""
    forms = {"lists": "{0}: &{0} [*{1}, *{1}]", "tables": "{0}: &{0} {{x: *{1}, y: *{1}}}"}
    forms["merges"] = "{0}: &{0} {{<<: [*{1}, *{1}]}}"
    names = [f"n{i}" for i in range(41)]
    first = "n0: &n0 {lr: 1}" if kind == "merges" else "n0: &n0 [1, 1]"
    return "\n".join([first, *(forms[kind].format(b, a) for a, b in pairwise(names))])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.yaml", doubling("lists"), "stands for more than 10,000 values with its aliases written out"),
        ("a.yaml", doubling("tables"), "stands for more than 10,000 values with its aliases written out"),
        ("a.yaml", doubling("merges"), "stands for more than 10,000 values with its aliases written out"),
        ("a.yaml", "workers: &a [*a]", "nested more than 50 levels deep"),
        ("a.yaml", "workers: " + "[" * 60 + "]" * 60, "nested more than 50 levels deep"),
        ("a.yaml", "workers: " + "[" * 1_200, "nested more than 50 levels deep"),
        ("a.yaml", "workers: " + "9" * 5000, "Exceeds the limit"),
        ("a.yaml", "workers: 2020-99-99", "month must be in 1..12"),
        ("a.toml", "workers = " + "[" * 50_000, "nested too deeply"),
        ("a.toml", "workers = " + "9" * 5000, "Exceeds the limit"),
    ],
    ids=["lists", "tables", "merges", "itself", "60 deep", "1,200 deep", "number", "date", "deep toml", "toml number"],
)
def test_a_small_file_cannot_ask_for_much(tmp_path: Path, name: str, text: str, problem: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{name}: this is not \w+: .*{problem}"):
        load_file(path)


def test_a_few_aliases_are_options_like_others(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("workers: &n 4\nbatch-size: *n\nuntil: {<<: {accuracy: 0.97}}\n")
    assert load_file(path) == {"workers": 4, "batch_size": 4, "until": {"accuracy": 0.97}}


@pytest.mark.parametrize("given", [Path("s3://bucket/run"), "s3://bucket/run"], ids=["command line", "file"])
def test_out_may_be_a_url(given: object) -> None:
    """The command line's is a Path, which has dropped a slash."""
    assert train_options({"job": "digits", "out": given}).out == "s3://bucket/run"
    assert train_options({"job": "digits", "out": Path("runs/x")}).out == Path("runs/x")
    assert place(str(train_options({"job": "digits", "out": Path("file:///runs/x")}).out)) == Path("/runs/x")
