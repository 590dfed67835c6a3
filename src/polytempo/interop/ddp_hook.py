"""`comm_hook`: a codec, or any transform of gradients, inside torch's own DistributedDataParallel.

backward ──▶ bucket full ──▶ hook ──▶ queue ──▶ one thread: encode, exchange, decode ──▶ future ──▶ DDP writes .grad
   │                                                                                       ▲
   └── next bucket …                                             end of backward waits ────┘

Where one all-reduce is all there is, nothing has to be put in order, and no thread to be woken:

backward ──▶ bucket full ──▶ hook: encode, begin the all-reduce in DDP's group ──▶ its end: decode ──▶ future
"""

from __future__ import annotations

import inspect
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore, _DistributedBackendOptions
from torch.distributed import distributed_c10d
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from polytempo.compression import through
from polytempo.compression.exchange.packing import EXACT_BELOW
from polytempo.compression.exchange.wire_route import WireRoute
from polytempo.core import Bundle, Codec, Port, Program, Promise, Route, Strategy, Transform, native
from polytempo.core.arithmetic.merge import Merge
from polytempo.core.codec import check_codec
from polytempo.device import HOST, current_stream
from polytempo.interop.backend.create import create
from polytempo.interop.codec_state import ParameterCodecState
from polytempo.native.meeting import host_identity
from polytempo.training.checkpoint.background import Background
from polytempo.worlds import ProcessWorld
from polytempo.worlds.process.transport import group_timeout_s


class _Exchange:
    """A bucket's exchange in the background: a future for DDP, and its error for the end of backward."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._over = threading.Event()
        self._answer: Tensor | None = None
        self._error: BaseException | None = None
        self._first: Future[None] = Future()
        self.future: Future[Any] = self._first.then(self._outcome)  # an error in `then` is one for C++, too

    def perform(self, work: Callable[[], Tensor]) -> BaseException | None:
        """Let `work` answer; the error, if it failed."""
        try:
            self.end(work(), None)
        except BaseException as error:
            error.add_note(f"while DDP exchanged the gradients of {', '.join(self._names)}")
            let_go(error)  # before a caller has it, because we do not own its frames
            self.end(None, error)
        return self._error

    def end(self, answer: Tensor | None, error: BaseException | None) -> None:
        """Tell the threads that wait."""
        self._answer, self._error = answer, error
        self._over.set()
        self._first.set_result(None)

    def wait(self) -> None:
        """Wait until it is over; raises the exchange's error. The transport's deadlines bound it."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def _outcome(self, _: Any) -> Tensor:
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer


class _Meeting:
    """The ranks that the hook exchanges with, on one kind of device.

    On the CPU a thread has a transport of its own: DDP issues collectives in its group while the thread does, and both
    would be in another order on every rank. `one_sum`: an exchange is one all-reduce, which needs neither.
    """

    def __init__(self, group: Any, device: torch.device, one_sum: bool) -> None:
        self.given, self.kind = weakref.ref(group), device.type
        self.stream = None if device.type == HOST.type else torch.Stream(device=device)
        self.failed: BaseException | None = None
        self.thread: Background | None = None
        self._own = [transport_like(group)] if device.type == HOST.type and not one_sum else []
        # gloo's own thread drops an exchange last. Had it the group's last reference, the group would wait for itself.
        shared = group if self.stream is not None else weakref.proxy(group)
        self.world = ProcessWorld(dist.get_rank(group), hosts_of(group), group=[*self._own, shared][0])
        if self._own:
            self.thread = Background("polytempo-comm-hook", partial(leave, self._own, self.world))

    def begin(self, exchange: _Exchange, program: Program[Tensor]) -> None:
        """Run up to the all-reduce; the transport's own thread does the rest when that is over."""
        with torch.no_grad():
            strand = self.world.launch(program)
        pending: Any = strand.waits_for
        if pending is None:  # it went wrong, or there is no other rank
            self.perform(exchange, strand.wait)
            return

        def ended(future: Future[Any]) -> None:
            if not pending.work.is_completed():  # gloo's is only after this, and would wait for this thread
                pending.work = future
            with torch.no_grad():
                self.perform(exchange, strand.wait)

        pending.work.get_future().then(ended)

    def perform(self, exchange: _Exchange, work: Callable[[], Tensor]) -> None:
        """The thread's work for a bucket. A rank that fails leaves, so that the others do not wait for it."""
        if self.failed is not None:
            exchange.end(None, self.failed)
            return
        self.failed = exchange.perform(work)
        if self.failed is not None:
            leave(self._own, self.world)


