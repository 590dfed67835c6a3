"""`polytempo doctor --engine`: links and speed of an engine's hosts, as a file that `simulate --cluster` takes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from polytempo.cli.look.look_options import DoctorOptions
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table
from polytempo.cluster import Cluster, Link
from polytempo.cluster.cluster_file import read_cluster, read_price, read_spread
from polytempo.cluster.measured import Measured, MeasuredLink, cluster_of, to_toml
from polytempo.core.system import files
from polytempo.engines.engine import parse_engine
from polytempo.jobs import find
from polytempo.report.pages.summary import human_seconds
from polytempo.runs.calibration.probe import measure as measured_by
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec
from polytempo.strategies import sync_sgd

_FILE = Path("measured.toml")
_SHOWN = 20
_SPREAD = 1.5


def measure(engine: str, asked: DoctorOptions) -> None:
    """Measure the engine's hosts, write the file, and show the measurements."""
    setup, path, workers = parse_engine(engine), asked.out or _FILE, asked.workers
    check_cluster_file(path)
    if workers is None:
        workers = max(2, len(getattr(setup, "hosts", ())))
    with notes_on_stderr():
        found = measured_by(setup, RunSpec.of(find("digits"), sync_sgd(), workers, RunOptions()), engine)
    cluster = cluster_of(found)
    files.replace(path, to_toml(cluster, found, host_hour=price_in(path)))
    if asked.json:
        show_json(
            {
                "cluster": str(path),
                **_plain(found),
                **{name: asdict(getattr(cluster, name)) for name in ("network", "memory")},
            }
        )
        return
    show_table(("", ""), _rows(cluster, found), header=False)
    print(f"written to {path}; simulate it with: polytempo simulate digits --cluster {path}")


def check_cluster_file(path: Path) -> None:
    """Refuse to write over another kind of file, or over a description of a cluster that cannot be read."""
    if path.suffix != ".toml":
        raise ValueError(f"--out {path}: the name must end in .toml, so that simulate --cluster knows it")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it, or name another file")
    if path.exists():
        try:
            read_cluster(path), read_price(path), read_spread(path)
        except ValueError as error:
            raise ValueError(f"--out {path}: this is another file ({error}); name another one") from error


def price_in(path: Path) -> float | None:
    """The price of a host in a file that is measured again, which stays in it."""
    return read_price(path) if path.exists() else None


def _rows(cluster: Cluster, found: Measured) -> list[tuple[str, str]]:
    rows = [
        (f"host {host.name}", f"{host.workers} processes, {speed_text(host.flops_per_s)} each") for host in found.hosts
    ]
    links = [*found.between, *found.within]
    rows += [(f"{link.source} to {link.target}", link_text(link)) for link in links[:_SHOWN]]
    if len(links) > _SHOWN:
        rows.append(("", f"and {len(links) - _SHOWN} more links, which the file lists"))
    rows.append(("network", link_text(cluster.network) + ("" if found.between else " (one host: as its memory)")))
    rows.append(("memory", link_text(cluster.memory) + ("" if found.within else " (not measured: one process a host)")))
    rows.append(("speed", f"{speed_text(cluster.flops_per_s)} a process"))
    rates = [link.bytes_per_s for link in found.between]
    if rates and max(rates) > _SPREAD * min(rates):
        rows.append(("note", f"rates differ by {max(rates) / min(rates):.1f} times; a simulation takes their median"))
    return rows


def link_text(link: MeasuredLink | Link) -> str:
    """Latency and rate, as a person reads them."""
    return f"{human_seconds(link.latency_s)}, {8e-6 * link.bytes_per_s:,.0f} Mbit/s"


def speed_text(flops_per_s: float) -> str:
    """Operations a second, as a person reads them."""
    return f"{flops_per_s / 1e9:.1f} Gflop/s"


def _plain(found: Measured) -> dict[str, object]:
    return {
        "engine": found.engine,
        "hosts": [host._asdict() for host in found.hosts],
        "between": [link._asdict() for link in found.between],
        "within": [link._asdict() for link in found.within],
    }
