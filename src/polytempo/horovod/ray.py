"""`RayExecutor`: ranks as actors of Ray, with the signatures of `horovod.ray`.

    executor = RayExecutor(RayExecutor.create_settings(), num_workers=4, use_gpu=False)
    executor.start()
    results = executor.run(train, args=(data,))          # the results by rank
    executor.shutdown()

It needs the extra `ray`. Functions, arguments and results travel as Ray's own do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polytempo.core.errors import PolytempoError
from polytempo.engines.extras import required
from polytempo.horovod.launcher.settings import ElasticSettings
from polytempo.horovod.ray_elastic import ActorNeeds, run_elastic_actors
from polytempo.horovod.run_function import free_port, leaves_where_it_fails, rank_variables
from polytempo.horovod.torch.basics import shutdown


@dataclass(frozen=True)
class RayExecutorSettings:
    """Made by `RayExecutor.create_settings`."""

    timeout_s: float = 30.0
    placement_group_timeout_s: float = 100.0


class RankActor:
    """The class of each actor."""

    def __init__(self) -> None:
        self._executable: Any = None

    def place(self) -> tuple[str, str, int]:
        """The Ray node's id, its address, and a port that is free there."""
        ray = required("ray", "ray")
        address = ray.util.get_node_ip_address()
        return ray.get_runtime_context().get_node_id(), address, free_port(address)

    def become(self, variables: Mapping[str, str]) -> None:
        """Be told which rank this is."""
        os.environ.update(variables)

    def make(self, kind: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make the object for `execute`."""
        self._executable = kind(*args, **kwargs)

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`fn(*args, **kwargs)`. Where it raises, the other ranks' operations do, too."""
        with leaves_where_it_fails():
            return fn(*args, **kwargs)

    def live(self, variables: Mapping[str, str], made: Sequence[Any] | None, fn: Any, *given: Any) -> Any:
        """Be a process of an elastic run, and call `fn(*args, **kwargs)`, or with `made` `fn` of that object.

        None where the run has no need of this process any more.
        """
        self.become(variables)
        try:
            if made is not None:
                self.make(*made)
                return self.execute(fn)
            return self.call(fn, *given)
        except SystemExit:
            return None
        finally:
            shutdown()

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        """`fn` of the object that `make` has made."""
        with leaves_where_it_fails():
            return fn(self._executable)


class RayExecutor:
    """`num_workers` ranks wherever Ray has room, or `num_hosts` nodes with `num_workers_per_host` ranks each.

    Each rank reserves `cpus_per_worker` CPUs and, with `use_gpu`, `gpus_per_worker` GPUs, from this process's placement
    group, if there is one and `use_current_placement_group`; otherwise from a new one.

    With `min_workers` each `run` and `execute` is an elastic run, as by `horovodrun --min-np`: it begins with
    `num_workers` processes, has from `min_workers` to `max_workers` wherever the cluster's nodes have room, and ends
    after `reset_limit` changes of the group, or where the minimum is missing for `elastic_timeout` seconds. A node gets
    no new process after one has failed there, or with `cooldown_range` for so many seconds. Functions call
    `hvd.init()`, and a function that `hvd.elastic.run` decorates; the answer is the last group's result.

    Errors: ValueError for numbers that do not go together; PolytempoError where Ray has no room in time; `RanksFailed`.
    """

    @classmethod
    def create_settings(
        cls, timeout_s: float = 30.0, placement_group_timeout_s: float = 100.0, **unused: Any
    ) -> RayExecutorSettings:
        """`timeout_s`: for actors to be there; the other for their reservation.

        Horovod's other arguments, for ssh and nics, have no effect.
        """
        del unused
        return RayExecutorSettings(timeout_s, placement_group_timeout_s)

    def __init__(
        self,
        settings: RayExecutorSettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600.0,
        override_discovery: bool = True,
    ) -> None:
        self._elastic: ElasticSettings | None = None
        if min_workers is not None:
            if num_hosts is not None or not override_discovery:
                raise ValueError("an elastic run is on the nodes of Ray: leave num_hosts and override_discovery out")
            self._elastic = ElasticSettings.of(
                num_workers or min_workers,
                min_workers,
                max_workers,
                timeout_s=elastic_timeout,
                reset_limit=reset_limit,
                cooldown_s=cooldown_range,
            )
            num_workers = self._elastic.num_proc
        elif max_workers is not None or reset_limit is not None or cooldown_range is not None:
            raise ValueError("max_workers, reset_limit and cooldown_range are for elastic runs: give min_workers, too")
        if (num_workers is None) == (num_hosts is None):
            raise ValueError(f"give num_workers or num_hosts, and not both: got {num_workers} and {num_hosts}")
        if min(num_workers or 1, num_hosts or 1, num_workers_per_host) < 1:
            raise ValueError(f"there is at least one rank: {num_workers=}, {num_hosts=}, {num_workers_per_host=}")
        if gpus_per_worker and not use_gpu:
            raise ValueError("gpus_per_worker is set, and use_gpu is not; set use_gpu=True")
        self._settings = settings or RayExecutorSettings()
        self._num_hosts, self._per_host = num_hosts, num_workers_per_host
        self.num_workers = num_workers or (num_hosts or 1) * num_workers_per_host
        """The number of ranks."""
        self._cpus, self._gpus = cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0
        self._ray = required("ray", "ray")
        self._group: Any = None
        self._uses_current = use_current_placement_group
        self._actors: list[Any] = []
        self._made: Sequence[Any] | None = None
        """The object that each process of an elastic run makes."""
        self._variables: dict[str, str] | None = None
        """Further environment variables of an elastic run's processes; None: not started."""

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the actors; each becomes a rank, and makes `executable_cls(…)` where there is one."""
        if self._actors or self._variables is not None:
            raise ValueError("this executor has been started already; call shutdown() before it starts again")
        made = (executable_cls, list(executable_args or ()), dict(executable_kwargs or {}))
        if self._elastic is not None:
            self._variables = dict(extra_env_vars or {})
            self._made = None if executable_cls is None else made
            return
        ray = self._ray
        each = self._per_host if self._num_hosts else 1
        bundle = {"CPU": float(self._cpus * each), "GPU": float(self._gpus * each)}
        needs = [{name: amount for name, amount in bundle.items() if amount}] * (self.num_workers // each)
        current = ray.util.get_current_placement_group() if self._uses_current else None
        if current is None:
            self._group = ray.util.placement_group(needs, strategy="STRICT_SPREAD" if self._num_hosts else "PACK")
        try:
            if self._group is not None and not self._group.wait(self._settings.placement_group_timeout_s):
                raise PolytempoError(
                    f"Ray has no room for {len(needs)} times {needs[0]} within "
                    f"{self._settings.placement_group_timeout_s:g} s; use fewer ranks, or a larger cluster"
                )
            bundles = [number // each if current is None else -1 for number in range(self.num_workers)]
            self._begin(current or self._group, bundles, dict(extra_env_vars or {}))
            if executable_cls is not None:
                ray.get([actor.make.remote(*made) for actor in self._actors])
        except BaseException:
            self.shutdown()
            raise

    def _actor(self, options: Mapping[str, Any]) -> Any:
        kind = self._ray.remote(RankActor)
        return kind.options(num_cpus=self._cpus, num_gpus=self._gpus, **options).remote()

    def _begin(self, group: Any, bundles: Sequence[int], extra: Mapping[str, str]) -> None:
        ray, strategies = self._ray, self._ray.util.scheduling_strategies
        started = [
            self._actor({"scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(group, bundle)})
            for bundle in bundles
        ]
        self._actors = started
        try:
            places = ray.get([actor.place.remote() for actor in started], timeout=self._settings.timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise PolytempoError(
                f"{len(started)} actors of Ray were not there within {self._settings.timeout_s:g} s, the time to load "
                "torch included; give more: RayExecutor.create_settings(timeout_s=…)"
            ) from None
        nodes = [node for node, _, _ in places]
        order = sorted(range(len(started)), key=lambda number: (nodes.index(nodes[number]), number))
        self._actors = [started[number] for number in order]
        hosts, (_, address, port) = [nodes[number] for number in order], places[order[0]]
        told = [{**extra, **rank_variables(rank, hosts, address, port)} for rank in range(len(order))]
        ray.get([actor.become.remote(each) for actor, each in zip(self._actors, told, strict=True)])

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on all ranks; the results by rank. Callbacks are refused."""
        if callbacks:
            raise ValueError("callbacks are not supported; let fn report")
        if self._elastic is not None:
            return self._run_elastic(None, fn, list(args or ()), dict(kwargs or {}))
        return list(self._ray.get(self.run_remote(fn, args, kwargs)))

    def _run_elastic(self, *call: Any) -> list[Any]:
        if self._variables is None or self._elastic is None:
            raise ValueError("this executor has not been started; call start() first")
        needs = ActorNeeds(self._actor, self._cpus, self._gpus)
        return run_elastic_actors(self._ray, needs, call, self._variables, self._elastic)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Like `run`, without waiting: Ray's references to the results. Not for an elastic run, which has changing
        processes."""
        return [actor.call.remote(fn, list(args or ()), dict(kwargs or {})) for actor in self._started()]

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Any] | None = None) -> list[Any]:
        """Call `fn(executable)` on all ranks, with the object that each has made in `start`."""
        if callbacks:
            raise ValueError("callbacks are not supported; let fn report")
        if self._elastic is not None:
            if self._made is None:
                raise ValueError("there is no executable: give start() an executable_cls")
            return self._run_elastic(self._made, fn)
        return list(self._ray.get([actor.execute.remote(fn) for actor in self._started()]))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0 alone. Not in an elastic run."""
        return self._ray.get(self._started()[0].execute.remote(fn))

    def shutdown(self) -> None:
        """End the actors, and give back their reserved resources."""
        actors, self._actors = self._actors, []
        self._variables = self._made = None
        for actor in actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None

    def _started(self) -> list[Any]:
        if self._elastic is not None:
            raise ValueError("processes of an elastic run come and go: use run() or execute()")
        if not self._actors:
            raise ValueError("this executor has not been started; call start() first")
        return self._actors
