"""`polytempo report`: one page about runs that have ended."""

from __future__ import annotations

from collections.abc import Sequence

from polytempo.cli.look.look_options import ReportOptions
from polytempo.cli.options.show import show_results
from polytempo.core.system.url_path import place
from polytempo.report.pages.page import write_report
from polytempo.report.runs import RunRecord, load_run, short_labels


def report(asked: ReportOptions) -> None:
    """Write the page, and show the results."""
    folders = [place(run) for run in asked.runs]
    names = _names([str(folder).rstrip("/").split("/") for folder in folders])
    runs = [load_run(folder)._replace(name=name) for folder, name in zip(folders, names, strict=True)]
    out = place(asked.out)
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file, such as {out / 'report.html'}")
    write_report(out, runs, title=_title(runs))
    show_results([run.result | {"strategy": label} for run, label in zip(runs, short_labels(runs), strict=True)])
    print(f"report: {out}")


def _names(paths: Sequence[Sequence[str]]) -> list[str]:
    """The ends of the folders' paths that tell them apart: a/first, b/first."""
    longest = max(map(len, paths))
    found = (["/".join(path[-length:]) for path in paths] for length in range(1, longest + 1))
    return next((names for names in found if len(set(names)) == len(names)), ["/".join(path) for path in paths])


def _title(runs: Sequence[RunRecord]) -> str:
    jobs = list(dict.fromkeys(str(run.result.get("job")) for run in runs))
    return f"{', '.join(jobs)}: {runs[0].result['strategy'] if len(runs) == 1 else f'{len(runs)} runs'}"
