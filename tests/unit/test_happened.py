"""Events of a run's processes are reported immediately, counted, and kept up to a bound."""

from __future__ import annotations

from polytempo.runs.frame.live_run import RunEvents


def test_each_event_is_told_at_once_and_kept() -> None:
    said = list[str]()
    happened = RunEvents(said.append)
    happened.add("worker-1", "was killed by SIGKILL", 2.31449, "started again")
    assert said == ["2.3 s: worker-1 was killed by SIGKILL; started again"]
    event = {"who": "worker-1", "how": "was killed by SIGKILL", "at_s": 2.314, "then": "started again"}
    assert happened.facts == {"events": [event], "restarts": 0}


def test_a_result_holds_only_the_first_two_hundred() -> None:
    said = list[str]()
    happened = RunEvents(said.append)
    for number in range(201):
        happened.add(f"worker-{number}", "was killed by SIGKILL", 0.0, "started again")
    assert (len(said), len(happened.events), happened.events[-1]["who"]) == (201, 200, "worker-199")
