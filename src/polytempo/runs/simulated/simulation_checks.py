"""What no simulation can have, or none of a strategy, or none without values."""

from __future__ import annotations

from polytempo.core import Strategy
from polytempo.spec.options import RunOptions


def check_simulation(strategy: Strategy, options: RunOptions, *, meta: bool, batched: bool) -> None:
    """Raises ValueError for options that no simulation, or none of this strategy, can have."""
    if batched and (options.noise_scale is not None or options.batch_growth):
        raise ValueError(
            "batched computes all workers' gradients in one pass, and looks at none of them; leave out batched, or "
            "noise_scale and batch_growth"
        )
    if batched and options.precision is not None:
        raise ValueError(
            f"batched computes all workers' gradients in one pass of float32; leave out batched, or "
            f"precision={options.precision}"
        )
    if batched and meta:
        raise ValueError("meta computes nothing, so there is nothing to compute together; leave out batched or meta")
    if options.resume:
        raise ValueError("a simulation is not resumed: the same arguments give the same run; leave out resume")
    if options.checkpoint_every and (meta or strategy.server is not None):
        why = "with meta nothing is learned" if meta else f"{strategy} has a parameter server"
        raise ValueError(f"{why}, so this simulation saves no checkpoints; leave out checkpoint_every")
    if meta:
        _check_without_values(strategy, options)


def needs_values(strategy: Strategy, options: RunOptions) -> bool:
    """Whether a simulation of the strategy has to compute gradients for its times to be known."""
    try:
        check_simulation(strategy, options, meta=True, batched=False)
    except ValueError:
        return True
    return False


def _check_without_values(strategy: Strategy, options: RunOptions) -> None:
    if strategy.parted is not None and strategy.schedule is not None:
        raise ValueError(
            f"{strategy} has stages whose layers are split; leave out meta, or look at stages or at parts alone"
        )
    if options.precision is not None and strategy.schedule is not None:
        raise ValueError(
            f"{strategy} has stages, which without values are priced in float32; leave out meta, or "
            f"precision={options.precision}"
        )
    if strategy.distillation is not None:
        raise ValueError(f"{strategy} computes what models of other groups predict; leave out meta")
    if options.noise_scale is not None:
        raise ValueError("with meta there are no gradients, so no noise scale; leave out noise_scale")
    if options.batch_growth:
        raise ValueError(
            "with meta there are steps and no epochs, after which batches could grow; leave out batch_growth"
        )
    if strategy.server is not None:
        if strategy.server.reassigns is not None:
            raise ValueError(f"{strategy} cuts batches into slices that workers hand to each other; leave out meta")
        if strategy.server.codec is not None or strategy.server.pull_codec is not None:
            raise ValueError(f"{strategy} encodes what is pushed or pulled, which needs values; leave out meta")
    if options.ema is not None:
        raise ValueError(f"with meta there are no weights to average; leave out ema={options.ema:g}")
    if options.epochs or options.until:
        raise ValueError("with meta nothing is learned; give steps instead of epochs or until")
