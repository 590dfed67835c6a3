"""Tensors on a device travel by the device's own process group, or staged through the host. Either way the
results are the host's, to the bit on the pretend device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.functional import mse_loss

import polytempo as pt
from polytempo.device import backend_of, current_device, num_devices, visible_devices
from polytempo.engines.local_engine import launch
from polytempo.native.group import Group
from polytempo.worlds import ProcessWorld
from process.collective_calls import GATHER_SINGLE, SCATTER_SINGLE

pytestmark = pytest.mark.process

crew = pytest.importorskip("device.crew")
RANKS = {"a device each": 2, "more ranks than devices": 3}


def group() -> Any:
    return dist.group.WORLD


@pytest.fixture(params=RANKS.values(), ids=RANKS)
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_the_way_of_tensors(device: str, num_ranks: int) -> None:
    def work(world: ProcessWorld, card: torch.device) -> list[Any]:
        way = group().on_devices
        torch.ones(1, device=card)
        return [way and way.name(), num_devices(), visible_devices(), str(current_device())]

    for rank, (way, count, visible, card) in enumerate(crew.together(device, num_ranks, work)):
        assert way == (backend_of(device) if num_ranks <= count else None)
        assert visible == [card] == [f"{device}:{rank % count}"]


def numbers(rank: int, size: int = 12) -> Tensor:
    return torch.arange(1.0, size + 1) * (rank + 1) / 7


def collectives(rank: int, ranks: int, where: torch.device) -> dict[str, list[Tensor]]:
    """The answers of torch.distributed's collectives for tensors on `where`."""

    def mine() -> Tensor:
        return numbers(rank, 4 * ranks).to(where)

    def made(count: int = 1, size: int = 4 * ranks) -> list[Tensor]:
        return [torch.empty(size, device=where) for _ in range(count)]

    answers: dict[str, list[Tensor]] = {}
    for name, op in {"sum": ReduceOp.SUM, "average": ReduceOp.AVG, "max": ReduceOp.MAX}.items():
        answers[name] = [mine()]
        dist.all_reduce(answers[name][0], op=op)
    if group().on_devices is None:  # NCCL takes contiguous tensors alone
        whole = mine().repeat(3, 1).t()
        dist.all_reduce(whole[::2])
        answers["a view"] = [whole.contiguous()]
    answers["several"] = [mine(), mine() + 1]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in answers["several"]]
    for work in works:
        work.wait()
    answers["broadcast"] = [mine()]
    dist.broadcast(answers["broadcast"][0], src=1)
    answers["all_gather"] = made(ranks)
    dist.all_gather(answers["all_gather"], mine())
    answers["all_gather into one"] = made(1, 4 * ranks * ranks)
    GATHER_SINGLE(answers["all_gather into one"][0], mine())
    answers["reduce_scatter"] = made(1, 4)
    dist.reduce_scatter(answers["reduce_scatter"][0], list(mine().chunk(ranks)))
    answers["reduce_scatter from one"] = made(1, 4)
    SCATTER_SINGLE(answers["reduce_scatter from one"][0], mine())
    answers["all_to_all_single"] = made()
    dist.all_to_all_single(answers["all_to_all_single"][0], mine())
    answers["gather"] = made(ranks if rank == 0 else 0)
    dist.gather(mine(), answers["gather"] if rank == 0 else None, dst=0)
    answers["scatter"] = made()
    dist.scatter(answers["scatter"][0], [mine() + r for r in range(ranks)] if rank == 1 else None, src=1)
    return answers


def test_collectives_answer_as_on_the_host(device: str, num_ranks: int) -> None:
    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        there = collectives(world.rank, num_ranks, card)
        here = collectives(world.rank, num_ranks, torch.device("cpu"))
        strays = {name: "not on the device" for name, found in there.items() if any(t.device != card for t in found)}
        wrong = {
            name: f"{found} for {here[name]}"
            for name, found in there.items()
            if not all(torch.allclose(t.cpu(), h, rtol=1e-6) for t, h in zip(found, here[name], strict=True))
        }
        return strays | wrong

    crew.check_all(crew.together(device, num_ranks, work))


