"""`polytempo plan JOB`: a small search, its output, and its refusals."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from command_output import asking
from polytempo.cli.main import app
from polytempo.cluster import ethernet
from polytempo.jobs import find
from polytempo.planner import search
from polytempo.planner.front import PlanLimits
from polytempo.planner.search_space import SearchSpace

SMALL = ("--workers", "1,4", "--batch-sizes", "16,32", "--strategies", "sync_sgd, local_sgd(period=8)")
TARGET = ("--until", "accuracy=0.93", "--cluster", "ethernet(gbit_per_s=1)")
SPACE = SearchSpace(("sync_sgd()", "local_sgd(period=8)"), (1, 4), (16, 32))


asked = asking("plan")


def planned(limits: PlanLimits = PlanLimits(), seed: int = 0) -> search.RunPlan:  # a constant
    return search.plan_run(find("digits"), SPACE, {"accuracy": 0.93}, ethernet(gbit_per_s=1), limits, seed=seed)


@pytest.fixture(scope="module")
def plan() -> search.RunPlan:
    return planned()


def test_it_chooses_and_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, err = asked(capsys, "digits", *TARGET, *SMALL, "--price", "2", "--page", str(tmp_path / "plan.html"), "--ui")
    assert err.startswith("live page: http://127.0.0.1:")
    lines = out.splitlines()
    assert lines[0].startswith("local_sgd on 4 workers")
    assert lines[1].startswith("Runner-up: sync_sgd on ")
    assert "The front: no other run is both faster and cheaper." in lines
    assert "Not considered:" in lines
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<title>Plan for digits</title>" in page
    assert "polytempo train digits --workers 4" in page


def test_its_commands_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = asked(capsys, "digits", *TARGET, *SMALL, "--quote")
    assert out.startswith("polytempo train digits --workers 4 --strategy 'local_sgd(period=8, route=native)'")
    for line in out.splitlines():
        with pytest.raises(SystemExit) as end:
            app([*shlex.split(line)[1:], "--dry-run"])
        assert end.value.code == 0, line
        capsys.readouterr()


def test_its_page_keeps_no_login_and_no_signature(
    plan: search.RunPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("polytempo.cli.predict.plan_run.planned", lambda *_, **__: plan)
    data = ("--data", "https://me:key@host/t.csv?signed=1")
    out, _ = asked(capsys, "digits", *TARGET, *SMALL, *data, "--page", str(tmp_path / "plan.html"), "--quote")
    assert all(shlex.split(line)[3:5] == [*data] for line in out.splitlines())
    files = [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()]
    assert sum("--data https://host/t.csv" in text for text in files) == 2
    assert not any("key" in text.split() or "me:key" in text or "signed=1" in text for text in files)


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = asked(capsys, "digits", *TARGET, *SMALL, "--json", "--deadline-s", "1000")
    found = json.loads(out)
    assert found["winner"]["workers"] == 1, "with a deadline alone the cheapest run is chosen"
    assert found["runs"] == 6
    assert {each["strategy"] for each in found["forecasts"]} >= {"sync_sgd(route=native)"}
    assert found["winner"]["low_s"] <= found["winner"]["seconds"] <= found["winner"]["high_s"]
    assert all(trial["workers"] <= 4 for trial in found["trials"])


def test_limits_that_no_run_keeps_are_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = asked(capsys, "digits", *TARGET, *SMALL, "--memory-gb", "1e-6", code=1)
    assert out.startswith("No run keeps to the limits: the fastest takes ")
    assert "of memory a worker." in out
    assert "The front" not in out, "nothing is within the limit"
    out, err = asked(capsys, "digits", *TARGET, *SMALL, "--price", "1", "--budget", "1e-12", "--quote", code=1)
    assert out == "", "a command that breaks the limits is none to run"
    assert err.startswith("No run keeps to the limits: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "a plan needs a target: give --until"),
        (("--until", "accuracy=97"), "97 % is accuracy=0.97"),
        (("--until", "speed=3"), "until speed=…: scores of job digits have accuracy, loss"),
        (("--workers", "2;4"), "--workers 2;4: must be whole numbers"),
        (("--workers", "0"), "--workers 0: must be "),
        (("--batch-sizes", "0,8"), "--batch-sizes 0,8: must be from 1"),
        (("--budget", "5"), "--budget 5: it needs the price of a host for an hour"),
        (("--deadline-s", "-1"), "--deadline-s -1: must be a "),
        (("--strategies", "best_sgd"), "best_sgd"),
        (("--strategies", "sync_sgd", "--periods", "4"), "it says all strategies; leave out --periods"),
        (("--codecs", "zip"), "codec 'zip' is not tried by plans"),
        (("--cluster", "none.toml"), "--cluster none.toml: there is no such file"),
        (("--cluster", "moon()"), "moon"),
        (("--page", "no/such/plan.html"), "name a file in a folder that exists"),
    ],
)
def test_what_cannot_be_planned(
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    target = () if not arguments or "--until" in arguments else ("--until", "accuracy=0.97")
    _, err = asked(capsys, "digits", *target, *arguments, code=2)
    assert said in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_an_unknown_job_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = asked(capsys, "digit", "--until", "accuracy=0.97", code=2)
    assert "there is no job 'digit'" in err


def test_a_job_without_a_test_set_has_no_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = "\n".join(
        (
            "from dataclasses import replace",
            "import polytempo as pt",
            'digits = pt.jobs.find("digits")',
            "job = replace(digits, data=lambda path: pt.Data(digits.data(path).train, None))",
        )
    )
    (tmp_path / "blind.py").write_text(source, encoding="utf-8")
    _, err = asked(capsys, f"{tmp_path}/blind.py:job", "--until", "accuracy=0.97", *SMALL, code=2)
    assert "has no test set, so no run can be seen to reach a target" in err


def test_the_same_seed_gives_the_same_plan(plan: search.RunPlan) -> None:
    again = planned()
    assert again._replace(took_s=0.0) == plan._replace(took_s=0.0)


def test_limits_change_the_choice_and_not_the_search(plan: search.RunPlan) -> None:
    assert plan.winner is not None
    cheap = planned(PlanLimits(budget=plan.winner.host_s / 3600 * 0.7))
    assert cheap.trials == plan.trials
    assert cheap.winner is not None
    assert cheap.winner.seconds >= plan.winner.seconds
    assert cheap.winner.host_s <= plan.winner.host_s * 0.7


def test_every_run_is_told_of(plan: search.RunPlan) -> None:
    """Compared, given up at its batch, or left out with the reason."""
    assert plan.num_runs == len(SPACE.runs()[0])
    forecast = {each.run for each in plan.forecasts}
    for run in SPACE.runs()[0]:
        assert run in forecast or any(each.what.startswith(run.family) for each in plan.given_up), run


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run, count = search.Trials.run, 0

    def stopped(self: search.Trials, *given: object) -> object:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return run(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(search.Trials, "run", stopped)
    out, err = asked(capsys, "digits", *TARGET, *SMALL, code=130)
    assert "workers x" in out.splitlines()[0]
    assert "The search was interrupted" in out.splitlines()[1]
    assert "On ethernet(" in out
    assert err == "interrupted: this is the plan so far\n"


def test_ctrl_c_before_anything_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(self: search.Trials, *given: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(search.Trials, "run", stopped)
    out, err = asked(capsys, "digits", *TARGET, *SMALL, code=130)
    assert (out, err) == ("", "interrupted\n")


def test_the_limit_of_workers_is_said_with_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    """Four workers cost more than they bring on links with a latency of a tenth of a second."""
    target = ("--until", "accuracy=0.9", "--cluster", "ethernet(latency_us=100000)")
    space = ("--workers", "1,4", "--batch-sizes", "32", "--strategies", "sync_sgd")
    found = json.loads(asked(capsys, "digits", *target, *space, "--limit", "--json")[0])
    assert (found["limit"]["workers"], found["limit"]["reason"]) == (1, "communication")
    assert found["sentences"][-1].startswith("The limit is 1 worker: 4 are 0.")
    out, _ = asked(capsys, "digits", *target, *space, "--limit")
    lines = out.splitlines()
    header = ["workers", "faster", "dearer", "samples", "computing", "communication", "cores", "stragglers"]
    assert next(lines[i + 1] for i, line in enumerate(lines) if line.split() == header).startswith("1 to 4 ")
    assert "leave one out" in asked(capsys, "digits", *target, "--limit", "--quote", code=2)[1]
