"""A process of an elastic run: it waits for views, and takes part in the training of each."""

from __future__ import annotations

import ipaddress
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from polytempo.engines.join.environment import parsed_url
from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.membership.message import GroupView
from polytempo.runs.elastic.generation_group import take_part
from polytempo.runs.elastic.member_board import Formed, MemberBoard, Row
from polytempo.spec.run_spec import RunSpec
from polytempo.training.elastic.elastic_training import ElasticTraining
from polytempo.training.job.context import TrainingSummary
from polytempo.training.model.agree import gather_json
from polytempo.training.trainer import result_of
from polytempo.worlds import MOST_WRITTEN, ProcessWorld, combined_hash, joined, write_chrome_trace


def train_member(spec: RunSpec, life: int, url: str) -> dict[str, Any] | None:
    """Be the process of `life`. The first member of the last view returns the run's result."""
    host, _ = parsed_url(url)
    if ipaddress.ip_address(host).is_loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return _Worker(spec, life, Rendezvous.joined(url)).work()


class _Worker:
    def __init__(self, spec: RunSpec, life: int, rendezvous: Rendezvous) -> None:
        self._spec, self._rendezvous = spec, rendezvous
        self._board = MemberBoard(rendezvous, life)
        signal.signal(signal.SIGTERM, self._board.leave)
        self._training = ElasticTraining(spec, life, self._board.wishes, self._write)

    def work(self) -> dict[str, Any] | None:
        """Take part until the end."""
        member, timeout_s = self._training.member, self._spec.options.timeout_s
        return take_part(self._rendezvous, self._board, member, timeout_s, self._training.enter, self._train)

    def _train(self, world: ProcessWorld, view: GroupView) -> dict[str, Any] | None:
        self._training.begin(world, view)
        formed = partial(self._board.say, Formed(self._board.life, view.generation))
        return self._finish(world, self._training.train(world, formed if world.rank == 0 else None))

    def _finish(self, world: ProcessWorld, summary: TrainingSummary) -> dict[str, Any] | None:
        """Check the account of samples, and gather the ranks' traces of this group."""
        training, out = self._training, self._spec.options.out
        context, account = training.context, training.account
        assert context is not None
        assert account is not None
        account.check(context.shard.epoch, context.shard.consumed, context.shard.left)
        sent = world.trace.bytes_sent[world.rank] - getattr(context.observer, "off_bytes", 0)
        mine = {
            **world.trace.excerpt(max(1, MOST_WRITTEN // world.size)),
            "bytes": sent + training.other_bytes,
            "share": world.waited_s / max(world.now_s(), 1e-9),
        }
        ranks = world.drive(gather_json(world.port, mine))
        if world.rank:
            return None
        result = result_of(
            context,
            summary,
            world="process",
            num_ranks=world.size,
            num_bytes=sum(rank["bytes"] for rank in ranks),
            communication_share=sum(rank["share"] for rank in ranks) / world.size,
            trace_hash=combined_hash(rank["hash"] for rank in ranks),
        )
        if out is not None:
            events, dropped = joined(ranks)
            write_chrome_trace(out / "trace.json", events, title=f"{result.job}, {result.strategy}", dropped=dropped)
            result = replace(result, checkpoint=str(out / "checkpoint"))
        return result.as_json()

    def _write(self, row: dict[str, Any]) -> None:
        self._board.say(Row(self._board.life, row))
