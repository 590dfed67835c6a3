"""`polytempo calibrate`: costs of training on an engine's hosts, as a file that `simulate --cluster` takes."""

from __future__ import annotations

from pathlib import Path

from polytempo.cli.options.plan import found_job
from polytempo.cli.options.show import notes_on_stderr, show_json, show_table
from polytempo.cli.predict.measure import check_cluster_file, link_text, price_in, speed_text
from polytempo.cli.predict.prediction_options import CalibrateOptions
from polytempo.cluster import CollectiveLink, JobPace, KernelSpeed
from polytempo.cluster.cluster_file import JOB
from polytempo.cluster.device_speeds import FROM_HOST, PAGEABLE, TO_HOST, DeviceSpeeds
from polytempo.cluster.measured import to_toml
from polytempo.core.system import files
from polytempo.engines.engine import parse_engine
from polytempo.report.pages.summary import human_seconds
from polytempo.runs.calibration.calibrate import Calibration
from polytempo.runs.calibration.calibrate import calibrate as calibrated
from polytempo.runs.calibration.earlier import compared
from polytempo.runs.calibration.job_pace import with_pace
from polytempo.runs.calibration.measurement import NO_EXCHANGE
from polytempo.runs.frame.rehearsal import rehearse
from polytempo.spec.run_options import RunOptions
from polytempo.spec.run_spec import RunSpec

_PERCENT = 100
_SHOWN = ("product", "elementwise", "update SGD momentum", "encode feedback(one_bit())", "low_rank answer", "step")


def calibrate(asked: CalibrateOptions) -> None:
    """Measure, write the file, and show the main figures."""
    setup, path, workers = parse_engine(asked.engine), asked.out, asked.workers
    check_cluster_file(path)
    if workers is None:
        workers = max(2, len(getattr(setup, "hosts", ())))
    with notes_on_stderr():
        spec = None
        if asked.job is not None:
            options = RunOptions(batch_size=asked.batch_size, data=asked.data)
            spec = RunSpec.of(found_job(asked.job), NO_EXCHANGE, workers, options)
            rehearse([spec])  # its errors come before a minute of measuring
        found = calibrated(setup, asked.engine, workers, asked.device)
        if spec is not None:
            known = with_pace(found.cluster, setup, spec.job, workers, spec.options)
            found = found._replace(cluster=known.cluster, spread=found.spread | {JOB: known.error})
    found, change = compared(found, path)
    files.replace(path, to_toml(found.cluster, found.measured, found.spread, price_in(path)))
    if asked.json:
        show_json(_plain(path, found) | {"since": None if change is None else change._asdict()})
        return
    changes = {} if change is None else change._asdict()
    since = [(f"{name} since {path}", _since(ratio)) for name, ratio in changes.items()]
    show_table(("", ""), _rows(found) + since, header=False)
    print(f"written to {path}; simulate it with: polytempo simulate digits --workers {workers} --cluster {path}")


def _rows(found: Calibration) -> list[tuple[str, str]]:
    cluster = found.cluster
    rows = [(f"host {host.name}", f"{host.workers} processes") for host in found.measured.hosts]
    rows.append(("network", link_text(cluster.network) + ("" if found.measured.between else " (one host: its memory)")))
    rows.append(("memory", link_text(cluster.memory)))
    rows += [(name, _collective_text(link)) for name, link in cluster.collectives]
    rows.append(("large products", f"{speed_text(cluster.flops_per_s)} a process"))
    speeds = dict(cluster.speeds.kernels) if cluster.speeds is not None else {}
    rows += [(kernel, _kernel(speeds[kernel])) for kernel in _SHOWN if kernel in speeds]
    rows.append(("kernels", f"{len(speeds)}, which the file lists"))
    rows += [] if cluster.device is None else _device_rows(cluster.device)
    rows += _paces(_jobs(found))
    rows += [(f"spread of {name}", f"{_PERCENT * value:.0f} %") for name, value in found.spread.items()]
    return rows


def _paces(jobs: tuple[JobPace, ...]) -> list[tuple[str, str]]:
    return [
        (f"steps of {each.job}, {each.workers} workers", f"{each.pace:.2f} of what the kernels say") for each in jobs
    ]


def _device_rows(device: DeviceSpeeds) -> list[tuple[str, str]]:
    memory = f", {device.memory_bytes / 1e9:.1f} GB each" if device.memory_bytes else ""
    rows = [("device", f"{device.devices} of {device.name} ({device.kind}){memory}, {device.workers} processes a host")]
    kernels = dict(device.speeds.kernels)
    shown = (*_SHOWN, TO_HOST, FROM_HOST, TO_HOST + PAGEABLE, FROM_HOST + PAGEABLE)
    rows += [(f"{kernel}, device", _kernel(kernels[kernel])) for kernel in shown if kernel in kernels]
    rows += [(f"{name}, device", _collective_text(link)) for name, link in device.collectives]
    return rows + [(f"{name}, device", text) for name, text in _paces(device.speeds.jobs)]


def _collective_text(link: CollectiveLink) -> str:
    least_s, most_s = (human_seconds(choose(link.latencies_s)) for choose in (min, max))
    return f"{least_s} to {most_s} a round, by size; {8e-6 * link.bytes_per_s:,.0f} Mbit/s"


def _since(ratio: float) -> str:
    return f"take {ratio:.2f} times as long, in the median"


def _jobs(found: Calibration) -> tuple[JobPace, ...]:
    return () if found.cluster.speeds is None else found.cluster.speeds.jobs


def _kernel(speed: KernelSpeed) -> str:
    parts = [f"{human_seconds(speed.call_s)} a call"]
    if speed.byte_s:
        parts.append(f"{1e-9 / speed.byte_s:,.1f} GB/s")
    if speed.flop_s:
        parts.append(f"{1e-9 / speed.flop_s:,.1f} Gflop/s")
    return ", ".join(parts)


def _plain_device(device: DeviceSpeeds) -> dict[str, object]:
    return vars(device) | {
        "speeds": {name: speed._asdict() for name, speed in device.speeds.kernels},
        "collectives": {name: vars(link) for name, link in device.collectives},
        "jobs": [each._asdict() for each in device.speeds.jobs],
    }


def _plain(path: Path, found: Calibration) -> dict[str, object]:
    cluster = found.cluster
    return {
        "cluster": str(path),
        "engine": found.measured.engine,
        "hosts": [host._asdict() for host in found.measured.hosts],
        "network": vars(cluster.network),
        "memory": vars(cluster.memory),
        "collectives": {name: vars(link) for name, link in cluster.collectives},
        "kernels": {name: speed._asdict() for name, speed in (cluster.speeds.kernels if cluster.speeds else ())},
        "device": None if cluster.device is None else _plain_device(cluster.device),
        "jobs": [each._asdict() for each in _jobs(found)],
        "spread": found.spread,
    }
