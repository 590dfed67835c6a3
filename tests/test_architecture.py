"""The architecture, read from the source: one arrow of imports, small files, and nothing that is forbidden."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "polytempo"
FILES = sorted(SOURCE.rglob("*.py"))

AXES = {"partition", "synchronization", "aggregation", "compression", "collectives", "server"}
BELOW_TRAINING = {
    *("core", "native", "cluster", "data", *AXES, "flexrr", "federated", "strategies", "spec", "worlds", "wire"),
    *("membership", "partition", "diagnosis"),
}
STREAM = {
    f"report.status.{name}"
    for name in ("metrics", "rows", "records", "event_log", "stream", "row_exchanges", "client_rounds")
}
"""Writers and the reader of a run's stream."""
TRACES = {"worlds.trace", "worlds.trace_tail"}
BELOW_ALL = {"device", "lazy_names"}
"""Modules of the package's own folder that know no other, and that all folders may import."""

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "native": {"core"},
    "cluster": {"core"},
    "data": {"core"},
    "synchronization": {"core"},
    "aggregation": {"core"},
    "compression": {"core", "native"},
    "collectives": {"core"},
    "server": {"core", "native", "compression.exchange.packing"},
    "flexrr": {"core", "server"},
    "partition": {"core"},
    "large_batch": {"core", "native"},
    "wire": {"core", "native", "server.message"},
    "membership": {"core"},
    "diagnosis": {"core"},
    "chaos": {"core", "server"},
    "federated": {"core", "data", "aggregation", "collectives"},
    "strategies": {"core", *AXES, "flexrr"},
    "spec": {"core", "cluster", "data", *AXES, "flexrr", "federated", "strategies"},
    "worlds": {"core", "native", "cluster", "collectives", "wire"},
    "report": {"core", "worlds", "spec.text.notebook_table", "spec.text.plain_text", "spec.result"},
    "trackers": {"core", "report.status", "report.runs", "worlds.trace", "spec"},
    "ui": {
        "core",
        "report",
        "diagnosis.bound",
        "worlds.trace",
        "worlds.trace_tail",
        "spec.text.plain_text",
        "spec.text.tags",
    },
    "one_host": {"core", "native", "data", "large_batch", "strategies", "worlds"},
    "training": {*BELOW_TRAINING, "large_batch", "one_host", "trackers", *STREAM},
    "interop": {*BELOW_TRAINING, "training"},
    "jobs": {"spec.job", "spec.rates.schedules", "spec.text.call", "data"},
    "engines": {"core", "native", "data.plan", "spec", "wire", "worlds", "interop.autoload"},
    "runs": {
        *BELOW_TRAINING,
        *("large_batch", "one_host", "training", "interop", "report", "trackers", "jobs", "engines"),
    },
    "horovod": {*BELOW_TRAINING, "training", "interop", "engines", "runs.elastic", "runs.own_loop"},
    "replay": {*BELOW_TRAINING, "training", "report", "runs"},
    "planner": {*BELOW_TRAINING, "training", "report.pictures.loss_landscape", "runs"},
    "sweeps": {*BELOW_TRAINING, "report", "ui.run_facts", "jobs", "engines", "runs"},
    "bench": {
        "core",
        "native",
        "cluster",
        "compression",
        "strategies",
        "worlds",
        "report",
        "training",
        "interop",
        "engines",
        *("spec", "data", "partition.branches"),
    },
    "cli": {
        *BELOW_TRAINING,
        "large_batch",
        "chaos",
        "report",
        "ui",
        "training",
        "interop",
        "engines",
        "runs",
        "horovod",
        "replay",
        "jobs",
        "planner",
        "sweeps",
        "bench",
    },
}
"""The allowed imports of each folder other than its own: a folder, or one module of it. Top to bottom is one way."""

LEAVES = {
    "partition.scheduled": {
        "partition/__init__.py",
        "spec/text/catalogue.py",
        "cli/run/schedule.py",
        "runs/programs/run_schedule.py",
    },
    "flexrr": {"strategies/flexrr.py", "training/served/slices.py"},
    "replay": {"cli/run/replay.py"},
    "data.scheduled": {"data/__init__.py", "spec/text/catalogue.py"},
}
"""Rooms that only these files import: a face, a command, a run, a strategy."""

