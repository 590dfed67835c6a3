"""The board of an elastic run: messages arrive once and in order, and nothing of them stays in the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from polytempo.engines.join.rendezvous import Rendezvous
from polytempo.membership.message import GroupView, Interrupt
from polytempo.runs.elastic.generation_group import WatchedStore
from polytempo.runs.elastic.member_board import Formed, LauncherBoard, MemberBoard


@contextmanager
def rendezvous() -> Iterator[tuple[Rendezvous, Rendezvous]]:
    """As its holder has it, and as others do."""
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


def test_a_group_that_is_over_leaves_no_key() -> None:
    with rendezvous() as (_, joined):
        before = joined.store.num_keys()
        stores = [WatchedStore(joined.store, lambda: None, 5.0) for _ in range(3)]
        for rank, store in enumerate(stores):
            store.set(f"address/{rank}", str(rank))
            store.add("count", 1)
        assert [stores[0].get(f"address/{rank}") for rank in range(3)] == [b"0", b"1", b"2"]
        stores[1].clear(of_others=False)
        assert joined.store.num_keys() == before + 2
        stores[0].clear(of_others=True)  # rank 2 was killed
        assert joined.store.num_keys() == before
