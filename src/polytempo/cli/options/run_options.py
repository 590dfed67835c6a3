"""The options of a run: from the command line, and from a TOML or YAML file with the same names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from polytempo.cli.options import bounded_yaml
from polytempo.spec.batch_growth import NormTest, parse_growth
from polytempo.spec.precision import parse_precision
from polytempo.spec.target import check_until, parse_until

MAX_FILE_BYTES = 100_000


def _until(value: object) -> object:
    goals = parse_until(value) if isinstance(value, str) else value
    if isinstance(goals, dict):
        check_until(goals)
    return goals


def _growth(value: object) -> object:
    return parse_growth(value) if isinstance(value, str) else value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _one_or_several(value: object) -> object:
    return ", ".join(value) if isinstance(value, list) and all(isinstance(each, str) for each in value) else value


def _named(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError("the value is empty; write a name, or leave the option out")
    return value


def _place(value: object) -> object:
    """A folder as a Path, a URL as text. A URL on the command line comes as a Path, which has dropped a slash."""
    if isinstance(value, Path):
        return url_of(value) or value
    return Path(value) if isinstance(value, str) and "://" not in value else value


def url_of(path: Path) -> str | None:
    """The URL that `path` was before it became a Path; None where it was none."""
    scheme = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+):", path.parts[0]) if path.parts else None
    if scheme is None:
        return None
    rest = "/".join(path.parts[1:])
    return f"file:///{rest}" if scheme[1] == "file" else f"{scheme[1]}://{rest}"


def _checked_precision(text: str | None) -> str | None:
    return text if text is None else str(parse_precision(text))


Named = Annotated[str, BeforeValidator(_named)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1, le=1_000_000_000)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]


class TrainOptions(BaseModel):
    """Everything that the command line can be told, by the options' names with `_` for `-`. None: not given.

    One file may serve `train`, `compare` and `simulate`: each takes what it needs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str | None = None
    strategy: Named = "sync_sgd"
    strategies: Annotated[Named | None, BeforeValidator(_one_or_several)] = None
    workers: Annotated[int, BeforeValidator(_number), Field(ge=1, le=1_000_000)] = 2
    engine: Named = "local"
    cluster: Named | None = None
    stragglers: Named | None = None
    meta: bool = False
    batched: bool = False
    data: Path | None = None
    epochs: Positive | None = None
    until: Annotated[dict[str, Finite], BeforeValidator(_until)] = Field(default_factory=dict)
    steps: Count | None = None
    batch_size: Count | None = None
    global_batch_size: Count | None = None
    lr: Positive | None = None
    seed: Annotated[int, BeforeValidator(_number), Field(ge=0, lt=2**63)] = 0
    threads: Annotated[int, BeforeValidator(_number), Field(ge=1, le=4096)] | None = None
    inter_threads: Annotated[int, BeforeValidator(_number), Field(ge=1, le=4096)] = 1
    allow_nan: bool = False
    checkpoint_every: Count | None = None
    ema: Annotated[float, BeforeValidator(_number), Field(gt=0, lt=1)] | None = None
    precision: Annotated[Named | None, AfterValidator(_checked_precision)] = None
    on_drift: Literal["stop", "restore", "ignore"] = "stop"
    noise_scale: Count | None = None
    batch_growth: Annotated[dict[int, Positive] | NormTest, BeforeValidator(_growth)] = Field(default_factory=dict)
    timeout_s: Positive = 300.0
    transport: Literal["shared", "tcp"] = "shared"
    grace_s: Positive = 30.0
    restarts: Annotated[int, BeforeValidator(_number), Field(ge=0, le=100_000)] = 20
    min_workers: Count | None = None
    max_workers: Count | None = None
    scaling: Literal["global", "local"] = "global"
    available: Path | None = None
    out: Annotated[Path | str | None, BeforeValidator(_place)] = None
    force: bool = False
    resume: bool = False
    as_json: bool = Field(default=False, alias="json")
    dry_run: bool = False


_KEYS = sorted(field.alias or name for name, field in TrainOptions.model_fields.items())


def load_file(path: Path) -> dict[str, object]:
    """The options in a `.toml`, `.yaml` or `.yml` file, checked. `ValueError` names file, key, value and remedy."""
    given = {str(key).replace("-", "_"): value for key, value in _read(path).items()}
    _validated(given, {key: f"{path}: {key} = {_shown(value)}" for key, value in given.items()})
    return given


def train_options(command_line: Mapping[str, object], config: Path | None = None) -> TrainOptions:
    """The options in force: those of the command line that are not None over those of the file `config`."""
    from_file = load_file(config) if config else {}
    given = {key: value for key, value in command_line.items() if value is not None}
    where = {key: f"{config}: {key} = {_shown(value)}" for key, value in from_file.items()}
    where |= {key: f"--{key.replace('_', '-')} {str(value).strip() or repr(value)}" for key, value in given.items()}
    options = _validated(from_file | given, where)
    if options.data is not None and not options.data.exists():
        raise ValueError(f"{where['data']}: there is no such file or folder")
    return options


def _read(path: Path) -> dict[Any, Any]:
    """The table that the file holds."""
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ValueError(f"{path}: options are read from .toml, .yaml and .yml files; rename it, or write one of these")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: a file of options has at most {MAX_FILE_BYTES:,} bytes")
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text) if path.suffix == ".toml" else bounded_yaml.load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path}: this is not {path.suffix[1:].upper()}: {reason}") from None
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ValueError(f"{path}: expected lines like 'workers: 4', not {_shown(table)}")
    return table


def _validated(given: Mapping[str, object], where: Mapping[str, str]) -> TrainOptions:
    try:
        return TrainOptions.model_validate(given)
    except ValidationError as error:
        _explain(error, where)


def _explain(error: ValidationError, where: Mapping[str, str]) -> NoReturn:
    """The first complaint, in the words of where the value was written."""
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        close = get_close_matches(key, _KEYS, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"{where[key]}: there is no option {key!r}{meant}; there are: {', '.join(_KEYS)}") from None
    complaint = first["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    raise ValueError(f"{where[key]}: {complaint}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