TORCH = "torch takes seconds to load, and `--help` must not"
IMPORTED_LATE = {
    ("cli/main.py", "polytempo.cli.run.train"): TORCH,
    ("cli/main.py", "polytempo.cli.run.compare"): TORCH,
    ("cli/main.py", "polytempo.cli.run.sweep"): TORCH,
    ("cli/main.py", "polytempo.cli.run.simulate"): TORCH,
    ("cli/main.py", "polytempo.cli.run.submit"): TORCH,
    ("cli/main.py", "polytempo.cli.run.replay"): TORCH,
    ("cli/main.py", "polytempo.cli.run.top"): TORCH,
    ("cli/main.py", "polytempo.cli.predict.measure"): TORCH,
    ("cli/main.py", "polytempo.cli.predict.calibrate"): TORCH,
    ("cli/main.py", "polytempo.cli.predict.validate"): TORCH,
    ("cli/main.py", "polytempo.cli.predict.profile"): TORCH,
    ("cli/main.py", "polytempo.cli.predict.run_profile"): TORCH,
    ("cli/main.py", "polytempo.cli.look.doctor"): TORCH,
    ("cli/main.py", "polytempo.cli.look.ui"): TORCH,
    ("cli/main.py", "polytempo.cli.horovod.horovodrun"): TORCH,
    ("cli/bench/bench_commands.py", "polytempo.cli.bench.bench"): TORCH,
    ("cli/main.py", "polytempo.cli.look.strategies"): TORCH,
    ("cli/main.py", "polytempo.cli.look.layers"): TORCH,
    ("cli/main.py", "polytempo.cli.look.explain"): TORCH,
    ("cli/main.py", "polytempo.cli.predict.cut"): TORCH,
    ("cli/predict/plan_commands.py", "polytempo.cli.predict.plan_layers"): TORCH,
    ("cli/predict/plan_commands.py", "polytempo.cli.predict.plan_split"): TORCH,
    ("cli/predict/plan_commands.py", "polytempo.cli.predict.plan_run"): TORCH,
    ("cli/main.py", "polytempo.cli.look.sharpness"): TORCH,
    ("cli/bench/bench_commands.py", "polytempo.cli.bench.tune_threads"): TORCH,
    ("cli/bench/bench_commands.py", "polytempo.cli.bench.tune_batch"): TORCH,
    ("cli/bench/bench_commands.py", "polytempo.cli.bench.tune_rate"): TORCH,
    ("planner/rate_finder.py", "polytempo.report.pictures.loss_landscape"): "imports matplotlib, which takes seconds",
    ("cli/main.py", "polytempo.cli.look.report"): TORCH,
    ("cli/main.py", "polytempo.cli.look.runs"): TORCH,
    ("cli/main.py", "polytempo.cli.run.compress"): TORCH,
    ("cli/main.py", "polytempo.cli.run.init"): TORCH,
    ("cli/main.py", "polytempo.cli.run.trained"): TORCH,
    ("cli/clients/client_commands.py", "polytempo.cli.clients.real_clients"): TORCH,
    ("training/observe/trained_model.py", "onnx"): "an extra: only export to ONNX needs it",
    ("training/observe/trained_model.py", "onnxscript"): "an extra: only export to ONNX needs it",
    ("cli/main.py", "polytempo.cli.run.schedule"): TORCH,
    ("cli/main.py", "polytempo.cli.look.chaos"): TORCH,
    ("interop/autoload.py", "polytempo.interop.backend.create"): "`import torch` runs `register`, and must not wait",
    ("jobs/__init__.py", "polytempo.spec.job"): "torch takes seconds to load, and the jobs' names do not need it",
    ("jobs/job_file.py", "polytempo.spec.job"): TORCH,
    ("spec/run_options.py", "polytempo.core.system.url_path"): TORCH,
    ("core/system/url_path.py", "fsspec.core"): "only a URL needs it, and it takes a tenth of a second to load",
    (
        "runs/simulated/simulate.py",
        "polytempo.runs.simulated.simulate_served",
    ): "only parameter servers need it, and it takes a tenth of a second to load",
    (
        "large_batch/sharpness.py",
        "scipy.optimize",
    ): "only `sharpness` needs it, and it takes a third of a second to load",
    ("cli/look/ui.py", "polytempo.ui.server"): "of the extra `ui`",
    ("ui/__main__.py", "polytempo.ui.server"): "the page of a command that ends before they are loaded ends with it",
    ("ui/__main__.py", "polytempo.core.system.url_path"): TORCH,
    ("compression/codecs/top_k.py", "zstandard"): "an extra: only top_k(entropy=True) needs it",
    ("data/streams/sources/arrow_rows.py", "pyarrow"): "an extra: only tables of Arrow need it",
    ("data/readers/spark_frame.py", "pyarrow"): "of the extra `spark`: only a task of Spark needs it",
    ("data/readers/spark_frame.py", "pyspark"): "an extra: only a task of Spark needs it",
    ("interop/averaging_rounds.py", "dask"): "an extra: only partitions of dask need it",
    ("engines/on_kubernetes/api.py", "kubernetes"): "an extra: only the engine `kubernetes` needs it",
    ("engines/on_kubernetes/api.py", "urllib3.exceptions"): "of the extra `kubernetes`",
    ("engines/on_spark/spark_engine.py", "pyspark.sql"): "an extra: only the engine `spark` needs it",
    ("engines/on_spark/task.py", "pyspark"): "an extra: only a task of Spark needs it",
}
"""Imports inside functions, each with its reason."""

