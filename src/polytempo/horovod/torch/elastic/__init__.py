"""Horovod's elastic training: `@hvd.elastic.run`, states that go back to their last commit, and a sampler."""

from polytempo.horovod.runtime.operation import HorovodInternalError
from polytempo.horovod.torch.elastic.sampler import ElasticSampler
from polytempo.horovod.torch.elastic.state import HostsUpdatedInterrupt, ObjectState, State, run
from polytempo.horovod.torch.elastic.torch_state import TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