@pytest.mark.parametrize("which", crew.BACKENDS)
def test_messages_around_a_ring(device: str, num_ranks: int, which: str) -> None:
    """Messages in `pt.init()`'s own group raised "No backend type associated with device type"."""

    async def around(world: ProcessWorld, tensor: Tensor) -> Tensor:
        port, found = world.port, tensor.clone()
        for _ in range(world.size - 1):
            before, after = (port.rank - 1) % port.size, (port.rank + 1) % port.size
            tensor = await port.send_receive(tensor, to=after, source=before, like=tensor)
            found += tensor
        return found

    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        found = world.drive(around(world, numbers(world.rank).to(card)))
        expected = world.drive(around(world, numbers(world.rank)))
        return {} if found.device == card and torch.equal(found.cpu(), expected) else {"ring": f"{found}"}

    crew.check_all(crew.together(device, num_ranks, work, backend=crew.backend(which, device, num_ranks)))


def test_a_sender_may_overwrite_what_it_has_sent(device: str) -> None:
    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        tensor, got = torch.full((1000,), float(world.rank), device=card), torch.empty(1000, device=card)
        for step in range(20):
            ways = [group().send([tensor], (world.rank + 1) % 3, 1), group().recv([got], (world.rank - 1) % 3, 1)]
            for way in ways:
                way.wait()
            if not bool((got == (world.rank - 1) % 3 + step).all()):
                return {f"step {step}": f"{got[:3]}"}
            tensor += 1
        return {}

    crew.check_all(crew.together(device, 3, work))


THEIRS = {"a device's alone": "{backend}", "gloo's alone": "gloo", "both": "cpu:gloo,{device}:{backend}"}


@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_init_where_a_process_group_exists(device: str, theirs: str, num_ranks: int, tmp_path: Any) -> None:
    """`pt.init` with a device's backend alone raised "No backend type associated with device type cpu"."""
    name = THEIRS[theirs].format(device=device, backend=backend_of(device))

    def serve(rank: int) -> str:
        place = f"file://{tmp_path}/{name.replace(':', '-')}-{num_ranks}"
        dist.init_process_group(name, init_method=place, rank=rank, world_size=num_ranks)
        world = pt.init(quiet=True)
        card = torch.device(device, rank % num_devices())

        async def summed(tensor: Tensor) -> Tensor:
            return await world.port.all_reduce(tensor)

        expected = sum(numbers(r) for r in range(num_ranks))
        for where in ("cpu", card):
            found = world.drive(summed(numbers(rank).to(where)))
            assert found.device == torch.device(where)
            assert torch.allclose(found.cpu(), torch.as_tensor(expected), rtol=1e-6)
        return "the same"

    def one(rank_info: Any) -> str:
        try:
            return serve(rank_info.rank)
        except Exception as error:
            return crew.last_line(error)

    assert launch(one, num_ranks, threads=1) == ["the same"] * num_ranks


def test_the_native_core_refuses_memory_that_it_cannot_read(device: str) -> None:
    """The host read device memory: a segmentation fault."""

    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        shared = group().group
        assert isinstance(shared, Group)
        there, faults = torch.ones(4, device=card), {}
        calls = {
            "all_reduce": lambda: shared.all_reduce(there),
            "reduce_scatter": lambda: shared.reduce_scatter([there, there], there),
            "exchange": lambda: shared.exchange("all_gather", [there], [torch.ones(4), there]),
            "send": lambda: shared.send(there, 1 - world.rank),
            "receive": lambda: shared.receive(there, 1 - world.rank),
        }
        for name, call in calls.items():
            try:
                call()
                faults[name] = "took it"
            except ValueError as error:
                if f"got one on {card}" not in str(error):
                    faults[name] = str(error)
        return faults

    crew.check_all(crew.together(device, 2, work))