class CommHook:
    """See `comm_hook`."""

    def __init__(
        self, transform: Transform, name: str, model: nn.Module | None, group: Any, one_sum: bool = False
    ) -> None:
        self.__name__ = self.__qualname__ = f"comm_hook({name})"
        self.__signature__ = inspect.signature(lambda state, bucket: None)  # DDP looks, and wants no text in it
        self._name, self._group, self._one_sum = name, group, one_sum
        self._carried = ParameterCodecState(transform)
        self._named = WeakTensorKeyDictionary()
        self._num_named = 0
        self._has_model = model is not None
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        for parameter_name, parameter in () if plain is None else plain.named_parameters():
            self._named[parameter] = parameter_name
        self._meeting: _Meeting | None = None
        self._last: _Exchange | None = None
        self._step = 0

    def __call__(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """The function that DDP calls when a bucket is full: a future of the mean gradients, flat like the bucket's
        buffer."""
        buffer = bucket.buffer()
        meeting = self._met(state, buffer)
        gradients = dict(zip(self._names(bucket.parameters()), bucket.gradients(), strict=True))
        self._step += bucket.index() == 0
        work = partial(_exchanged, self._carried, meeting.world, self._step, buffer, gradients)
        if meeting.stream is not None:
            return _at_once(meeting, buffer, work)
        exchange = self._last = _Exchange(list(gradients))
        if meeting.thread is None:
            meeting.world.step = self._step
            meeting.begin(exchange, _mean(self._carried, meeting.world.port, buffer, gradients))
        else:
            meeting.thread.do(partial(meeting.perform, exchange, work))
        if torch._C._current_graph_task_id() >= 0:  # DDP's own end of backward comes later, and knows errors as text
            torch.autograd.Variable._execution_engine.queue_callback(exchange.wait)
        return exchange.future

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank carries from step to step, by parameter: save it on every rank, next to the model.

        All ranks must call it, between two steps, because exchanges that are under way are finished first.
        """
        if self._last is not None:
            self._last.wait()
        if self._meeting is not None:
            self._meeting.world.drive(self._carried.settle())
            if self._meeting.stream is not None:
                self._meeting.stream.synchronize()
        return {"hook": self._name, "step": self._step, **self._carried.save()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the value of `state_dict` on this rank, of as many ranks.

        Raises ValueError for another codec's state; names that do not match are found at the next backward.
        """
        if state.get("hook") != self._name:
            saved = f"was saved by comm_hook({state['hook']})" if "hook" in state else "is not a comm_hook's"
            raise ValueError(
                f"the state {saved}, but this is comm_hook({self._name}); make the hook that saved it, or begin "
                "without its state"
            )
        if self._last is not None:
            self._last.wait()
        self._carried.load(state)
        self._step = state["step"]

    def _names(self, parameters: Sequence[Tensor]) -> list[str]:
        """The parameters' names, or the numbers of their first arrival."""
        names = []
        for parameter in parameters:
            name = self._named.get(parameter)
            if name is None:
                if self._has_model:
                    raise ValueError(
                        f"DDP has a parameter of shape {list(parameter.shape)} that the model given to comm_hook has "
                        "not; give it the model that DDP wraps"
                    )
                name = self._named[parameter] = f"parameter {self._num_named}"
                self._num_named += 1
            names.append(name)
        return names

    def _met(self, state: Any, buffer: Tensor) -> _Meeting:
        if state is not None and not isinstance(state, dist.ProcessGroup):
            raise TypeError(
                f"register_comm_hook(state, hook): state must be None or a process group, got {type(state).__name__}"
            )
        if buffer.layout != torch.strided or buffer.is_meta:
            raise ValueError(
                f"gradients must be dense, on the CPU or a device, got {buffer.layout} on {buffer.device}; use "
                "Embedding(sparse=False), or pt.attach, which takes sparse ones"
            )
        group = state or self._group or dist.group.WORLD
        if self._meeting is None:
            self._meeting = _Meeting(group, buffer.device, self._one_sum)
        meeting = self._meeting
        if meeting.failed is not None:
            raise meeting.failed
        if meeting.given() is not group or meeting.kind != buffer.device.type:
            raise ValueError("a hook serves one DistributedDataParallel; make another with comm_hook(…) for the next")
        return meeting


def _exchanged(
    carried: ParameterCodecState, world: ProcessWorld, step: int, buffer: Tensor, gradients: dict[str, Tensor]
) -> Tensor:
    """The mean of all ranks' gradients, in memory like the bucket's."""
    world.step = step
    with torch.no_grad():
        return world.drive(_mean(carried, world.port, buffer, gradients))


async def _mean(carried: ParameterCodecState, port: Port, buffer: Tensor, gradients: dict[str, Tensor]) -> Tensor:
    # Gradients of other memory formats (channels_last) keep their layout in the bucket: a codec sees rows.
    as_they_lie = all(gradient.is_contiguous() for gradient in gradients.values())
    answer = await carried.apply(port, Bundle(gradients, flat=buffer if as_they_lie else None))
    if answer is None:
        raise ValueError("the transform leaves out a step, which DDP cannot; use pt.attach, or update on every step")
    if as_they_lie:
        return answer.flat
    for gradient, view in zip(gradients.values(), answer.views.values(), strict=True):
        gradient.copy_(view)
    return buffer


def _at_once(meeting: _Meeting, buffer: Tensor, work: Callable[[], Tensor]) -> Future[Tensor]:
    """Issue the exchange on a stream of its own, behind the operations that have filled the bucket.

    Nothing here waits for the device unless the codec does (a check for NaN reads a number). The future notes the
    stream, and DDP, which waits for it, lets its own stream wait; the buffer's memory is kept until both are through.
    """
    assert meeting.stream is not None
    future: Future[Tensor] = Future(devices=[buffer.device])
    meeting.stream.wait_stream(current_stream(buffer.device))
    buffer.record_stream(meeting.stream)
    with meeting.stream:
        try:
            future.set_result(work())
        except Exception as error:
            meeting.failed = error
            raise
    return future


def comm_hook(
    codec: Codec | Transform,
    model: nn.Module | None = None,
    *,
    merge: Merge | None = None,
    route: Route | WireRoute | None = None,
    exact_below: int = EXACT_BELOW,
    group: Any = None,
) -> CommHook:
    """A communication hook for torch's DistributedDataParallel that exchanges gradients by a codec.

        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook(None, pt.interop.comm_hook(pt.compression.feedback(pt.compression.one_bit()), net))

    `codec`, `merge`, `route` and `exact_below` are as in `compression.through`. A transform of gradients may take the
    codec's place: `pt.aggregation.low_rank(2)` makes PowerSGD of it. `.grad` is the transform's answer: the mean over
    the ranks (each counts the same), unless a merge says otherwise. A merge that looks at whole vectors sees buckets.

    `model`: the wrapped module, for parameters' names in errors and saved states. Without it they have numbers in their
    first order, as given by the sizes of DDP's first buckets: they are the same in every run with the same model and
    `bucket_cap_mb`. `group` (or the `state` of register_comm_hook): the process group that DDP was given, the default
    one where it was given none. One hook serves one DDP; all its parameters must be dense.

    State belongs to parameters, so it survives that DDP cuts other buckets after the first step. `hook.state_dict()`
    and `hook.load_state_dict()` save it; each rank keeps its own. A new DDP object begins with its first buckets
    again: with `route=all_gather`, where nothing depends on buckets, a run that goes on makes the same steps to the
    bit, and otherwise steps as good (codes of other stripes, sums in another order).

    On the CPU (gloo, "polytempo") exchanges run in one thread in the order of buckets, in a process group of their own,
    while backward goes on; its end waits for them. Casts and `exact()` without a route are one all-reduce in DDP's own
    group, written back over the bucket: no thread, and no memory but the wire's. On CUDA (NCCL: collectives alone,
    unless `route` sends messages) exchanges are issued on one stream beside backward's. Memory: the transform's, and an
    answer of a bucket's size.

    Errors come out of `backward()`: `NotFinite` names parameter, element and rank, `PeerLost` and `TimedOut` the rank,
    the step and the operation. The hook is of no use afterwards: its ranks leave, and the others raise `PeerLost` (in
    DDP's own group and on CUDA only when a process has ended, or after the group's timeout).
    Raises ValueError for arguments that `through` refuses and for a transform that needs the whole gradient together.
    """
    if not (model is None or isinstance(model, nn.Module)):
        raise TypeError(f"model is the module that DDP wraps, or left out, got {model!r}")
    if isinstance(codec, Transform):
        if merge is not None or route is not None or exact_below != EXACT_BELOW:
            raise ValueError("a transform says itself how it exchanges; merge, route and exact_below are for codecs")
        if Promise.SEPARABLE not in codec.promises:
            raise ValueError("the transform needs the whole gradient, and DDP has buckets; use pt.attach")
        return CommHook(codec, "a transform", model, group)
    if isinstance(codec, Strategy):
        raise TypeError(
            f"comm_hook takes the answer of one of pt.compression, as bf16(), or a transform as "
            f"pt.aggregation.low_rank(2), got the strategy {codec}; strategies go with pt.attach"
        )
    check_codec(codec)
    transform = through(codec, merge, route, exact_below=exact_below)
    one_sum = codec.facts.elementwise and merge is None and route in (None, native)
    return CommHook(transform, _spelled(codec, merge, route), model, group, one_sum)


def _spelled(codec: Codec, merge: Merge | None, route: Route | WireRoute | None) -> str:
    parts = {"merge": merge, "route": route}
    given = [f"{name}={getattr(part, '__name__', part)}" for name, part in parts.items() if part is not None]
    return ", ".join([codec.facts.name, *given])


def transport_like(group: Any) -> Any:
    """One for CPU tensors, with the same ranks and deadline: shared memory where `group` has it, gloo otherwise.

    All ranks of `group` call it, in the same order where they do so several times.
    """
    rank, size, timeout = dist.get_rank(group), dist.get_world_size(group), timedelta(seconds=group_timeout_s(group))
    store = distributed_c10d._get_process_group_store(group)
    number = store.add(f"polytempo/transports/{rank}", 1)
    place = PrefixStore(f"polytempo/transport/{number}", store)
    if "cpu:polytempo" not in dist.get_backend_config(group).split(","):
        own: Any = dist.ProcessGroupGloo(place, rank, size, timeout)
    else:
        options = _DistributedBackendOptions()
        options.store, options.group_rank, options.group_size, options.timeout = place, rank, size, timeout
        options.global_ranks_in_group = dist.get_process_group_ranks(group)
        own = create(options)
    own.barrier().wait()  # gloo may be in either: a rank that left while another still connects would be an error there
    return own


def leave(own: list[Any], world: ProcessWorld) -> None:
    """End `world` and its transport, the only thing in `own`. Ranks that still wait for this one raise `PeerLost`.

    gloo closes its connections when no reference to it is left; so a rank that leaves holds it in a list, and calls
    `let_go` before where something has failed.
    """
    world.forget_groups()
    while own:
        own.pop().abort()


def let_go(error: BaseException) -> None:
    """Clear the frames of `error` and of its causes; frames that still run stay as they are.

    A traceback keeps its frames' variables. Among them is the work that failed, and gloo's work holds its connections:
    as long as the error is referenced, ranks that wait for this one would wait on.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def hosts_of(group: Any) -> list[int]:
    """The host of every rank: the first rank on it. All ranks of `group` call it."""
    store = PrefixStore("polytempo/hosts", distributed_c10d._get_process_group_store(group))
    store.set(str(dist.get_rank(group)), host_identity())
    identities = [store.get(str(rank)) for rank in range(dist.get_world_size(group))]
    return [identities.index(identity) for identity in identities]
