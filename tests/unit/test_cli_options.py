"""Options: files, the command line over them, and the errors of mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polytempo.cli.main import app
from polytempo.cli.options.command_options import CommandOptions, given_options, load_file
from polytempo.core.system.url_path import UrlPath
from polytempo.spec.run_options import RunOptions, parse_until

TOML = """
job = "digits"
strategy = "local_sgd(period=8)"
workers = 4
batch-size = 64
lr = 0.05
until = "accuracy=0.97"
dry_run = true
"""
TABLES = """
job = "digits"
strategy = "local_sgd(period=8)"
workers = 4
batch_size = 64
lr = 5e-2
until = { accuracy = 0.97 }
dry-run = true
"""


def test_a_list_without_names_is_refused(tmp_path: Path) -> None:
    """An empty list would mean the usual strategies, by surprise."""
    path = tmp_path / "run.toml"
    path.write_text("strategies = []", encoding="utf-8")
    with pytest.raises(ValueError, match=r"strategies = \[\]: the value is empty"):
        load_file(path)


@pytest.mark.parametrize("text", [TOML, TABLES])
def test_a_file_holds_the_options(tmp_path: Path, text: str) -> None:
    """Dashes or underscores, texts or tables, the same meaning."""
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    command, run = given_options({}, path)
    assert command == CommandOptions(job="digits", strategy="local_sgd(period=8)", workers=4, dry_run=True)
    assert RunOptions(**run) == RunOptions(batch_size=64, lr=0.05, until={"accuracy": 0.97})


def test_epochs_are_keys_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("batch_growth = { 5 = 4 }\nreshape = { 2 = 3 }\n", encoding="utf-8")
    assert load_file(path) == {"batch_growth": {5: 4}, "reshape": {2: 3}}


def test_the_command_line_goes_first(tmp_path: Path) -> None:
    """A given option replaces the file's; a missing one (None) does not."""
    path = tmp_path / "run.toml"
    path.write_text("workers = 4\nlr = 0.05\nresume = true\n", encoding="utf-8")
    command, run = given_options({"workers": 3, "lr": None, "resume": False}, path)
    assert (command.workers, run) == (3, {"lr": 0.05, "resume": False})


def test_defaults() -> None:
    """Nothing given: synchronous SGD with two workers; the job says the rest."""
    command, run = given_options({})
    assert (command.strategy, command.workers, run) == ("sync_sgd", 2, {})


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("", encoding="utf-8")
    assert load_file(tmp_path / "a.toml") == {}


def test_strategies_may_be_a_list(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("strategies = ['sync_sgd', 'local_sgd(period=2)']\n", encoding="utf-8")
    assert given_options({}, path).command.strategies == "sync_sgd, local_sgd(period=2)"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "workers = 0", "a.toml: workers = 0: must be a whole number >= 1"),
        ("a.toml", "workers = 'x'", "a.toml: workers = 'x': must be a whole number, got a text"),
        ("a.toml", "workers = true", "a.toml: workers = True: must be a whole number, got true or false"),
        ("a.toml", "lr = inf", "a.toml: lr = inf: must be a finite number"),
        ("a.toml", "lr = -1", "a.toml: lr = -1: must be a number > 0.0"),
        (
            "a.toml",
            "worker = 2",
            "a.toml: worker = 2: there is no option 'worker' (did you mean workers?); there are: ",
        ),
        ("a.toml", "until = 'accuracy=97'", "a.toml: until = 'accuracy=97': accuracy is a number between 0 and 1"),
        ("a.toml", "workers = ", "a.toml: this is not TOML: "),
        ("a.json", "{}", "a.json: options are read from TOML files; rename it"),
        ("a.yaml", "workers: 4", "a.toml with `workers = 4` in place of `workers: 4`"),
        ("a.toml", "#" + "-" * 100_000, "a.toml: a file of options has at most 100,000 bytes"),
    ],
)
def test_a_mistake_in_a_file(tmp_path: Path, name: str, text: str, message: str) -> None:
    """The error names file, key, value, and a remedy."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        given_options({}, path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "--workers 0: must be a whole number >= 1"),
        ({"batch_size": 0}, "--batch-size 0: must be"),
        ({"seed": -1}, "--seed -1: must be"),
        ({"until": "accuracy"}, "--until accuracy: must be written accuracy=0.97 or loss=0.1"),
        ({"until": "=0.9"}, "--until =0.9: must be written accuracy=0.97 or loss=0.1"),
        ({"until": "loss=nan"}, "--until loss=nan: loss must be a number, not nan"),
        ({"data": Path("missing")}, "--data missing: there is no such file or folder"),
        ({"data": Path("missing/*.tar")}, "--data missing/*.tar: no file has such a name"),
    ],
)
def test_a_mistake_on_the_command_line(given: dict[str, object], message: str) -> None:
    """The error names the option as written, and a remedy."""
    with pytest.raises(ValueError, match=re.escape(message)):
        given_options(given)


def test_data_may_be_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "part-0.tar").touch()
    for name in ("*.tar", "**/*.tar", "part-{0..299}.tar"):
        assert given_options({"data": tmp_path / name}).run["data"] == tmp_path / name


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.toml: there is no such file"):
        given_options({}, tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("text", "goals"),
    [
        ("accuracy=0.97", {"accuracy": 0.97}),
        ("loss=0.1", {"loss": 0.1}),
        (" accuracy = 0.9 , loss = 1e-2 ", {"accuracy": 0.9, "loss": 0.01}),
        ("f1=0.9", {"f1": 0.9}),
    ],
)
def test_until(text: str, goals: dict[str, float]) -> None:
    """One goal, or several."""
    assert parse_until(text) == goals


@pytest.mark.parametrize("text", ["", "accuracy", "accuracy=", "accuracy=high", "loss=1,loss=2", "loss=1,"])
def test_until_with_mistakes(text: str) -> None:
    """A goal has a measure and a number, once."""
    with pytest.raises(ValueError, match=r"written accuracy=0\.97|gives loss twice"):
        parse_until(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("workers = " + "[" * 50_000, "nested too deeply"),
        ("workers = " + "9" * 5000, "Exceeds the limit"),
    ],
    ids=["deep", "number"],
)
def test_a_small_file_cannot_ask_for_much(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"a.toml: this is not TOML: .*{problem}"):
        load_file(path)


@pytest.mark.parametrize("given", [Path("s3://bucket/run"), "s3://bucket/run"], ids=["command line", "file"])
def test_out_may_be_a_url(given: object) -> None:
    """The command line's is a Path, which has dropped a slash."""
    assert given_options({"out": given}).run == {"out": UrlPath("s3://bucket/run")}
    assert given_options({"out": Path("runs/x")}).run == {"out": Path("runs/x")}
    assert given_options({"out": Path("file:///runs/x")}).run == {"out": Path("/runs/x")}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train digits --strategy hogwild --ema 0.9", "PT1603"),
        ("train digits --strategy gpipe --workers 3", "use workers=4"),
        ("compare digits --strategies sync_sgd,hogwild --precision bf16", "PT1401"),
        ("simulate digits --strategy codistillation --workers 4 --meta --steps 2", "PT1316"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(command: str, said: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--dry-run"])
    assert (done.exit_code, said in done.output) == (2, True), done.output
