"""`polytempo`: the commands and their options. What a command does is imported when it is called: torch is slow."""

from __future__ import annotations

import typer

import polytempo
from polytempo.cli import bench_parameters as b
from polytempo.cli import parameters as p
from polytempo.cli.failure import exit_code

app = typer.Typer(
    name="polytempo",
    help="Train PyTorch models with any distributed strategy, on real processes or under a virtual clock.",
    epilog="Begin with: polytempo train digits --workers 2",
    no_args_is_help=True,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(
    help="Measure this machine: ours beside gloo, Open MPI where it is installed, and the limit.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")


@app.callback()
def options(version: p.Version = False) -> None:
    """Train PyTorch models with any distributed strategy, on real processes or under a virtual clock."""
    if version:
        print(polytempo.__version__)
        raise typer.Exit


def main() -> None:
    """The entry point of `polytempo` and `python -m polytempo`."""
    app()


@app.command()
def train(
    context: typer.Context,
    job: p.Job = None,
    strategy: p.Strategy = None,
    workers: p.Workers = None,
    data: p.Data = None,
    epochs: p.Epochs = None,
    until: p.Until = None,
    steps: p.Steps = None,
    batch_size: p.BatchSize = None,
    lr: p.LearningRate = None,
    seed: p.Seed = None,
    threads: p.Threads = None,
    allow_nan: p.AllowNan = None,
    checkpoint_every: p.CheckpointEvery = None,
    on_drift: p.OnDrift = None,
    timeout_s: p.Timeout = None,
    transport: p.Transport = None,
    restarts: p.Restarts = None,
    out: p.Out = None,
    force: p.Force = None,
    resume: p.Resume = None,
    json: p.Json = None,
    dry_run: p.DryRun = None,
    config: p.Config = None,
) -> None:
    """Train JOB with real worker processes.

    They are started on this host; under torchrun, Slurm, Open MPI or Ray, this process is one of them.
    """
    with exit_code():
        from polytempo.cli.request import train_request  # imports pydantic

        request = train_request(_given(context), config)
        from polytempo.cli.train import train as command  # imports torch, which takes seconds

        command(request)


@app.command()
def compare(
    context: typer.Context,
    job: p.Job = None,
    strategies: p.Strategies = None,
    workers: p.Workers = None,
    data: p.Data = None,
    epochs: p.Epochs = None,
    until: p.Until = None,
    steps: p.Steps = None,
    batch_size: p.BatchSize = None,
    lr: p.LearningRate = None,
    seed: p.Seed = None,
    threads: p.Threads = None,
    allow_nan: p.AllowNan = None,
    timeout_s: p.Timeout = None,
    transport: p.Transport = None,
    restarts: p.Restarts = None,
    out: p.Out = None,
    force: p.Force = None,
    json: p.Json = None,
    dry_run: p.DryRun = None,
    config: p.Config = None,
) -> None:
    """Train JOB with several strategies; one report."""
    with exit_code():
        from polytempo.cli.request import compare_request  # imports pydantic

        request = compare_request(_given(context), config)
        from polytempo.cli.compare import compare as command  # imports torch, which takes seconds

        command(request)


@app.command()
def simulate(
    context: typer.Context,
    job: p.Job = None,
    strategy: p.Strategy = None,
    workers: p.Workers = None,
    cluster: p.Cluster = None,
    stragglers: p.Stragglers = None,
    meta: p.Meta = None,
    data: p.Data = None,
    epochs: p.Epochs = None,
    until: p.Until = None,
    steps: p.Steps = None,
    batch_size: p.BatchSize = None,
    lr: p.LearningRate = None,
    seed: p.Seed = None,
    threads: p.Threads = None,
    allow_nan: p.AllowNan = None,
    out: p.Out = None,
    force: p.Force = None,
    json: p.Json = None,
    dry_run: p.DryRun = None,
    config: p.Config = None,
) -> None:
    """Train JOB with virtual workers on a described cluster.

    The gradients are real, and the clock jumps. The same seed gives the same run, to the bit.
    """
    with exit_code():
        from polytempo.cli.request import simulate_request  # imports pydantic

        request = simulate_request(_given(context), config)
        from polytempo.cli.simulate import simulate as command  # imports torch, which takes seconds

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
    """Re-run a recorded run with a parameter server, to the same bits.

    Every message meets every shard in the order in which it did. The exit code is 1 where anything differs.
    """
    with exit_code():
        from polytempo.cli.replay import replay as command  # imports torch, which takes seconds

        command(run, until, job, data, shard or 0, inspect=bool(inspect), as_json=bool(json))


@app.command()
def doctor(json: p.Json = None) -> None:
    """Check this machine, with two workers that talk."""
    with exit_code():
        from polytempo.cli.doctor import doctor as command  # imports torch, which takes seconds

        command(as_json=bool(json))


@app.command()
def strategies(json: p.Json = None) -> None:
    """List strategies, codecs and ways, with the paper of each."""
    with exit_code():
        from polytempo.cli.strategies import strategies as command  # imports torch, which takes seconds

        command(as_json=bool(json))


@app.command()
def explain(
    strategy: p.Explained,
    workers: p.Many = None,
    job: p.OfJob = None,
    parameters: p.OfSize = None,
    json: p.Json = None,
) -> None:
    """Say what each step of STRATEGY sends, on which way, and why.

    Bytes are those of the busiest worker, for the model of a job or for a perceptron of so many parameters.
    """
    with exit_code():
        from polytempo.cli.request import check_job, check_strategies  # imports pydantic

        check_strategies(strategy)
        check_job(job or "digits")
        from polytempo.cli.explain import explain as command  # imports torch, which takes seconds

        command(strategy, workers, job, parameters, as_json=bool(json))


@app.command()
def chaos(
    seeds: p.Seeds = None, first: p.First = None, processes: p.Processes = None, bug: p.PlantedBug = None
) -> None:
    """Simulate the parameter server under faults, seed after seed.

    Networks drop, repeat, reorder, delay and cut; processes pause and die; disks fill up and flip bits. Checkers watch.
    """
    with exit_code():
        from polytempo.cli.chaos import chaos as command  # imports torch, which takes seconds

        command(seeds, first, processes, bug)


@bench.command()
def collectives(
    context: typer.Context,
    ranks: b.Ranks = None,
    sizes: b.Sizes = None,
    operations: b.Operations = None,
    rounds: b.Rounds = None,
    turn_s: b.Turn = None,
    quick: b.Quick = None,
    out: b.Out = None,
    json: p.Json = None,
) -> None:
    """Time all-reduce, broadcast, … and the barrier."""
    with exit_code():
        from polytempo.cli.bench import collectives as command  # imports torch, which takes seconds

        command(_given(context))


@bench.command()
def training(
    context: typer.Context,
    models: b.Models = None,
    workers: b.Workers = None,
    rounds: b.Rounds = None,
    turn_s: b.Turn = None,
    quick: b.Quick = None,
    out: b.Out = None,
    json: p.Json = None,
) -> None:
    """Count samples per second of four models, by one process and by several."""
    with exit_code():
        from polytempo.cli.bench import training as command  # imports torch, which takes seconds

        command(_given(context))


@bench.command()
def memory(
    context: typer.Context,
    workers: b.Workers = None,
    parameters: b.Parameters = None,
    steps: b.Steps = None,
    quick: b.Quick = None,
    out: b.Out = None,
    json: p.Json = None,
) -> None:
    """Weigh what all workers together need to train with Adam."""
    with exit_code():
        from polytempo.cli.bench import memory as command  # imports torch, which takes seconds

        command(_given(context))


@bench.command()
def compression(
    context: typer.Context,
    model: b.Model = None,
    link: b.Link = None,
    latency_us: b.Latency = None,
    workers: b.Workers = None,
    codecs: b.Codecs = None,
    rounds: b.Rounds = None,
    quick: b.Quick = None,
    out: b.Out = None,
    json: p.Json = None,
) -> None:
    """Tell of each codec the speed of the network below which it pays."""
    with exit_code():
        from polytempo.cli.bench_compression import compression as command  # imports torch, which takes seconds

        command(_given(context))


def _given(context: typer.Context) -> dict[str, object]:
    """The options as the command line gives them; None where it does not."""
    return {key: value for key, value in context.params.items() if key != "config"}
