"""`TrackerCall`: a tracker of a run as a value, and as text: `wandb:project=digits`, `mlflow:http://host:5000`.

Text is `NAME`, `NAME:ARGUMENTS` or a call such as `wandb(project='digits')`. ARGUMENTS are `key=value,key=value`, or
one value: the tracker's first argument. `polytempo.trackers` performs these values; no tracker's library is loaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from polytempo.spec.text.call import Call, parse_call
from polytempo.spec.text.resolution import resolve, signature_of, unknown

CALLS_OF_A_TRACKER = ("start", "log", "event", "finish")


@dataclass(frozen=True)
class TrackerCall:
    """A tracker's name and its arguments; arguments at their defaults are left out."""

    name: str
    arguments: Mapping[str, str | int] = field(default_factory=dict)

    def __str__(self) -> str:
        """The text that `--track` takes."""
        if not self.arguments:
            return self.name
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


def tensorboard(logdir: str | None = None) -> TrackerCall:
    """TensorBoard: scalars, hyper-parameters, pictures and texts in event files.

    `logdir`: a folder that gets one folder for each run. Default: `tensorboard` in the run's folder.
    """
    return _call(tensorboard, locals())


def wandb(
    project: str = "polytempo",
    entity: str | None = None,
    mode: str | None = None,
    name: str | None = None,
    group: str | None = None,
    dir: str | None = None,  # noqa: A002 - the word of W&B
) -> TrackerCall:
    """Weights & Biases. `mode`: "online", "offline" or "disabled"; arguments are named as in `wandb.init`.

    Default of `name`: the name of the run's folder; of `dir`: the run's folder; of `mode`: WANDB_MODE, or W&B's own.
    """
    return _call(wandb, locals())


def mlflow(uri: str | None = None, experiment: str = "polytempo") -> TrackerCall:
    """MLflow: parameters, metrics, and the report and the last checkpoint as artifacts.

    `uri`: a server (http://…) or a store (file:///…, sqlite:///…). Default: MLFLOW_TRACKING_URI, or MLflow's own.
    """
    return _call(mlflow, locals())


def trackio(project: str = "polytempo", space: str | None = None) -> TrackerCall:
    """Trackio: a local dashboard with the calls of W&B. `space`: a Space of Hugging Face that shows it."""
    return _call(trackio, locals())


def comet(
    project: str = "polytempo",
    workspace: str | None = None,
    mode: str = "online",
    dir: str | None = None,  # noqa: A002 - as in `wandb`
) -> TrackerCall:
    """Comet. `mode`: "online" (COMET_API_KEY), or "offline": a file in `dir` that `comet upload` takes.

    Default of `dir`: `comet` in the run's folder.
    """
    return _call(comet, locals())


def prometheus(port: int = 9464) -> TrackerCall:
    """Prometheus: a page to scrape while the run goes on, http://127.0.0.1:9464/metrics.

    The page has no password, so it is on loopback only, and no argument makes it wider.
    """
    return _call(prometheus, locals())


def opentelemetry(endpoint: str | None = None) -> TrackerCall:
    """OpenTelemetry: spans of the run and of the time between its rows, by OTLP over HTTP.

    `endpoint`: such as http://localhost:4318/v1/traces. Default: OTEL_EXPORTER_OTLP_ENDPOINT, or that one.
    """
    return _call(opentelemetry, locals())


def kubeflow() -> TrackerCall:
    """Kubeflow: progress, remaining time and metrics in the status of the TrainJob that this pod is of.

    The pod's environment has KUBEFLOW_TRAINER_SERVER_URL, …_CA_CERT and …_TOKEN (KEP-2779).
    """
    return _call(kubeflow, locals())


TRACKERS: dict[str, Callable[..., TrackerCall]] = {
    made.__name__: cast("Callable[..., TrackerCall]", made)
    for made in (tensorboard, wandb, mlflow, trackio, comet, prometheus, opentelemetry, kubeflow)
}


def parse_tracker(text: str) -> TrackerCall:
    """The tracker that `text` means. ValueError for an unknown name or argument, with the known ones."""
    name, colon, rest = text.strip().partition(":")
    if not colon or not re.fullmatch(r"\w+", name):
        call = parse_call(text)
    elif name not in TRACKERS:
        raise ValueError(unknown("tracker", name, TRACKERS))
    else:
        call = Call(name, (), _typed(name, rest))
    found = resolve(call, TRACKERS, {}, what="tracker")
    assert isinstance(found, TrackerCall)
    return found


def trackers_of(given: object) -> tuple[Any, ...]:
    """The value of an option `trackers`: text, `pt.trackers.…()`, an object with four calls, or several."""
    several = given if isinstance(given, list | tuple) else () if given is None else (given,)
    found = tuple(parse_tracker(each) if isinstance(each, str) else each for each in several)
    for each in found:
        missing = [call for call in CALLS_OF_A_TRACKER if not callable(getattr(each, call, None))]
        if not isinstance(each, TrackerCall) and (missing or isinstance(each, type)):
            raise ValueError(
                f"{each!r} is not a tracker; give one of {', '.join(TRACKERS)} as text, such as 'tensorboard', or an "
                f"object with the calls {', '.join(CALLS_OF_A_TRACKER)}"
            )
    return found


def trackers_like(incomplete: str) -> list[str]:
    """The names of trackers that begin with the text, for completion in a shell."""
    return [name for name in sorted(TRACKERS) if name.startswith(incomplete)]


def _call(made: Callable[..., object], given: Mapping[str, Any]) -> TrackerCall:
    parameters = inspect.signature(made).parameters
    return TrackerCall(made.__name__, {n: given[n] for n, p in parameters.items() if given[n] != p.default})


def _typed(name: str, rest: str) -> dict[str, object]:
    """Arguments behind the colon; numbers where the tracker takes a number."""
    kinds = inspect.get_annotations(TRACKERS[name], eval_str=True)
    kinds.pop("return")
    if not rest or not kinds:
        raise ValueError(f"{name}:{rest}: it is written {name}, or {signature_of(TRACKERS[name])}")
    if re.match(r"\w+=", rest) is None:
        first = next(iter(kinds))
        return {first: _number_or_text(kinds[first], rest)}
    parts = [part.partition("=") for part in rest.split(",")]
    return {key.strip(): _number_or_text(kinds.get(key.strip()), value) for key, _, value in parts}


def _number_or_text(kind: object, text: str) -> object:
    return int(text) if kind is int and re.fullmatch(r"\d{1,9}", text) else text
