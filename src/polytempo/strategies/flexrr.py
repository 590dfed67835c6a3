"""FlexRR: synchronous or bounded-staleness SGD; workers that fall behind hand work to others."""

from __future__ import annotations

from dataclasses import replace

from polytempo.core import Strategy, call_name
from polytempo.core.rule import Service
from polytempo.flexrr.reassignment import Reassignment
from polytempo.server.rules.coverage import covered
from polytempo.server.rules.staleness import rate_of
from polytempo.server.service import served


def flexrr(
    helpers: int = 4,
    behind: float = 0.2,
    first_offer: float = 0.025,
    later_offers: float = 0.05,
    grain: float = 0.0125,
    bound: int = 0,
    shards: int = 1,
    replicas: int = 0,
) -> Strategy:
    """Workers tell `helpers` others how far they are; who is well behind one gives it slices from its batch's end.

    A worker that is more than `behind` of its batch behind a helper offers it `first_offer` of the batch, and each time
    that this is begun `later_offers` more. A slice, a worker's work between two looks at its mail, is `grain` of a
    batch, at least one sample. A helper's gradient counts as the helped worker's, so with `bound` = 0 the mean over
    the step's samples equals synchronous SGD's, to rounding, for any division of the work:

        θ ← θ - η Σ mᵢ gᵢ / Σ mᵢ      mᵢ = the samples behind gradient gᵢ

    With `bound` > 0 workers may be so many steps apart, as in `ssp`: every batch is one step of the optimizer, when all
    its slices are there, at one over the number of workers times the job's learning rate.

    The loss must be a mean over samples. Batch norms look at whole batches: they are refused (ValueError) unless they
    are frozen or a slice is a batch (`grain` = `first_offer` = `later_offers` = 1).

    Cost: as `async_sgd`; each slice that is helped with is a push of its own, and with a bound a shard keeps one more
    vector for each batch that is being helped with. Batches are computed slice by slice. It pays from about three
    samples a slice on, 240 a batch: for smaller ones make slices larger, as by `grain` = `first_offer` = 0.05 for 64
    (`benchmarks/parameter_server/README.md`). One of 8 workers at half speed lengthens a step to 1.11 at best with 4
    helpers, where others wait until 2.0.

    Source: A. Harlap et al., "Addressing the straggler problem for iterative convergent parallel ML", SoCC 2016 (rapid
    reassignment: 20 %, 2.5 %, 5 %). Deviations: see `flexrr.protocol`; there a server adds up a clock's updates as they
    come, here a synchronous step is the mean over its samples.
    """
    if helpers < 1:
        raise ValueError(
            f"flexrr needs helpers >= 1, got {helpers}; for the same steps without help use backup_workers(backups=0), "
            "or ssp() where there is a bound"
        )
    parts = replace(
        Reassignment(), helpers=helpers, behind=behind, first_offer=first_offer, later_offers=later_offers, grain=grain
    )
    rule = covered(parts.slices, bound)
    served_by = Service(
        rule, shards=shards, replicas=replicas, deals="evenly", waits=True, rate=rate_of(None) if bound else None
    )
    return served(
        call_name(flexrr, locals()),
        replace(served_by, reassigns=replace(parts, slack=bound), numbers_per_batch=parts.slices + 1),
    )