FORBIDDEN_NAMES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "eval", "exec"}
FORBIDDEN_TEXT = ("shell=True", "TODO", "FIXME", "XXX")
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 450, 70
MOST_FILES_OF_A_FOLDER, MOST_FILES_OF_A_NAME = 16, 3


def where(path: Path) -> str:
    """The file as this test names it: "core/op.py"."""
    return str(path.relative_to(SOURCE))


def folder(path: Path) -> str:
    """The first folder below the package; "" for the package's own files."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


class Source(NamedTuple):
    """The facts of one file for these tests."""

    path: Path
    lines: tuple[str, ...]
    is_described: bool
    """True if it has a docstring, and the import that postpones annotations where it needs it."""
    imports: frozenset[str]
    """Modules of this package, without its name: "core.op", "torch.job"."""
    imports_at_once: frozenset[str]
    """The modules imported with it; imports for types alone count, except in a package's face."""
    imports_late: frozenset[str]
    """Modules that functions import, whosever they are."""
    undocumented: tuple[str, ...]
    """Public functions and classes without a docstring."""
    long_functions: tuple[str, ...]
    forbidden: frozenset[str]
    """Modules that it imports and functions that it calls of `FORBIDDEN_NAMES`."""
    classes: tuple[str, ...]
    """Public ones."""


@cache
def sources() -> list[Source]:
    """All files, each parsed once."""
    return [read(path) for path in FILES]


def read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    module, is_face = ast.parse(text), path.name == "__init__.py"
    nodes = list(ast.walk(module))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    later = inside | (for_types_only(nodes) if is_face else set())
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    modules = {name.split(".")[0] for node in nodes for name in modules_of(node)}
    return Source(
        path,
        tuple(text.splitlines()),
        is_described(module, is_face),
        frozenset(imported(nodes, path)),
        frozenset(imported((node for node in nodes if node not in later), path)),
        frozenset(name for node in inside for name in modules_of(node)),
        tuple(name for name, node in public(module.body, "") if not ast.get_docstring(node)),
        tuple(f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > MOST_LINES_OF_A_FUNCTION),
        frozenset((called | modules) & FORBIDDEN_NAMES),
        tuple(node.name for node in module.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"),
    )


def is_described(module: ast.Module, is_face: bool) -> bool:
    only_exports = is_face and all(isinstance(node, ast.ImportFrom | ast.Expr | ast.Assign) for node in module.body)
    future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in module.body)
    described = (is_face and not module.body) or ast.get_docstring(module) is not None
    return described and (only_exports or future)


