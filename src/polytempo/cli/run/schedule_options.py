"""The table of `polytempo schedule`, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from polytempo.cli.options import values
from polytempo.cli.options.completion import cluster_names, program_names
from polytempo.cli.options.shared_options import ARGUMENT, OPTIONS, Json, Stragglers, Timeout, Workers
from polytempo.spec.table.option import Count, Option
from polytempo.spec.text.declaration import declared


def _program(text: str) -> str:
    declared().program(text)
    return text


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options of `polytempo schedule`."""

    program: Annotated[str, Option(ARGUMENT, "PROGRAM", read=_program, complete=program_names)]
    """lasso, logistic, factorization or lda, with arguments if wanted: 'lasso(l1=0.02, cut=columns)'."""
    data: Annotated[str | None, Option(OPTIONS, "CALL")] = None
    """Data to learn from: synthetic such as 'correlated(rows=500)', or a file, such as
    'table("housing.csv", target=price)'. Default: small synthetic data."""
    workers: Workers = 2
    sweeps: Annotated[Count, Option(OPTIONS, "K")] = 100
    """Stop after K sweeps over all parameters. Default: 100."""
    tolerance: Annotated[float, Meta(ge=0, le=1e300), Option(OPTIONS, "T")] = 1e-6
    """Stop where the program's error is at most T. Default: 1e-6."""
    cluster: Annotated[str | None, Option(OPTIONS, "C", read=values.cluster, complete=cluster_names)] = None
    """Simulate the workers on these machines, such as 'ethernet(gbit_per_s=10)'. Default: real processes."""
    stragglers: Stragglers = None
    seed: Annotated[Annotated[int, Meta(ge=0, le=2**63 - 1)] | None, Option(OPTIONS, "S")] = None
    """Seed of the stragglers; programs and data have their own."""
    timeout_s: Timeout = 300.0
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse data that the program does not take, and options of simulated workers for real ones."""
        declared().data_of_program(self.program, self.data)
        if self.stragglers is not None and self.cluster is None:
            raise ValueError(f"--stragglers {self.stragglers}: only simulated workers straggle; add --cluster ethernet")
        if self.seed is not None and self.cluster is None:
            raise ValueError(
                f"--seed {self.seed} draws the stragglers of simulated workers; write the program's own into its "
                "call, such as 'lasso(seed=1)', or add --cluster"
            )
