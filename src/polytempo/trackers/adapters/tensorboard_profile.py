"""Profiles of ranks as TensorBoard's plugin for PyTorch profiles finds them: a file a rank below the log directory.

    run/profile/rank-0.json ─▶ logdir/plugins/profile/NAME/n1_0.pt.trace.json        torch-tb-profiler

The plugin takes each folder with files `*.pt.trace.json` for a run, and the part before the suffix for its worker,
`HOST_NUMBER`. Its own reader needs these categories; it is not imported here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polytempo.core.system import files
from polytempo.report.status.profile_trace import RankProfile, merged, profiled_ranks, read_profile

_SUFFIX = ".pt.trace.json"
_STEPS_TRACK = 999
"""Operations of the run have smaller numbers, threads of torch greater ones."""
_CATEGORIES = {"torch": "cpu_op", "communication": "user_annotation", "compute": "user_annotation"}


class ProfileFiles:
    """Writes the profiles in the folder `run` for the log directory `logdir`.

    `since_s`: the run's begin in seconds since 1970; older profiles are of another run that was in its folder.
    """

    def __init__(self, run: Path, logdir: Path, name: str, since_s: float) -> None:
        self._run, self._folder, self._name, self._since_s = run, logdir / "plugins" / "profile" / name, name, since_s
        self._seen: dict[str, float] = {}

    def clear(self) -> None:
        """Remove the profiles of another run that was in this folder."""
        for old in self._folder.glob(f"*{_SUFFIX}"):
            old.unlink()

    def look(self) -> None:
        """Write the profiles that have come since the last call. Cost without a profile: a look for a folder."""
        for path in (Path(str(each)) for each in profiled_ranks(self._run)):
            changed_s = path.stat().st_mtime
            if changed_s >= self._since_s and self._seen.get(path.name) != changed_s:
                self._seen[path.name] = changed_s
                self._write(read_profile(path))

    def _write(self, profile: RankProfile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{profile.host}_{profile.rank}{_SUFFIX}"
        files.replace(path, json.dumps(plugin_trace(profile, self._name)))


def plugin_trace(profile: RankProfile, title: str) -> dict[str, Any]:
    """The profile of one rank in Chrome's trace format, with the plugin's categories and a slice for each step."""
    trace = merged([profile], title)
    entries = [e | {"cat": _CATEGORIES[e["cat"]]} if e["ph"] == "X" else e for e in trace["traceEvents"]]
    return {"schemaVersion": 1, **trace, "traceEvents": [*entries, *_steps(profile)]}


def _steps(profile: RankProfile) -> list[dict[str, Any]]:
    """A slice for each step, from the last exchange of the step before to its own last one; equal parts without any."""
    ends_s: dict[int, float] = {}
    for _, step, _, _, _, end_s, _ in profile.events:
        ends_s[step] = max(end_s, ends_s.get(step, 0.0))
    span_s, count = profile.end_s - profile.begin_s, profile.last - profile.first
    track = {"pid": profile.rank, "tid": _STEPS_TRACK}
    begin_s, found = profile.begin_s, [{"name": "thread_name", "ph": "M", **track, "args": {"name": "steps"}}]
    for number, step in enumerate(range(profile.first, profile.last), 1):
        even_s = profile.begin_s + span_s * number / count
        end_s = profile.end_s if number == count else max(begin_s, min(profile.end_s, ends_s.get(step, even_s)))
        times = {"ts": (begin_s - profile.begin_s) * 1e6, "dur": (end_s - begin_s) * 1e6}
        named = {"name": f"ProfilerStep#{step}", "cat": "user_annotation", "ph": "X"}
        found.append({**named, **track, **times})
        begin_s = end_s
    return found
