"""`ModelParts`: a model in parts, for a run: the whole of it, and this rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from polytempo.core import Port
from polytempo.partition.hybrid import HybridModel
from polytempo.partition.tensor.division import Cuts, Division, described
from polytempo.partition.tensor.layers.layer import SplitLayer
from polytempo.partition.tensor.parted_model import PartedModel, joined
from polytempo.training.model.ports import Ports, ports_of
from polytempo.training.pipeline.pipeline_stage import WholeModel
from polytempo.training.step.replica import Replica


class ModelParts:
    """One rank's parts. `names`: the whole model's parameters, in its order."""

    def __init__(self, model: PartedModel, replica: Replica, port: Port, names: Sequence[str]) -> None:
        self.model, self.replica, self._names = model, replica, tuple(names)
        self.cut = model.parts
        self.divisions = self.cut
        self.ports = held_by(model, port)
        """Ranks with the same parts (data), and ranks that hold the parts of one model."""
        self.number = self.place = self.ports.model.rank

    async def whole(self) -> WholeModel:
        """The model on every rank: the mean where ranks that hold the same parts differ. Cost: gathers of all parts."""
        replica, data = self.replica, self.ports.data
        await replica.settle()
        mine = await replica.consensus(data) | dict(self.model.named_buffers())
        return self._named(await joined(self.ports.model, mine | await replica.consensus_buffers(data), self.cut))

    def of_all(self, found: Mapping[int, Mapping[str, Tensor]], cuts: Mapping[int, Cuts]) -> WholeModel:
        """The model of the tensors that each of the parts has, by the parts' numbers, which are all cut alike."""
        first = found[0]
        numbers = range(self.ports.model.size)
        whole = {
            name: self.cut[name].join([found[number][name] for number in numbers]) if name in self.cut else tensor
            for name, tensor in first.items()
        }
        return self._named(whole)

    def _named(self, whole: Mapping[str, Tensor]) -> WholeModel:
        return WholeModel(
            {name: whole[name] for name in self._names},
            {name: whole[name] for name, _ in self.model.named_buffers()},
        )

    def report(self) -> list[dict[str, Any]]:
        """Holders and traffic of each layer in a step; see `Result.layers`."""
        group, passes = self.model.group, max(1, self.model.group.passes)
        found = []
        for name, layer in _layers(self.model):
            parameters = {f"{name}.{each}" if name else each: p for each, p in layer.named_parameters()}
            numbers = sum(_whole_numel(p.numel(), self.cut.get(each), self.number) for each, p in parameters.items())
            cuts = [self.cut[each] for each in parameters if each in self.cut]
            forward, backward = group.sent.get(name, (0.0, 0.0))
            found.append(
                {
                    "layer": name,
                    "kind": type(layer).__name__,
                    "parameters": numbers,
                    "sizes": list(cuts[0].sizes) if cuts else [],
                    "dim": cuts[0].dim if cuts else None,
                    "forward_bytes": forward / passes,
                    "backward_bytes": backward / passes,
                }
            )
        return found

    def described(self) -> str:
        """The cuts and the number of this part, as a checkpoint has them: see `cuts_of`."""
        return described(self.number, self.cut)


def _layers(model: PartedModel) -> list[tuple[str, nn.Module]]:
    """Split layers with all modules inside, and other modules with parameters of their own."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        within = any(isinstance(layer, SplitLayer) and name.startswith(f"{other}.") for other, layer in found)
        own = isinstance(module, SplitLayer) or any(True for _ in module.parameters(recurse=False))
        if own and not within and any(True for _ in module.parameters()):
            found.append((name, module))
    return found


def _whole_numel(numel: int, how: Division | None, number: int) -> int:
    return numel if how is None else numel // how.sizes[number] * sum(how.sizes)


def held_by(model: PartedModel, port: Port) -> Ports:
    """The ranks with the same parts as this rank, and the ranks with the other parts of its model.

    Of divided layers every rank has parts that no other has, and of all else the whole.
    """
    ports = ports_of(port)
    if isinstance(model, HybridModel):
        return Ports(port, ports.data.among([ports.data.rank]), ports.data)
    return ports
