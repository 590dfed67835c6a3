"""`polytempo schedule`: its output, and its refusals."""

from __future__ import annotations

import json

import pytest

from command_output import asking

SMALL = ("--data", "correlated(rows=50, columns=20, block=4, nonzeros=3)", "--cluster", "ethernet")


asked = asking("schedule")


def test_a_table_of_sweeps(capsys: pytest.CaptureFixture[str]) -> None:
    out, told = asked(capsys, "lasso(l1=0.1)", *SMALL, "--workers", "3", "--sweeps", "50", "--tolerance", "0")
    assert "not converged: after 50 sweeps" in told
    assert "--sweeps 100" in told
    lines = out.splitlines()
    assert lines[0].startswith(
        "lasso(l1=0.1, at_once=32, bound=0.1, order='priority', cut='rows', seed=0, candidates=None), 3 workers, eth"
    )
    assert lines[1].split() == ["sweep", "rounds", "updates", "seconds", "objective", "error"]
    assert [int(line.split()[0]) for line in lines[2:-1]] == [*range(0, 49, 3), 50]
    assert lines[-1].startswith("each worker sent ")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = asked(capsys, "lda(topics=2)", "--cluster", "one_host", "--sweeps", "2", "--json", "--data",
                   "drawn_documents(documents=4, words=6, length=5, topics=2)")  # fmt: skip
    found = json.loads(out)
    assert (found["workers"], len(found["sweeps"])) == (2, 3)
    assert found["sweeps"][2]["rounds"] == 4
    assert found["converged"] is None
    assert found["sweeps"][2]["error"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lassso"], "there is no program 'lassso' (did you mean lasso?)"),
        (["lasso(l2=1)"], "lasso has no argument 'l2'"),
        (["lasso", "--data", "scenes('x')"], "there is no data of lasso 'scenes'; there are: correlated, table"),
        (["lasso", "--data", "table('missing.csv', target=y)"], "there is no file missing.csv"),
        (["lasso", "--workers", "0"], "--workers 0: must be a "),
        (["lasso", "--sweeps", "0"], "--sweeps 0: must be a "),
        (["lasso", "--tolerance", "-1"], "--tolerance -1: must be a "),
        (["lasso", "--stragglers", "lognormal"], "--stragglers lognormal: only simulated workers straggle"),
        (["lasso", "--seed", "1"], "--seed 1 draws the stragglers of simulated workers"),
        (["lasso", "--cluster", "ethernett"], "there is no cluster 'ethernett'"),
        (["lasso(order=best)", *SMALL], "order must be one of priority, last_change, round_robin, random, got 'best'"),
        (["lasso(cut=halves)", *SMALL], "cut must be one of rows, columns, got 'halves'"),
        (["lasso(l1=-1.0)", *SMALL], "l1=-1: the penalty must be finite and not negative"),
        (["lda(topics=0)"], "lda needs a topic"),
        (
            ["lda", "--workers", "7", "--cluster", "ethernet", "--data", "drawn_documents(words=6)"],
            "6 words cannot be 7",
        ),
        (["factorization(l2=0.0)"], "factorization needs rank >= 1 and a finite l2 above 0"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = asked(capsys, *arguments, code=2)
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
