"""Features that a simulation cannot have: any, or one of some strategies, or one without values."""

from __future__ import annotations

from polytempo.core import Strategy
from polytempo.core.calls.refusals import refusal_of, refuse
from polytempo.spec.run_options import RunOptions


def check_simulation(strategy: Strategy, options: RunOptions, *, meta: bool, batched: bool) -> None:
    """Raises `Incompatible` for options that no simulation, or none of this strategy, can have."""
    features = _features(strategy, options, meta=meta, batched=batched)
    refuse(features, **vars(options) | {"strategy": strategy})


def needs_values(strategy: Strategy, options: RunOptions) -> bool:
    """True if a simulation of the strategy has to compute gradients, because its times depend on values."""
    return refusal_of(_features(strategy, options, meta=True, batched=False)) is not None


def _features(strategy: Strategy, options: RunOptions, *, meta: bool, batched: bool) -> set[str]:
    asked = {
        "simulation": True,
        "meta": meta,
        "batched": batched,
        "noise scale": options.noise_scale is not None and (meta or batched),
        "batch growth": bool(options.batch_growth) and (meta or batched),
        "balance": options.balance == "speed",
        "accumulation": options.accumulate > 1 and batched,
        "clipping": options.clip_norm is not None and batched,
        "precision": options.precision is not None and (batched or meta),
        "resume": bool(options.resume),
        "checkpoints": bool(options.checkpoint_every),
        "start": options.start_from is not None,
        "average": meta and options.ema is not None,
        "goal": bool(options.epochs or options.until),
    }
    return {name for name, has in asked.items() if has} | (strategy.features)