@pytest.mark.parametrize("which", crew.BACKENDS)
@pytest.mark.parametrize(
    "schedule", ["gpipe(stages=2, micro_batches=4)", "one_f_one_b(stages=2, micro_batches=4)", "pipedream(stages=2)"]
)
def test_a_stages_last_message_does_not_wait_for_its_next_step(device: str, which: str, schedule: str) -> None:
    """Stage 0 needs the last gradient before it comes to the barrier where stage 1 waits. In a device's batch the
    gradient was held until stage 1 awaited another message."""

    def trained(world: ProcessWorld, where: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1)).to(where)
        x = torch.stack([numbers(sample) / 20 for sample in range(4)]).to(where)
        strategy = pt.parse_strategy(schedule)
        stages = pt.pipeline(net, lambda p: torch.optim.SGD(p, lr=0.1), mse_loss, strategy, sample=x)

        async def meet() -> None:
            await world.port.barrier()

        found = []
        for step in range(3):
            stages.step(x + step / 4, torch.ones(4, 1, device=where))
            found = [parameter.detach().cpu().clone() for parameter in stages.model.parameters()]
            world.drive(meet())
        stages.finish()
        return found

    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        there, here = trained(world, card), trained(world, torch.device("cpu"))
        close = [torch.allclose(t, h, atol=1e-6) for t, h in zip(there, here, strict=True)]
        return {} if all(close) else {schedule: f"{there} instead of {here}"}

    backend = crew.backend(which, device, 2)
    crew.check_all(crew.together(device, 2, work, backend=backend, mesh={"stage": 2}))


# ---------------------------------------------------------------------- waits


def test_a_rank_counts_its_streams_waits(device: str) -> None:
    from polytempo.device import StreamPauses, time_mark

    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        total, pauses, passed_s = torch.ones(3, device=card), StreamPauses(), 0.0
        for _ in range(3):
            begin = time_mark()
            world.drive(reduced(world, total))
            end = time_mark()
            end.synchronize()
            passed_s += pauses.add(begin, end)
        return {} if 0 < world.waited_s <= passed_s else {"waits": f"{world.waited_s} s of {passed_s}"}

    async def reduced(world: ProcessWorld, total: Tensor) -> None:
        await world.port.all_reduce(total)

    crew.check_all(crew.together(device, 2, work))


# ---------------------------------------------------------------------- random numbers


def test_the_generators_of_a_device_are_seeded_and_kept(device: str) -> None:
    from polytempo.device import kept_random_states, random_states, seed_generators, set_random_states

    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        def drawn() -> Tensor:
            return torch.rand(5, device=card).cpu()

        drawn()  # a device that is not in use is left alone
        seed_generators(3)
        states, first, second = random_states(), drawn(), drawn()
        with kept_random_states():
            drawn()
        third = drawn()
        set_random_states(states)
        again = [drawn() for _ in range(3)]
        seed_generators(3)
        same = [torch.equal(a, b) for a, b in zip([first, second, third, first], [*again, drawn()], strict=True)]
        return {} if all(same) else {"draws": str(same)}

    crew.check_all(crew.together(device, 2, work))


# ---------------------------------------------------------------------- other libraries' ways in


def test_ddp_with_a_hook(device: str, num_ranks: int) -> None:
    """The hook knew "cpu" and "cuda" by name."""
    from torch.nn.parallel import DistributedDataParallel

    def trained(rank: int, where: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)).to(where)
        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook(None, pt.interop.comm_hook(pt.compression.feedback(pt.compression.one_bit()), net))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            mse_loss(ddp(numbers(rank + step).to(where)), torch.ones(1, device=where)).backward()
            optimizer.step()
        return [parameter.detach() for parameter in net.parameters()]

    def work(world: ProcessWorld, card: torch.device) -> dict[str, str]:
        there, here = trained(world.rank, card), trained(world.rank, torch.device("cpu"))
        close = [torch.allclose(t.cpu(), h, atol=1e-6) for t, h in zip(there, here, strict=True)]
        return {} if all(close) and all(t.device == card for t in there) else {"parameters": str(close)}

    crew.check_all(crew.together(device, num_ranks, work))
