"""A parameter server with a user's loop: real ranks, a real server, and their ends."""

from __future__ import annotations

import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.utils.data import TensorDataset

import polytempo as pt
from polytempo.core import Strategy
from polytempo.engines.join import init as init_module
from polytempo.engines.local_engine import launch
from polytempo.engines.processes.worker import RankInfo, Result
from polytempo.runs.own_loop.loop_link import KEYS
from polytempo.server.message import Ask
from polytempo.training.own_loop.served_handle import ServedHandle
from polytempo.training.own_loop.ticket_loop import LEAVE
from polytempo.wire.keys import Keys, make_keys, write_keys
from polytempo.wire.zeromq import Mailbox
from polytempo.worlds import ProcessWorld
from process.crew import flat, small, squared, together
from waiting import soon

pytestmark = pytest.mark.process

s = pt.strategies
SAMPLES = 150


class Loop:
    """One rank's loop over `SAMPLES` samples in batches of 8; `see(step)` is called behind each of its steps."""

    def __init__(self, strategy: Strategy, see: Callable[[Loop], bool | None] = lambda loop: None) -> None:
        self.net, self.see, self.seen = small(torch.float32), see, list[int]()
        self.optimizer = SGD(self.net.parameters(), lr=0.05)
        handle = pt.attach(self.net, self.optimizer, strategy)
        assert isinstance(handle, ServedHandle)
        self.handle = handle
        random = torch.Generator().manual_seed(3)
        data = TensorDataset(
            torch.randn(SAMPLES, 4, generator=random), torch.randn(SAMPLES, 3, generator=random), torch.arange(SAMPLES)
        )
        self.batches = pt.shard(data, batch_size=8)

    def epoch(self) -> None:
        """Until the epoch is over, or `see` says True."""
        for inputs, targets, numbers in self.batches:
            self.seen += numbers.tolist()
            self.optimizer.zero_grad()
            squared(self.net(inputs), targets).backward()
            self.optimizer.step()
            if self.see(self):
                break

    def epochs(self, number: int) -> None:
        """So many."""
        for _ in range(number):
            self.epoch()

    @property
    def server(self) -> int:
        """The server's process, on rank 0."""
        process = self.handle._start._process  # type: ignore[attr-defined]
        return int(process.pid)


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def once(account: dict[str, Any], epochs: int = 1) -> bool:
    (row,) = account["ledger"]
    return (row["last_epoch"], row["once"], row["twice"], row["never"]) == (epochs - 1, SAMPLES, 0, 0)


@pytest.mark.parametrize("strategy", [s.downpour(shards=2, replicas=1, lr=0.01), s.halos(3, 1, 2, 0.5)], ids=str)
def test_two_ranks_use_each_sample_once_though_a_copy_dies(strategy: Strategy) -> None:
    def work(world: ProcessWorld) -> Result:
        def see(loop: Loop) -> None:
            copies = strategy.server.replicas if strategy.server is not None else 0
            if copies and world.rank == 0 and loop.handle.step == 3:
                os.kill(children(loop.server)[1], signal.SIGKILL)

        loop = Loop(strategy, see)
        loop.epoch()
        loop.epoch()
        with loop.handle.consensus():
            lent = flat(loop.net)
        loop.handle.detach()
        assert flat(loop.net) == lent  # every sample is in it already
        return [loop.seen, lent, loop.handle.account]

    (seen, weights, account), (others, same, nothing) = together(2, work)
    assert sorted(seen + others) == sorted([*range(SAMPLES), *range(SAMPLES)])
    assert weights == same
    assert nothing is None
    assert once(account, epochs=2)
    assert [event["how"] for event in account["events"] if "killed" in event["how"]] == (
        ["was killed by SIGKILL"] if strategy.server is not None and strategy.server.replicas else []
    )


def test_a_loop_whose_regions_gave_nothing_says_so() -> None:
    def work(world: ProcessWorld) -> Result:
        loop = Loop(s.halos(3, 1, 1000, 0.5))
        begun, said = flat(loop.net), StringIO()
        loop.epoch()
        with redirect_stderr(said):
            loop.handle.detach()
        return [begun == flat(loop.net), said.getvalue()]

    (same, one), (again, other) = together(2, work)
    assert same
    assert again
    assert (one + other).count("are the first ones, because no region has made enough pushes") == 1


