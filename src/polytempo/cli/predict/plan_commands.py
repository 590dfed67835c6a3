"""`polytempo plan`: its commands and their options. A command imports its code when it is called.

`polytempo plan JOB` is `polytempo plan run JOB`.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from polytempo.cli.options.command_line import takes
from polytempo.cli.options.shown_page import page_of
from polytempo.cli.predict.plan_options import LayersOptions, PlanOptions, SplitOptions


class JobOrCommand(TyperGroup):
    """Takes a word that is not a command for a job, which `run` plans."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `run` before a job, or before its options."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


plan = typer.Typer(
    cls=JobOrCommand,
    help="Choose a strategy, workers and a batch: `polytempo plan JOB`. Or plan the layers of a model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@plan.callback()
def options() -> None:
    """Choose a strategy, workers and a batch: `polytempo plan JOB`. Or plan the layers of a model."""


@plan.command()
@takes(PlanOptions)
def run(asked: PlanOptions) -> None:
    """Choose the strategy, the workers and the batch of JOB for the least time or money until a target.

    Step times are simulated on the cluster without values; samples come from short simulated runs that train. Ctrl-C
    ends the search, and shows the plan so far.
    """
    with page_of(asked.page.parent if asked.ui and asked.page is not None else None, several=True):
        from polytempo.cli.predict.plan_run import plan_run as command  # imports torch, which takes seconds

        command(asked)


@plan.command()
@takes(LayersOptions)
def layers(asked: LayersOptions) -> None:
    """Say for each layer of JOB's model whether data or model parallelism sends less.

    |W| are a layer's weights, |D| its inputs for the samples of a step. Nothing is computed or sent.
    """
    from polytempo.cli.predict.plan_layers import plan_layers as command  # imports torch, which takes seconds

    command(asked)


@plan.command()
@takes(SplitOptions)
def split(asked: SplitOptions) -> None:
    """Say how to split each layer of JOB's model over workers that hold it together, so that they send the least.

    Prints the strategy that does it, and whether the link makes a step slower. Nothing is computed or sent.
    """
    from polytempo.cli.predict.plan_split import plan_split as command  # imports torch, which takes seconds

    command(asked)
