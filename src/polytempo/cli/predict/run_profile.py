"""`polytempo profile RUN`: the recorded steps of a run, rank by rank, and the trace for Perfetto."""

from __future__ import annotations

from polytempo.cli.options.show import show_json, show_table
from polytempo.cli.predict.prediction_options import ProfileOptions
from polytempo.core.system.url_path import place
from polytempo.report.status.profile_trace import (
    RankProfile,
    exchange_seconds,
    read_profiles,
    totals,
    write_merged,
)

_SHOWN = 15
_MOST_COLUMNS = 8


def run_profile(asked: ProfileOptions) -> None:
    """Print the tables, and write the merged trace."""
    run = place(asked.job)
    profiles = read_profiles(run)
    if asked.json:
        show_json({"ranks": [_plain(each) for each in profiles]})
        return
    show_table(("rank", "host", "steps", "ms a step", "in torch", "exchanges", "waits"), [_row(p) for p in profiles])
    print()
    shown = profiles[:_MOST_COLUMNS]
    by_rank = [{total.name: total for total in totals(each.slices)} for each in shown]
    names = {
        name: sum(found[name].seconds for found in by_rank if name in found) for found in by_rank for name in found
    }
    top = sorted(names, key=lambda name: -names[name])[:_SHOWN]
    columns = ("operation", "calls a step", *(f"rank {each.rank}: ms a step" for each in shown))
    rows = []
    for name in top:
        calls = next(found[name].calls for found in by_rank if name in found)
        times = [
            f"{1e3 * found[name].seconds / _steps(each):.3f}" if name in found else "-"
            for found, each in zip(by_rank, shown, strict=True)
        ]
        rows.append((name, f"{calls / _steps(shown[0]):g}", *times))
    show_table(columns, rows)
    print(f"\ntrace: {write_merged(run, str(run))} (open it at ui.perfetto.dev)")


def _steps(profile: RankProfile) -> int:
    return max(1, profile.last - profile.first)


def _row(profile: RankProfile) -> tuple[str, ...]:
    span_s = max(1e-9, profile.end_s - profile.begin_s)
    exchanged_s, waited_s = exchange_seconds(profile)
    torch_s = sum(total.seconds for total in totals(profile.slices))
    parts = (f"{100 * part / span_s:.0f} %" for part in (torch_s, exchanged_s, waited_s))
    steps = f"{profile.first} to {profile.last - 1}"
    return (str(profile.rank), profile.host, steps, f"{1e3 * span_s / _steps(profile):.3f}", *parts)


def _plain(profile: RankProfile) -> dict[str, object]:
    exchanged_s, waited_s = exchange_seconds(profile)
    return {
        "rank": profile.rank,
        "host": profile.host,
        "first": profile.first,
        "last": profile.last,
        "seconds": profile.end_s - profile.begin_s,
        "exchange_seconds": exchanged_s,
        "wait_seconds": waited_s,
        "operations": [total._asdict() for total in totals(profile.slices)],
    }