@pytest.mark.parametrize("strategy", [s.ssp(bound=1)], ids=str)
def test_a_rank_that_stops_early_leaves_its_batches_to_the_others(strategy: Strategy) -> None:
    def work(world: ProcessWorld) -> Result:
        loop = Loop(strategy, lambda loop: world.rank == 1 and loop.handle.step == 2)
        loop.epoch()
        loop.handle.detach()
        return [flat(loop.net), loop.handle.account]

    (weights, account), (same, _) = together(2, work)
    assert weights == same
    assert once(account)


def test_a_loop_that_a_thread_has_begun_outlives_it() -> None:
    def work(world: ProcessWorld) -> Result:
        with ThreadPoolExecutor() as pool:
            loop = pool.submit(Loop, s.downpour(lr=0.01)).result()
            pool.submit(loop.epoch).result()
        loop.epoch()
        loop.handle.detach()
        return loop.handle.account

    assert once(together(1, work)[0], epochs=2)


def test_nothing_is_left_and_the_others_hear_why_rank_0_has_failed() -> None:
    def work(world: ProcessWorld) -> Result:
        loop = Loop(s.async_sgd(shards=2), lambda loop: world.rank == 0 and loop.handle.step == 2)
        home = Path(tempfile.gettempdir())  # this run's folder: ranks write there
        if world.rank == 1:
            with pytest.raises(pt.errors.PolytempoError, match=r"rank 0 has ended.*ValueError: the loop's own mistake"):
                loop.epochs(10_000)  # one of its own may be over before rank 0 has ended
            return None
        loop.epoch()
        (folder,) = home.glob("polytempo-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        processes = [loop.server, *children(loop.server)]
        sys.last_value = ValueError("the loop's own mistake")  # as an interpreter leaves it that ends with that
        loop.handle._epochs.at_exit()
        soon(lambda: not any(Path(f"/proc/{each}").exists() for each in processes), 10)  # the janitor is not a child
        return [folder.exists(), [each for each in processes if Path(f"/proc/{each}").exists()]]

    assert together(2, work)[0] == [False, []]


@pytest.mark.parametrize("shared", [False, True], ids=["keys of the run", "keys from a file"])
def test_ranks_of_two_hosts_meet_with_keys_alone(shared: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    if shared:
        write_keys(tmp_path / "keys", make_keys())

    def intrude(loop: Loop, keys: Keys | None) -> None:
        """Say that rank 0 leaves, with other keys or none: a server that believed it would deal rank 0 no more."""
        mail: Any = loop.handle._epochs.joined.link.mail._mail  # type: ignore[union-attr]
        stranger = Mailbox(0, "tcp://127.0.0.1:*", keys)
        stranger.connect(mail._keeper, mail._keeper_address)
        stranger.post(mail._keeper, Ask(0, 1, 1 << 20, (), (LEAVE % 0,)))
        stranger.close(0.3)

    def work(rank_info: RankInfo) -> Result:
        os.environ.update({KEYS: str(tmp_path / "keys")} if shared else {})
        init_module.host_identity = lambda: f"host {rank_info.rank}"
        world = pt.init(timeout_s=30, quiet=True)
        assert list(world.port.hosts) == [0, 1]

        def see(loop: Loop) -> None:
            if world.rank == 1 and loop.handle.step == 2:
                intrude(loop, make_keys())
                intrude(loop, None)

        loop = Loop(s.async_sgd(shards=2, replicas=1), see)
        loop.epoch()
        loop.handle.detach()
        return [loop.seen, flat(loop.net), loop.handle.account]

    (seen, weights, account), (others, same, _) = launch(work, 2, threads=1, timeout_s=60)
    assert weights == same
    assert once(account)
    assert sorted(seen + others) == list(range(SAMPLES))
    assert len(seen) > 0 < len(others)
