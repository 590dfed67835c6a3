"""The orders of a process that starts during a run with a parameter server: they travel as JSON."""

from __future__ import annotations

import json
import time

import pytest

from polytempo.runs.served import served_node
from polytempo.runs.served.served_node import Setting
from polytempo.server.layout import Span
from polytempo.server.message import View

VIEW = View(7, ((2, 3), (), (4,)), ((0, 1), (1, 5)), False, 3, ((Span(0, 4),), (), (Span(4, 2), Span(8, 1))))


@pytest.mark.parametrize(("record", "snapshot"), [(None, None), ("/runs/a/record/0001", 12)])
def test_it_comes_back_from_json(record: str | None, snapshot: int | None) -> None:
    setting = Setting(VIEW, zero_s=123.25, record=record, snapshot=snapshot)
    again = Setting.from_plain(json.loads(json.dumps(setting.to_plain())))
    assert (again.record, again.snapshot) == (record, snapshot)
    assert again.zero_s == 123.25  # the same machine's clock
    for field in VIEW.__struct_fields__:
        assert getattr(again.view, field) == getattr(VIEW, field)


def test_another_machine_counts_from_the_run_s_age_whatever_its_clocks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    plain = json.loads(json.dumps(Setting(VIEW, zero_s=960.0).to_plain()))
    monkeypatch.setattr(served_node, "machine_identity", lambda: "another")
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    monkeypatch.setattr(time, "time", lambda: 3600.0)
    assert Setting.from_plain(plain).zero_s == 7.0 - 40.0
