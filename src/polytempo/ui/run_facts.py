"""Facts of a run for its page: settings, environment, hashes, and the command that repeats it."""

from __future__ import annotations

import re
import shlex
from typing import Any

from polytempo.core.system.url_path import Place
from polytempo.diagnosis.bound import MEMORY, NETWORK, StepParts, bound
from polytempo.report.pages.diagnoses import diagnoses
from polytempo.report.runs import load_result
from polytempo.report.status.records import RunStarted
from polytempo.report.status.stream import ends_of
from polytempo.ui.of_run.run_columns import RunColumns

_SETTINGS = ("job", "strategy", "world", "workers", "steps", "epochs", "batch_size", "seed", "threads")
_CALL = re.compile(r"\w+(\(.*\))?")
_FLAGS = {"callbacks": "callback", "tags": "tag"}
"""Options with another name on the command line."""
_ALWAYS = ("job", "strategy", "world", "workers", "threads")
"""Settings that are not options, and the threads, which the machine decides."""
_BATCH = 32
"""The samples of a worker's batch where a run has not recorded them."""
_HASHES = ("parameters_sha256", "trace_hash")
_OUTCOME = (
    *("samples", "seconds", "samples_per_s", "loss", "accuracy", "train_loss", "bytes_sent_per_rank"),
    *("communication_share", "reached", "resumed_at", "diverged", "left", "started_from"),
)


def facts(folder: Place, row: dict[str, Any]) -> dict[str, Any]:
    """The facts of the run in `folder`; `row` is its row in the list of runs. A run that goes on has fewer."""
    result: dict[str, Any] = {}
    if row.get("ended"):
        try:
            result = load_result(folder)
        except (ValueError, OSError):
            result = {}
    start, _ = ends_of(folder)
    told = {} if start is None else dict(start.settings)
    known = {name: _first(result.get(name), row.get(name)) for name in (_ALWAYS if told else _SETTINGS)}
    settings: dict[str, Any] = known | told
    server = result.get("server") if isinstance(result.get("server"), dict) else None
    return {
        "settings": {name: value for name, value in settings.items() if value not in (None, "")},
        "outcome": {name: result[name] for name in _OUTCOME if result.get(name) is not None},
        "said": diagnoses(result),
        "environment": {} if start is None else start.environment,
        "hashes": {name: result[name] for name in _HASHES if result.get(name) is not None},
        "server": None
        if server is None
        else {key: server.get(key) for key in ("rule", "shards", "updates", "dropped")},
        "ledger": result.get("ledger"),
        "stages": result.get("stages"),
        "folder": str(folder),
        "command": repeating(start) if told and start is not None else command(settings, result),
    }


def repeating(start: RunStarted) -> str:
    """The command that repeats a run, from the settings in its start; "" where no command does.

    None does for a job that is in no file, a cluster that was made in a program, and `reshape`.
    """
    cluster, _, stragglers = start.settings.get("cluster", "").partition(", stragglers ")
    made = cluster and not _CALL.fullmatch(cluster)
    cut = any(value.endswith("…") for value in start.settings.values())
    if start.origin is None or made or cut or "reshape" in start.settings:
        return ""
    words = ["polytempo", "simulate" if start.world == "virtual" else "train", start.origin]
    words += ["--strategy", start.strategy, "--workers", str(start.workers)]
    for name, value in {**start.settings, "cluster": cluster, "stragglers": stragglers}.items():
        if value:
            flag = f"--{_FLAGS.get(name, name).replace('_', '-')}"
            words += [flag] if value == "true" else [flag, value]
    return shlex.join(words)


def command(settings: dict[str, Any], result: dict[str, Any]) -> str:
    """The command of a run that has left no settings, from its result: it lacks, for example, `--lr`."""
    if not settings.get("job") or not settings.get("strategy"):
        return ""
    verb = "simulate" if settings.get("world") == "virtual" else "train"
    words = ["polytempo", verb, str(settings["job"]), "--strategy", str(settings["strategy"])]
    options = [("workers", settings.get("workers"))]
    if result.get("epochs"):
        options.append(("epochs", f"{result['epochs']:g}"))
    elif settings.get("epochs"):
        options.append(("epochs", f"{settings['epochs']:g}"))
    else:
        options.append(("steps", settings.get("steps")))
    options += [("batch-size", settings.get("batch_size")), ("seed", settings.get("seed"))]
    for name, value in options:
        if value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def standing(columns: RunColumns, row: dict[str, Any]) -> list[str]:
    """A sentence for each slow rank of a run so far, and one for its bound, by its rows so far."""
    said = {} if columns.started is None else columns.started.settings
    workers = int(row.get("workers") or 1)
    batch = _whole(said.get("batch_size")) or _whole(said.get("global_batch_size")) // workers or _BATCH
    rates = [each for each in columns.workers.values() if each.get("samples_per_s") and "idle_share" in each]
    parts = columns.parts
    if rates:
        step_s = sum(batch / each["samples_per_s"] for each in rates) / len(rates)
        wait_s = step_s * sum(each["idle_share"] for each in rates) / len(rates)
        parts = {"compute_s": max(0.0, step_s - wait_s), "wait_s": wait_s}
    slow = {"diagnoses": [{"who": who, "text": text} for who, text in columns.slow.items()]}
    if "compute_s" not in parts:
        return diagnoses(slow)
    facts = StepParts(
        strategy=str(row.get("strategy")),
        workers=workers,
        compute_s=parts["compute_s"],
        link=NETWORK if (row.get("hosts") or 1) > 1 or row.get("world") == "virtual" else MEMORY,
        batch_size=batch,
        noise_scale=columns.last.get("train", {}).get("noise_scale"),
        serves=bool(rates),
        slow=next(reversed(columns.slow), "").replace("-", " "),
        virtual=row.get("world") == "virtual",
    )
    found = bound(facts._replace(**parts))
    if found is not None and rates and found.kind not in ("computing", "batch"):  # the rows have no bytes
        found = found._replace(text=f"Waiting for the server bounds this run: {100 * found.share:.0f} % of the time.")
    return diagnoses(slow | {"bound": None if found is None else found.as_json()})


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def differences(runs: list[dict[str, Any]]) -> list[list[Any]]:
    """The settings and environments of several runs as rows: a name, True where they differ, and each run's value."""
    found = []
    for part in ("settings", "environment"):
        names = dict.fromkeys(name for run in runs for name in run.get(part, {}))
        for name in sorted(names, key=lambda name: _SETTINGS.index(name) if name in _SETTINGS else len(_SETTINGS)):
            values = [run.get(part, {}).get(name) for run in runs]
            found.append([name, len({str(value) for value in values}) > 1, *values])
    return found


def _first(*values: Any) -> Any:
    return next((value for value in values if value not in (None, "")), None)
