"""Tags of runs: given at the start, changed on the page, kept in the run's folder, and never more than words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import polytempo as pt
from live_pages import Served, serving, write_run
from polytempo.cli.look.look_options import RunsOptions
from polytempo.cli.look.runs import runs as show_runs
from polytempo.report.status.stream import ends_of
from polytempo.spec.text.tags import tags_of
from polytempo.ui.run_facts import repeating
from polytempo.ui.run_list import RunList
from polytempo.ui.tagging import change_tags, tags_in
from waiting import soon


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", ()), ("a", ("a",)), ("a, b,a", ("a", "b")), (["a", "b,c"], ("a", "b", "c")), (None, ()), ((), ())],
)
def test_tags_are_read_from_text_and_lists(given: object, expected: tuple[str, ...]) -> None:
    assert tags_of(given) == expected
    assert tags_of(str(tags_of(given))) == expected


@pytest.mark.parametrize("given", ["a,", " ", "a b", "<b>", [""], [3], 3, "x" * 41, [str(n) for n in range(21)]])
def test_other_texts_are_no_tags(given: object) -> None:
    with pytest.raises(ValueError, match="tag"):
        tags_of(given)


def test_a_run_without_a_folder_keeps_no_tags() -> None:
    with pytest.raises(ValueError, match="tags needs the run's folder"):
        pt.simulate("digits", "sync_sgd()", 2, steps=1, threads=1, tags="x")


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that began with two tags."""
    root = tmp_path_factory.mktemp("runs")
    pt.simulate("digits", "sync_sgd()", 2, steps=1, threads=1, lr=0.3, tags=["first", "begun"], out=root / "run")
    return root


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (None, ["first", "begun"]),
        ('["later"]', ["later"]),
        ("[]", []),
        ('["<script>"]', []),
        ('{"a": 1}', ["first", "begun"]),
        ("[[", ["first", "begun"]),
        (json.dumps(["x"] * 100_000), ["first", "begun"]),
    ],
)
def test_a_run_has_the_tags_of_its_start_or_of_its_file(tagged: Path, kept: str | None, expected: list[str]) -> None:
    if kept is not None:
        (tagged / "run" / "tags.json").write_text(kept)
    [row] = RunList(tagged).look()
    (tagged / "run" / "tags.json").unlink(missing_ok=True)
    assert (row["tags"], row["settings"]["lr"]) == (expected, "0.3")


def test_a_resumed_run_keeps_its_tags(tmp_path: Path) -> None:
    out = tmp_path / "run"
    pt.Trainer(pt.jobs.find("digits"), "sync_sgd()", steps=4, checkpoint_every=4, tags="mine", out=out).fit()
    pt.Trainer(pt.jobs.find("digits"), "sync_sgd()", steps=8, resume=True, out=out).fit()
    [row] = RunList(tmp_path).look()
    assert row["tags"] == ["mine"]


def test_the_page_adds_to_the_tags_of_a_run_that_was_resumed_without_any(tmp_path: Path) -> None:
    """A run that began with one tag, was resumed with another one, and then with none."""
    start = {"kind": "start", "job": "digits", "strategy": "sync_sgd()", "world": "process", "workers": 1}
    write_run(tmp_path / "run")
    lines = [json.dumps(start | {"settings": each}) for each in ({"tags": "a"}, {"tags": "b"}, {"lr": "0.1"})]
    (tmp_path / "run" / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert RunList(tmp_path).look()[0]["tags"] == ["b"]
    change_tags(tmp_path / "run", ["new"], [])
    assert RunList(tmp_path).look()[0]["tags"] == ["b", "new"]


def test_the_command_of_a_run_has_its_tags(tagged: Path) -> None:
    start, _ = ends_of(tagged / "run")
    assert start is not None
    assert "--tag first,begun" in repeating(start)


def test_a_list_sorts_by_settings_and_shows_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr in (("one", "0.05"), ("two", "0.3"), ("three", "0.1"), ("none", "")):
        write_run(tmp_path / name, lr=lr)
    change_tags(tmp_path / "two", ["paper"], [])
    show_runs(RunsOptions(runs=str(tmp_path), sort="lr"))
    said = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    found = {words[0]: words[-1] for words in said if words[0] in ("one", "two", "three", "none")}
    assert [*found] == ["two", "three", "one", "none"]
    assert found["two"] == "paper"


def test_a_link_in_place_of_tags_is_not_followed(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "run"), tmp_path / "other.json"
    other.write_text('["mine"]')
    (run / "tags.json").symlink_to(other)
    assert tags_in(run, {}) == []
    change_tags(run, ["x"], [])
    assert (tags_in(run, {}), other.read_text()) == (["x"], '["mine"]')


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    write_run(tmp_path / "many" / "02-gossip")
    with serving(tmp_path) as page:
        yield page


def test_tags_come_from_the_page_and_stay_with_the_run(served: Served) -> None:
    headers = {"Content-Type": "application/json", "Cookie": served.cookie(), "Origin": served.base}

    def asked(**told: object) -> tuple[int, str]:
        found = served.ask("/tags", method="POST", headers=headers, body=json.dumps(told))
        return found[0], found[2]

    def tags() -> list[str]:
        [row] = served.parts("kind=runs", 1)["runs"]
        return list(row["tags"])

    run = ["many/02-gossip"]
    assert asked(runs=run, add=["paper", "baseline"]) == (200, '{"stayed":{}}')
    assert soon(lambda: tags() == ["paper", "baseline"])
    assert asked(runs=run, add=["v2"], remove=["paper"])[0] == 200
    wrong = [(run, "<b>"), (["../other"], "x"), (["many"], "x"), (["."], "x")]
    for runs, tag in wrong:
        status, text = asked(runs=runs, add=[tag])
        assert (status, len(json.loads(text)["stayed"])) == (200, 1)
    assert asked(runs=7)[0] == 400
    assert served.ask("/tags", method="POST", headers=headers | {"Origin": "null"}, body="{}")[0] == 403
    assert soon(lambda: tags() == ["baseline", "v2"])
