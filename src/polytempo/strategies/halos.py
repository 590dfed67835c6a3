"""HALoS: each region steps by its workers' movements as they arrive, and all regions' movements move one model."""

from __future__ import annotations

from polytempo.core import Codec, Strategy, call_name, identity
from polytempo.core.calls.call_name import BRIEF
from polytempo.core.codec import PullCodec
from polytempo.core.rule import Service
from polytempo.server.rules.regional import regional
from polytempo.server.service import outer_step, served
from polytempo.server.worker.transforms import push_movement


def halos(
    period: int = 8,
    region: int = 4,
    every: int = 32,
    share: float = 0.25,
    outer_lr: float = 0.8,
    outer_momentum: float = 0.9,
    momentum_every: int = 16,
    global_lr: float = 0.6,
    global_momentum: float = 0.5,
    global_momentum_every: int = 2,
    shards: int = 1,
    replicas: int = 0,
    codec: Codec | None = None,
    pull_codec: PullCodec | None = None,
    delay: int = 0,
) -> Strategy:
    """Asynchronous DiLoCo on two levels: regions of workers, and one model θ of all regions.

    Workers 0 to m - 1 are the first region, m = `region`, the next m the second, and so on. Region r has parameters φᵣ.
    Its worker i pushes Δ = φᵢ - xᵢ after H = `period` steps from φᵢ, its last pull, and goes on from φᵣ:

        v ← μv + Δ;  φᵣ ← φᵣ - α/m (Δ + μv)                           every push: `async_diloco` within the region
        D = φᵣ⁰ - φᵣ;  w ← νw + D;  θ ← θ - β/R (D + νw)               every K-th push of the region, K = `every`
        φᵣ ← (1 - a) φᵣ + a θ;  φᵣ⁰ ← φᵣ                               immediately after that, a = `share`

    with α = `outer_lr`, μ = `outer_momentum`, β = `global_lr`, ν = `global_momentum` and R regions. θ is the model that
    is scored and results. v changes in every `momentum_every`-th push of its region, and takes part in that alone, as
    `momentum_every` in `async_diloco`; w likewise in every `global_momentum_every`-th movement of all regions. m and R
    are those present: pushes of all m move φᵣ as far as a step of `diloco` by their mean, and R movements move θ so.
    The defaults are the paper's for 4 regions of 4 workers: α/m = 0.2 and β/R = 0.15.

    Up to K - 1 pushes of each region are not in θ yet when it is scored, nor at the end; runs of fewer are refused
    (PT1211). One region is `async_diloco` with K = 1, a = 1, β = 1 and ν = 0, and so are regions of one worker with
    K = 1, a = 1, α = 1 and μ = 0, to rounding: θ - (θ - φ) is not φ to the bit. Regions that give nothing on, because K
    is larger than their pushes, are each `async_diloco` of their own workers, to the bit.

    `delay`, `codec` and `pull_codec` are as in `async_diloco`, also weight decay and schedule. A worker that dies loses
    its movement since it last pushed. When a region has lost its last worker, θ takes in the region's movement; it
    begins again as θ. Running statistics of norms are of all regions together.

    Cost: a movement there and the parameters back, in one of `period` steps of a worker, over its own link to the
    shards, as in `async_diloco`. Shards keep the regions, so these save no traffic between sites here, as they do where
    each has a server of its own: the algorithm is here, the saving is not. Memory: a worker's φᵢ; at the shards for
    each region φᵣ, φᵣ⁰, v and one φᵢ for each worker.

    Errors: ValueError for a size, K or number of updates below 1, a share outside [0, 1], a delay of a period or more.

    Source: G.-W. Kim, J. Li, S. Gandham et al., "HALoS: hierarchical asynchronous local SGD over slow networks for
    geo-distributed large language model training", ICML 2025, and its code. Deviations: a region's movement, the step
    of θ and the blend are one entry of a shard's log. In the code both travel meanwhile, and pushes of the region's
    workers in that time stay in φᵣ by 1 - a, but are in no movement; here each push is in one. Each shard counts its
    own pushes. The code gives optimizers N times the rates, and divides by N; its help text has a the other way round.
    """
    lower = outer_step(outer_lr, outer_momentum, momentum_every)
    upper = outer_step(global_lr, global_momentum, global_momentum_every, "global_momentum_every")
    return served(
        call_name(halos, locals(), brief=(*BRIEF, "delay")),
        Service(
            regional(region, every, share),
            shards=shards,
            replicas=replicas,
            optimizer=lower,
            outer=upper,
            codec=codec,
            pull_codec=pull_codec,
        ),
        gradients=identity(),
        parameters=push_movement(period, delay),
    )