def imported(nodes: Iterable[ast.AST], path: Path) -> set[str]:
    """The modules of this package that the nodes import, without its name: "core.op", "torch.job"."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively; write the whole name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("polytempo.") for name in found if name.startswith("polytempo.")}


def modules_of(node: ast.AST) -> list[str]:
    """The modules that an import names."""
    if isinstance(node, ast.ImportFrom):
        return [str(node.module)]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def for_types_only(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """The imports under `if TYPE_CHECKING:`."""
    guarded = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {inner for guard in guarded for inner in ast.walk(guard)}


Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Documented]]:
    for node in body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}{node.name}.")


def wrong(check: Callable[[Source], Any]) -> dict[str, Any]:
    """The errors of `check`, by file. Empty: nothing."""
    return {where(source.path): found for source in sources() if (found := check(source))}


def allowed(name: str, by: str) -> bool:
    return any(f"{name}.".startswith(f"{other}.") for other in {by, *BELOW_ALL, *MAY_IMPORT[by]})


def test_every_folder_has_its_place_in_the_order() -> None:
    assert {folder(path) for path in FILES} - {""} == set(MAY_IMPORT)


def test_the_order_is_one_way() -> None:
    """Whoever may be imported stands above, so there are no cycles; and the axes do not know each other."""
    order = list(MAY_IMPORT)
    for position, (name, others) in enumerate(MAY_IMPORT.items()):
        above = set(order[:position])
        assert {other.split(".")[0] for other in others} <= above, name
    assert all(MAY_IMPORT[axis] <= {"core", "native"} for axis in AXES - {"server"})
    assert MAY_IMPORT["server"] <= {"core", "native", "compression.exchange.packing"}, "what is pushed may be encoded"


def test_imports_follow_the_order() -> None:
    """`MAY_IMPORT` has the allowed imports of each folder."""

    def forbidden(source: Source) -> list[str]:
        by = folder(source.path)
        return [name for name in source.imports if by and not allowed(name, by)]

    assert wrong(forbidden) == {}


def test_modules_below_all_know_no_other() -> None:
    assert {where(s.path).removesuffix(".py"): s.imports for s in sources()}["device"] == frozenset()


def test_one_room_reads_the_stream_of_a_run() -> None:
    """Others take its functions. `cli/options/folder.py` looks which files there are, before torch is loaded."""
    literal = re.compile(r"[\"'](metrics\.jsonl|events\.jsonl|live\.json)[\"']")

    def opens(source: Source) -> list[str]:
        return [line.strip() for line in source.lines if literal.search(line) and "LineFile(" not in line]

    assert set(wrong(opens)) == {"core/system/files.py", "cli/options/folder.py"}
    readers = wrong(lambda source: [name for name in source.imports if name.endswith(".files.METRICS")])
    assert {name.rsplit("/", 1)[0] for name in readers} <= {
        *("report/status", "report", "runs", "runs/frame", "trackers"),
        "ui/of_run",  # asks for its time
    }


def test_one_module_knows_accelerators() -> None:
    """Others ask `device.py`, so that what runs on one kind runs on all. Horovod's API has its own names."""
    literal, named = (
        re.compile(r"[\"']cuda|is_cuda|torch\.cuda"),
        {"horovod/torch/__init__.py", "horovod/keras/__init__.py"},
    )

    def knows(source: Source) -> list[str]:
        lines = (line.replace('"cuda_built"', "") if where(source.path) in named else line for line in source.lines)
        return [line.strip() for line in lines if literal.search(line)]

    assert set(wrong(knows)) == {"device.py"}


def test_leaves_are_imported_by_their_users_alone() -> None:
    for leaf, users in LEAVES.items():
        found = wrong(lambda source, leaf=leaf: any(f"{name}.".startswith(f"{leaf}.") for name in source.imports))
        inside = leaf.replace(".", "/") + "/"
        assert {path for path in found if not path.startswith(inside)} == users, leaf


