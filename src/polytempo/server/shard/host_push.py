"""The push of a host: the requests of several workers, whose gradients come as one sum. All are taken, or none is.

    Push(worker 0, sum of 3 gradients, parts = requests of workers 1 and 2)
        every request new, no ticket applied ──▶ one entry, one sum; each worker gets its own answer
        worker 1's is known                  ──▶ worker 1 gets that answer, 0 and 2 get `PushAlone` and push alone

Nothing can be taken out of a sum again, so a push is refused as a whole as soon as one part is. Nothing of it is
remembered then; each worker's next message is judged by itself, with the same sequence number.
"""

from __future__ import annotations

from collections.abc import Iterator

from polytempo.core.rule import Service
from polytempo.server.message import Push, PushAlone, PushPart
from polytempo.server.shard.admission import Admission
from polytempo.server.shard.answers import AnswerTable, RequestStatus
from polytempo.server.shard.decisions import Decisions
from polytempo.server.snapshots.state import Waiting
from polytempo.server.tensors.running_statistics import RunningStatistics


def requests_in(push: Push) -> Iterator[Push | PushPart]:
    """The requests of all workers whose gradients are in `push`, that of its sender first."""
    yield push
    yield from push.parts


def status_of_all(shard: int, push: Push, answers: AnswerTable, decisions: Decisions) -> RequestStatus:
    """ "new" if all requests in `push` are new, and none of their tickets is applied; otherwise "split". No change."""
    found = [(request, answers.status_of(request)) for request in requests_in(push)]
    tickets = [ticket for request in requests_in(push) for ticket in request.tickets]
    apart = len({request.worker for request, _ in found}) == len(found) and len(set(tickets)) == len(tickets)
    had = any(ticket in decisions.applied for ticket in tickets)
    if apart and not had and all(status.kind == "new" for _, status in found):
        return found[0][1]
    replies = [
        reply
        for request, status in found
        for reply in (status.replies if status.kind in ("repeated", "stranger") else (split(shard, request),))
    ]
    return RequestStatus("split", tuple(replies))


def split(shard: int, request: Push | PushPart) -> PushAlone:
    """The reply to a request that must come by itself."""
    return PushAlone(shard, request.worker, request.incarnation, request.sequence)


def can_add(push: Push, version: int, service: Service, admission: Admission, running: RunningStatistics) -> bool:
    """Whether the rule takes sums, and no check speaks against this one.

    Where one does, each worker pushes by itself, so that the one that is refused is named.
    """
    if not service.rule.adds_sums or any(not 0 <= part.basis <= version for part in push.parts):
        return False
    faults = (running.fault(request, allow_nan=service.allow_nan) for request in requests_in(push))
    return not any(faults) and not admission.fault(push, version)


def waiting_of(part: PushPart, version: int) -> Waiting:
    """The queue's entry for a part of a push whose sum is being added: its worker waits for the answer alone."""
    return Waiting("push", part.incarnation, part.sequence, part.basis, part.tickets, staleness=version - part.basis)
