"""`polytempo`: the commands and their options. A command imports its code when it is called: torch takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import polytempo
from polytempo.cli.bench.bench_commands import bench
from polytempo.cli.bench.tune_commands import tune
from polytempo.cli.horovod.horovodrun_arguments import parsed
from polytempo.cli.look.sharpness_command import sharpness
from polytempo.cli.options import parameters as p
from polytempo.cli.options.command_line import SectionedCommand, takes_options
from polytempo.cli.options.failure import exit_code
from polytempo.cli.options.request import (
    CutRequest,
    chaos_request,
    check_explained,
    check_replay,
    compare_request,
    cut_request,
    schedule_request,
    simulate_request,
    submit_request,
    train_request,
)
from polytempo.cli.predict.plan_commands import plan
from polytempo.cli.predict.prediction_commands import calibrate, profile, validate
from polytempo.engines.processes.fork import collected_children, reserve_standard_files

STORY = {
    "Run": ("train", "compare", "schedule", "submit", "horovodrun"),
    "Look": ("top", "strategies", "explain", "sharpness", "replay"),
    "Predict": ("simulate", "plan", "cut", "profile", "calibrate", "validate"),
    "Tune and test": ("tune", "doctor", "bench", "chaos"),
}
"""The commands as `--help` shows them: train, look, simulate, plan."""


class Story(TyperGroup):
    """A group whose commands are under the headings of `STORY`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each heading, with a line for each command."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in STORY.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])


app = typer.Typer(
    name="polytempo",
    cls=Story,
    no_args_is_help=True,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(plan, name="plan")
app.add_typer(tune, name="tune")
for _command in (calibrate, profile, sharpness, validate):
    app.command()(_command)


@app.callback()
def options(version: p.Version = False) -> None:
    """Train PyTorch models by any distributed strategy, on processes or simulated.
    Begin with: polytempo train digits --workers 2
    """
    if version:
        print(polytempo.__version__)
        raise typer.Exit


def main() -> None:
    """The entry point of `polytempo` and `python -m polytempo`."""
    reserve_standard_files()
    with collected_children():
        app(prog_name="polytempo")


@app.command(cls=SectionedCommand)
@takes_options("train")
def train(context: typer.Context, config: Path | None, **given: object) -> None:
    """Train JOB with worker processes.

    The workers start on this host, or where --engine starts them. Under torchrun, Slurm, MPI or Ray this process
    is one of the workers.
    """
    with exit_code():
        request = train_request(given, config)
        from polytempo.cli.run.train import train as command  # imports torch, which takes seconds

        command(request)


@app.command(cls=SectionedCommand)
@takes_options("compare")
def compare(context: typer.Context, config: Path | None, **given: object) -> None:
    """Train JOB with one strategy after the other, and compare them."""
    with exit_code():
        request = compare_request(given, config)
        from polytempo.cli.run.compare import compare as command  # imports torch, which takes seconds

        command(request)


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    context: typer.Context,
    command: p.Submitted,
    sbatch: p.Sbatch = None,
    grace_s: p.Grace = None,
    dry_run: p.ScriptOnly = False,
) -> None:
    """Submit a `train` command to Slurm, again until it has ended.

    Write: polytempo submit train JOB --engine slurm:nodes=2,time=30 --out FOLDER
    """
    with exit_code():
        if command[0] != "train":
            raise ValueError(f"submit takes a train command, got {command[0]!r}: polytempo submit train JOB …")
    assert context.parent is not None
    assert isinstance(context.parent.command, TyperGroup)
    given = dict(context.parent.command.commands["train"].make_context("train", command[1:]).params)
    with exit_code():
        request = submit_request(given, given.pop("config"))
        from polytempo.cli.run.submit import submit as submitted  # imports torch, which takes seconds

        submitted(command, request, sbatch=sbatch, grace_s=grace_s, dry_run=dry_run)


@app.command(cls=SectionedCommand)
@takes_options("simulate")
def simulate(context: typer.Context, config: Path | None, **given: object) -> None:
    """Train JOB with simulated workers on a described cluster.

    Gradients are computed; time is simulated. The same seed gives the same run, bit for bit.
    """
    with exit_code():
        request = simulate_request(given, config)
        from polytempo.cli.run.simulate import simulate as command  # imports torch, which takes seconds

        command(request)