def test_no_module_imports_itself_in_a_circle() -> None:
    """Modules by name, with their imports, also for types alone; then leaves are taken away until none is left.

    A package's face that loads names when they are first used imports them for types alone: these do not count.
    """
    names = {where(s.path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): s for s in sources()}
    needs: dict[str, set[str]] = {}
    for name, source in names.items():
        asked = source.imports_at_once
        needs[name] = {a if a in names else a.rpartition(".")[0] for a in asked} & set(names) - {name}
    while leaves := {name for name, others in needs.items() if not others & set(needs)}:
        needs = {name: others for name, others in needs.items() if name not in leaves}
    assert not needs


def test_imports_stand_at_the_top() -> None:
    """Exceptions have a reason in `IMPORTED_LATE`, and are still needed."""
    assert {(where(source.path), name) for source in sources() for name in source.imports_late} == set(IMPORTED_LATE)


def test_every_file_says_what_it_is() -> None:
    """And begins with `from __future__ import annotations`, unless it only exports."""
    assert wrong(lambda source: not source.is_described) == {}


def test_every_public_name_has_a_docstring() -> None:
    assert wrong(lambda source: source.undocumented) == {}


def test_no_second_idea_hides_in_a_long_file_or_function() -> None:
    """The bounds leave room for an honest file with one idea: no line is dense, and no file is cut, to keep them."""
    assert wrong(lambda source: len(source.lines) > MOST_LINES_OF_A_FILE and len(source.lines)) == {}
    assert wrong(lambda source: source.long_functions) == {}


def test_a_folder_is_read_at_a_glance() -> None:
    """But for the catalogue of strategies, one file each; and a file's name says which of them it is."""
    folders = Counter(where(path.parent) for path in FILES)
    assert {name for name, count in folders.items() if count > MOST_FILES_OF_A_FOLDER} == {"strategies"}
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert {name for name, count in names.items() if count > MOST_FILES_OF_A_NAME} == set()


def test_nothing_forbidden() -> None:
    assert wrong(lambda source: source.forbidden) == {}
    assert wrong(lambda source: [word for word in FORBIDDEN_TEXT for line in source.lines if word in line]) == {}


@pytest.mark.parametrize(
    "statement",
    [
        "import polytempo",
        "import polytempo.cli.main",
        "import polytempo.jobs; polytempo.jobs.names()",
        "import polytempo.native.library; polytempo.native.library.available()",
    ],
)
def test_torch_is_not_loaded_before_it_is_needed(statement: str) -> None:
    check = f"{statement}\nimport sys\nassert not [m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules]"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_a_workers_process_loads_no_library_that_few_need() -> None:
    """Thousands of processes load it. scipy alone takes as long as torch."""
    slow = ("scipy", "matplotlib", "plotly", "rich", "zmq", "starlette")
    check = f"import polytempo.training.trainer, sys\nassert not [m for m in {slow} if m in sys.modules]"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


UNPLAIN = re.compile(r"\b(nobody|everybody|somebody|anybody|whoever|whomever|lest)\b", re.IGNORECASE)


def test_sentences_name_their_subject() -> None:
    """ "No worker holds it", not "nobody holds it": the reader need not guess the noun."""

    def unplain(source: Source) -> list[str]:
        return [f"{n}: {line.strip()}" for n, line in enumerate(source.lines, 1) if UNPLAIN.search(line)]

    assert wrong(unplain) == {}


SHARED_NAMES = {
    "Push": "core's op and the message that performs it at a shard, whose name is the wire's and the record's",
    "Pull": "the same",
    "State": "Horovod's name in its elastic API; a shard's state, whose name is the wire's and the record's",
    "Client": "a worker's talk with its shards; a client of a federated round, the field's word",
    "Progress": "FlexRR's message, whose name is the wire's; the terminal's line",
}
"""Public classes of two folders that share a name, each with its reason."""


def test_one_name_for_one_idea() -> None:
    """No two public classes share a name."""
    found = Counter(name for source in sources() for name in source.classes)
    assert {name for name, count in found.items() if count > 1} <= set(SHARED_NAMES)
