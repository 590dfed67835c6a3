"""`polytempo`: the commands and their options. A command imports its code when it is called: torch takes seconds."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import typer

import polytempo
from polytempo.cli.bench.bench_commands import bench, tune
from polytempo.cli.clients import client_commands
from polytempo.cli.horovod.horovodrun_arguments import parsed
from polytempo.cli.look.look_options import (
    ChaosOptions,
    DoctorOptions,
    ExplainOptions,
    LookOptions,
    ReplayOptions,
    ReportOptions,
    RunsOptions,
    SharpnessOptions,
    StrategiesOptions,
    TopOptions,
    UiOptions,
)
from polytempo.cli.options.command_line import SectionedCommand, takes, takes_run_options
from polytempo.cli.options.failure import exit_code
from polytempo.cli.options.request import (
    RunRequest,
    compare_request,
    simulate_request,
    submit_request,
    sweep_request,
    train_request,
)
from polytempo.cli.options.shown_page import live_page, page_below
from polytempo.cli.options.story import Story
from polytempo.cli.options.values import is_folder
from polytempo.cli.predict.plan_commands import plan
from polytempo.cli.predict.prediction_options import CalibrateOptions, CutOptions, ProfileOptions, ValidateOptions
from polytempo.cli.run.compress_options import CompressOptions
from polytempo.cli.run.init_options import InitOptions
from polytempo.cli.run.schedule_options import ScheduleOptions
from polytempo.cli.run.trained_options import EvaluateOptions, ExportOptions, PredictOptions
from polytempo.engines.processes.fork import collected_children, reserve_standard_files

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
app.command(cls=SectionedCommand)(client_commands.serve)
app.command()(client_commands.client)
app.command()(client_commands.tickets)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
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


@app.command()
@takes(InitOptions)
def init(asked: InitOptions) -> None:
    """Write a job file for your data: a CSV table, or a folder of pictures.

    The file names model, data, loss, optimizer and schedule; edit it, and give it to `polytempo train`.
    """
    from polytempo.cli.run.init import init as command  # imports torch, which takes seconds

    command(asked)


@app.command(cls=SectionedCommand)
@takes_run_options("train", train_request)
def train(request: RunRequest) -> None:
    """Train JOB with worker processes.

    The workers start on this host, or where --engine starts them. Under torchrun, Slurm, MPI or Ray this process
    is one of the workers.
    """
    with live_page(request):
        from polytempo.cli.run.train import train as command  # imports torch, which takes seconds

        command(request)


@app.command(cls=SectionedCommand)
@takes_run_options("compare", compare_request)
def compare(request: RunRequest) -> None:
    """Train JOB with one strategy after the other, and compare them."""
    with live_page(request, several=True):
        from polytempo.cli.run.compare import compare as command  # imports torch, which takes seconds

        command(request)


@app.command(cls=SectionedCommand)
@takes_run_options("train sweep", sweep_request)
def sweep(request: RunRequest) -> None:
    """Train JOB with many settings, and report which are best: sweep JOB --over lr=1e-4..1e-1:log."""
    with live_page(request, several=True):
        from polytempo.cli.run.sweep import sweep as command  # imports torch, which takes seconds

        command(request)


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    context: typer.Context,
    command: Annotated[
        list[str], typer.Argument(metavar="train …", help="The command that the job runs, with all of its options.")
    ],
    sbatch: Annotated[
        str | None, typer.Option(metavar="WORDS", help="More options of sbatch, such as '--account=physics'.")
    ] = None,
    grace_s: Annotated[
        int | None,
        typer.Option(metavar="S", help="Seconds for the run to save before its time is over. Default: 60."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and submit nothing.")] = False,
) -> None:
    """Submit a `train` command to Slurm, again until it has ended.

    Write: polytempo submit train JOB --engine slurm:nodes=2,time=30 --out FOLDER
    """
    with exit_code():
        if command[0] != "train":
            raise ValueError(f"submit takes a train command, got {command[0]!r}: polytempo submit train JOB …")
    assert context.parent is not None
    assert isinstance(context.parent.command, Story)
    given = dict(context.parent.command.commands["train"].make_context("train", command[1:]).params)
    with exit_code():
        request = submit_request(given, given.pop("config"))
        from polytempo.cli.run.submit import submit as submitted  # imports torch, which takes seconds

        submitted(command, request, sbatch=sbatch, grace_s=grace_s, dry_run=dry_run)


@app.command(cls=SectionedCommand)
@takes_run_options("simulate", simulate_request)
def simulate(request: RunRequest) -> None:
    """Train JOB with simulated workers on a described cluster.

    Gradients are computed; time is simulated. The same seed gives the same run, bit for bit.
    """
    with live_page(request):
        from polytempo.cli.run.simulate import simulate as command  # imports torch, which takes seconds

        command(request)


@app.command()
@takes(ReplayOptions)
def replay(asked: ReplayOptions) -> None:
    """Repeat a recorded run with a parameter server, bit for bit.

    Each shard takes the recorded messages in their recorded order. The exit code is 1 if anything differs.
    """
    from polytempo.cli.run.replay import replay as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(TopOptions)
def top(asked: TopOptions) -> None:
    """Show a run live: workers, hosts, rates, staleness and faults.

    RUN is the run's folder. Ctrl-C leaves; the run goes on.
    """
    from polytempo.cli.run.top import top as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(UiOptions)
def ui(asked: UiOptions) -> None:
    """Show runs in the browser, live: curves, workers, logs; compare, archive, delete.

    Prints a link, which ends in a token. Ctrl-C ends the page; runs go on. Needs the extra `ui`.
    """
    from polytempo.cli.look.ui import ui as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(RunsOptions)
def runs(asked: RunsOptions) -> None:
    """List the runs below a folder: job, strategy, state, scores."""
    from polytempo.cli.look.runs import runs as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(ReportOptions)
def report(asked: ReportOptions) -> None:
    """Compare runs that have ended, on one page.

    `polytempo compare` writes such a page, too: curves, times, bytes and settings, side by side.
    """
    from polytempo.cli.look.report import report as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(DoctorOptions)
def doctor(asked: DoctorOptions) -> None:
    """Check this machine, and let two workers exchange data.

    With --engine: measure latency and rate between all pairs of its hosts and how fast they compute, and write a
    description of the cluster, which `polytempo simulate --cluster` takes.
    """
    if asked.engine is not None:
        from polytempo.cli.predict.measure import measure  # imports torch, which takes seconds

        measure(asked.engine, asked)
        return
    from polytempo.cli.look.doctor import doctor as command  # imports torch, which takes seconds

    command(as_json=asked.json)


@app.command()
@takes(CalibrateOptions)
def calibrate(asked: CalibrateOptions) -> None:
    """Measure these hosts, for `simulate --cluster`.

    Kernels, codecs, optimizers, memory, messages and collectives, and how much steps vary; under a minute a host.
    With --job also 90 steps of that job, so that its own steps are predicted as they are here.
    """
    from polytempo.cli.predict.calibrate import calibrate as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(ProfileOptions)
def profile(asked: ProfileOptions) -> None:
    """Show the costs of a step of JOB, or the steps that RUN has recorded with --profile, operator by operator.

    Of a job: times are measured on this machine, on one thread; with --cluster predictions by its kernels stand beside
    them. Of a run: the time of each rank in operations, exchanges and waits, and a trace for Perfetto.
    """
    if is_folder(asked.job):
        from polytempo.cli.predict.run_profile import run_profile  # loads the trace

        run_profile(asked)
        return
    from polytempo.cli.predict.profile import profile as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(ValidateOptions)
def validate(asked: ValidateOptions) -> None:
    """Compare a run with its simulation, step by step.

    RUN is the run's folder. Says which component (computing, or a kind of communication) is behind most of the error.
    """
    with page_below(str(asked.folder.parent), asked.folder.name) if asked.ui else nullcontext():
        from polytempo.cli.predict.validate import validate as command  # imports torch, which takes seconds

        command(asked)


@app.command()
@takes(SharpnessOptions)
def sharpness(asked: SharpnessOptions) -> None:
    """Measure how sharp the minimum of a run is.

    Prints, for the newest checkpoint, Keskar's sharpness, the loss in SAM's neighbourhood and the largest eigenvalue of
    the Hessian, all of the training loss with dropout off and batch norms by their saved statistics. RUN may also be
    the folder of one checkpoint.
    """
    from polytempo.cli.look.sharpness import sharpness as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(LookOptions)
def look(asked: LookOptions) -> None:
    """Show the layers that runs have learned, side by side.

    Without --layer: the layers, and how alike their activations are in each run and the first, by linear CKA. With it:
    pictures of the layer's weights and of its activations for test samples.
    """
    from polytempo.cli.look.layers import look as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(StrategiesOptions)
def strategies(asked: StrategiesOptions) -> None:
    """List strategies and codecs, with their papers."""
    from polytempo.cli.look.strategies import strategies as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(ExplainOptions)
def explain(asked: ExplainOptions) -> None:
    """Show the bytes that each step of STRATEGY sends, and their route.

    Bytes are of the busiest worker, for the model of a job or for a perceptron of a given size. With --cluster also the
    time of a step there.
    """
    from polytempo.cli.look.explain import explain as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(CutOptions)
def cut(asked: CutOptions) -> None:
    """Cut the model of JOB into stages.

    Prints each stage's computing, memory and messages. Times are measured on this machine, on one thread, with a batch
    of the job's data.
    """
    from polytempo.cli.predict.cut import cut as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(EvaluateOptions)
def evaluate(asked: EvaluateOptions) -> None:
    """Score the model that RUN has trained.

    On the test set of the run's data, or of other data by --data. RUN may also be the folder of one checkpoint.
    """
    from polytempo.cli.run.trained import evaluate as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(PredictOptions)
def predict(asked: PredictOptions) -> None:
    """Write the outputs of the model that RUN has trained.

    For the samples of the test set, in their order, of the run's data or of other data by --data.
    """
    from polytempo.cli.run.trained import predict as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(ExportOptions)
def export(asked: ExportOptions) -> None:
    """Write the model that RUN has trained for programs without Polytempo.

    As tensors by name, as an ONNX graph, or as a folder of Hugging Face.
    """
    from polytempo.cli.run.trained import export as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(CompressOptions)
def compress(asked: CompressOptions) -> None:
    """Make a small file of the network that RUN has trained.

    Prunes small weights, lets the others share a few values, trains on with both, and codes the rest by Huffman. The
    file needs only Python and NumPy to be read.
    """
    from polytempo.cli.run.compress import compress as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(ScheduleOptions)
def schedule(asked: ScheduleOptions) -> None:
    """Run PROGRAM by scheduled model parallelism.

    It decides in each round which parameters change together. Workers are processes of this host, or, with --cluster,
    simulated; both reach the same bits.
    """
    from polytempo.cli.run.schedule import schedule as command  # imports torch, which takes seconds

    command(asked)


@app.command()
@takes(ChaosOptions)
def chaos(asked: ChaosOptions) -> None:
    """Test the parameter server under simulated faults.

    Networks drop, repeat, reorder, delay and cut messages; processes pause and die; disks fill up and flip bits.
    After each event checks look for lost or repeated updates.
    """
    from polytempo.cli.look.chaos import chaos as command  # imports torch, which takes seconds

    command(asked)


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
