"""The board of an elastic run: messages arrive once and in order, and nothing of them stays in the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError

from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.membership.message import GroupView, Interrupt
from polytempo.runs.elastic.member_board import Formed, LauncherBoard, MemberBoard, Superseded, group_prefix


@contextmanager
def rendezvous() -> Iterator[tuple[Rendezvous, Rendezvous]]:
    """The holder's view, and the others'."""
    with closing(Rendezvous.held("127.0.0.1")) as held, closing(Rendezvous.joined(held.url)) as joined:
        yield held, joined


def test_the_store_keeps_no_message_that_was_read_and_none_of_a_process_that_has_ended() -> None:
    with rendezvous() as (held, joined):
        launcher, members = LauncherBoard(held), [MemberBoard(joined, life) for life in range(2)]
        before = joined.store.num_keys()
        for generation in range(1, 30):
            for member in members:
                launcher.tell(member.life, GroupView(generation, (0, 1), 0, 0))
                member.look()
                assert member.next().generation == generation
                member.say(Formed(member.life, generation))
                assert launcher.heard(member.life) == [Formed(member.life, generation)]
        assert joined.store.num_keys() == before
        for generation in (30, 31):
            members[0].say(Formed(0, generation))
            launcher.tell(0, Interrupt(generation))
        launcher.forget(0)
        assert joined.store.num_keys() == before


def test_a_group_that_all_have_left_leaves_no_key() -> None:
    with rendezvous() as (held, joined):
        launcher, before = LauncherBoard(held), joined.store.num_keys()
        for generation in (1, 12):
            store = PrefixStore(group_prefix(generation), joined.store)
            store.set("address", "here")
            store.add("count", 1)
        launcher.forget_group(1)
        assert (store.get("address"), joined.store.num_keys()) == (b"here", before + 2)
        launcher.forget_group(12)
        assert joined.store.num_keys() == before


def test_a_wait_at_the_store_ends_with_a_break_of_the_group() -> None:
    with rendezvous() as (held, joined):
        launcher, member = LauncherBoard(held), MemberBoard(joined, 0)
        launcher.tell(0, GroupView(1, (0, 1), 0, 0))
        member.next()
        launcher.tell(0, Interrupt(1, broken=True))
        with pytest.raises(Superseded), joined.store.watched(member.check, 60.0):
            joined.store.wait(["never"])
        with pytest.raises(DistStoreError, match="timed out waiting for never"):  # the check ends with the group
            joined.store.wait(["never"], timedelta(seconds=0.01))