@app.command()
def replay(
    run: p.Run,
    until: p.Stop = None,
    inspect: p.Inspect = None,
    shard: p.Shard = None,
    job: p.ItsJob = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Repeat a recorded run with a parameter server, bit for bit.

    Each shard takes the recorded messages in their recorded order. The exit code is 1 if anything differs.
    """
    with exit_code():
        check_replay(run, until, job)
        from polytempo.cli.run.replay import replay as command  # imports torch, which takes seconds

        command(run, until, job, data, shard or 0, inspect=bool(inspect), as_json=bool(json))


@app.command()
def top(
    run: p.Watched,
    once: p.Once = None,
    every_s: p.EveryS = None,
    json: p.Json = None,
) -> None:
    """Show a run live: workers, hosts, rates, staleness and faults.

    RUN is the run's folder. Ctrl-C leaves; the run goes on.
    """
    with exit_code():
        from polytempo.cli.run.top import top as command  # imports torch, which takes seconds

        command(run, once=bool(once), as_json=bool(json), every_s=1.0 if every_s is None else every_s)


@app.command()
def doctor(
    engine: p.Measuring = None,
    workers: p.Probes = None,
    out: p.ClusterFile = None,
    json: p.Json = None,
) -> None:
    """Check this machine, and let two workers exchange data.

    With --engine: measure latency and rate between all pairs of its hosts and how fast they compute, and write a
    description of the cluster, which `polytempo simulate --cluster` takes.
    """
    with exit_code():
        if engine is None and (workers is not None or out is not None):
            raise ValueError("--workers and --out go with --engine, which says whose hosts to measure")
        if engine is not None:
            from polytempo.cli.predict.measure import measure  # imports torch, which takes seconds

            measure(engine, workers, out, as_json=bool(json))
            return
        from polytempo.cli.look.doctor import doctor as command  # imports torch, which takes seconds

        command(as_json=bool(json))


@app.command()
def strategies(json: p.Json = None) -> None:
    """List strategies and codecs, with their papers."""
    with exit_code():
        from polytempo.cli.look.strategies import strategies as command  # imports torch, which takes seconds

        command(as_json=bool(json))


@app.command()
def explain(
    strategy: p.Explained,
    workers: p.Many = None,
    job: p.OfJob = None,
    parameters: p.OfSize = None,
    cluster: p.ExplainedOn = None,
    json: p.Json = None,
) -> None:
    """Say what each step of STRATEGY sends, and over which route.

    Bytes are those of the busiest worker, for the model of a job or for a perceptron of a given size. With --cluster
    also how long a step takes there.
    """
    with exit_code():
        check_explained(strategy, job)
        from polytempo.cli.look.explain import explain as command  # imports torch, which takes seconds

        command(strategy, workers, job, parameters, cluster, as_json=bool(json))


@app.command()
def cut(
    job: p.CutJob,
    stages: p.Stages = None,
    by: p.CutBy = None,
    batch_size: p.MicroBatch = None,
    activations: p.ActivationCodec = None,
    gradients: p.GradientCodec = None,
    gbit_per_s: p.LinkSpeed = None,
    data: p.Data = None,
    json: p.Json = None,
) -> None:
    """Cut the model of JOB into stages.

    Prints what each stage computes, keeps and sends. Times are measured on this machine, on one thread, with a batch
    of the job's data.
    """
    with exit_code():
        asked = cut_request(CutRequest(job, stages, by, batch_size, activations, gradients, gbit_per_s))
        from polytempo.cli.predict.cut import cut as command  # imports torch, which takes seconds

        command(asked, data, as_json=bool(json))


@app.command()
def schedule(
    program: p.ScheduledCall,
    data: p.ScheduledData = None,
    workers: p.Workers = None,
    sweeps: p.Sweeps = None,
    tolerance: p.Tolerance = None,
    cluster: p.ScheduledCluster = None,
    stragglers: p.Stragglers = None,
    seed: p.StragglerSeed = None,
    timeout_s: p.Timeout = None,
    json: p.Json = None,
) -> None:
    """Run PROGRAM by scheduled model parallelism.

    It decides in each round which parameters change together. Workers are processes of this host, or, with --cluster,
    simulated; both reach the same bits.
    """
    with exit_code():
        numbers = {"workers": workers, "sweeps": sweeps, "tolerance": tolerance, "seed": seed, "timeout_s": timeout_s}
        asked = schedule_request(program, data, cluster, stragglers, numbers)
        from polytempo.cli.run.schedule import schedule as command  # imports torch, which takes seconds

        command(asked, as_json=bool(json))


@app.command()
def chaos(
    seeds: p.Seeds = None, first: p.First = None, processes: p.Processes = None, bug: p.PlantedBug = None
) -> None:
    """Test the parameter server under simulated faults.

    Networks drop, repeat, reorder, delay and cut messages; processes pause and die; disks fill up and flip bits.
    After each event checks look for lost or repeated updates.
    """
    with exit_code():
        asked = chaos_request(seeds, first, processes)
        from polytempo.cli.look.chaos import chaos as command  # imports torch, which takes seconds

        command(asked, bug)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
    add_help_option=False,
)
def horovodrun(context: typer.Context) -> None:
    """Run a script for Horovod, with the options of horovodrun.

    Write: polytempo horovodrun -np 4 python train.py
    """
    with exit_code():
        given = parsed(context.args)
        from polytempo.cli.horovod.horovodrun import horovodrun as command  # imports torch, which takes seconds

        command(given)
