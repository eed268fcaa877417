"""One server's part of the model: values, gradients and optimizers of the blocks it owns."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.parameter_server.arena import Arena, Extent, bytes_of, dtype_of
from fleet.transpiler.lowering import PlannedBlock, ServerPlan
from fleet.update import DenseUpdate, average_in_order, sum_of_squares
from fleet.wire import HyperParameters

__all__ = ["Shard"]


class Shard:
    """The blocks of one server in flat arenas.

    Values lie in one arena and gradients in one per trainer, so that no trainer's bytes wait for
    another's. The means of gradients that are clipped by a norm lie in an arena of their own: a trainer
    that comes back may send its gradients again while the norm is not known yet. Calls about different
    blocks may come at the same time.

    Parameters
    ----------
    plan : ServerPlan
        What the server owns.
    parameters : mapping of name to Tensor
        The module that this process built; the blocks' initial values are cut from it.
    """

    def __init__(self, plan: ServerPlan, parameters: Mapping[str, Tensor]) -> None:
        self.plan = plan
        self.blocks: Mapping[int, PlannedBlock] = {block.id: block for block in plan.blocks}
        extents = {block.id: Extent(dtype_of(block.dtype), block.shape) for block in plan.blocks}
        self._extents = extents
        self._values = Arena(extents)
        self._gradients = [Arena(extents) for _ in range(plan.trainers)]
        self._means = Arena({block: extents[block] for norm in plan.norms for block in norm.blocks})
        self._ranges = plan.ranges
        self._updates = {}
        for block in plan.blocks:
            value = self._values[block.id]
            value.copy_(
                parameters[block.param].detach().reshape(-1)[block.begin : block.end].view(block.shape)
            )
            group = plan.groups.get(block.group)
            if group is not None:  # in GEO the trainers have optimizers, and the servers none
                self._updates[block.id] = DenseUpdate(group.optimizer_class, value, group.hyper_parameters)
        self._value_bytes = {number: bytes_of(self._values[number]) for number in self.blocks}
        self._gradient_bytes = [
            {number: bytes_of(arena[number]) for number in self.blocks} for arena in self._gradients
        ]
        self.initial_checksums = {number: zlib.crc32(value) for number, value in self._value_bytes.items()}

    @property
    def block_bytes(self) -> Mapping[int, int]:
        """Bytes of each block's tensor."""
        return {number: len(value) for number, value in self._value_bytes.items()}

    def value(self, block: int) -> Tensor:
        """Return a block's value, not a copy."""
        return self._values[block]

    def gradient(self, trainer: int, block: int) -> Tensor:
        """Return what a trainer has sent for a block last, not a copy."""
        return self._gradients[trainer][block]

    def copy_values(self) -> Arena[int]:
        """Return a copy of all values, by block."""
        copies = Arena(self._extents)
        for block in self.blocks:
            copies[block].copy_(self._values[block])
        return copies

    def value_bytes(self, block: int) -> memoryview:
        """Return the bytes of a block's value."""
        return self._value_bytes[block]

    def gradient_bytes(self, trainer: int, block: int) -> memoryview:
        """Return where a trainer's gradient of a block lands."""
        return self._gradient_bytes[trainer][block]

    def apply(
        self, block: int, trainers: Sequence[int], divisor: int, hyper_parameters: HyperParameters
    ) -> None:
        """Step a block.

        Parameters
        ----------
        block : int
        trainers : sequence of int
            Whose gradients have landed, in ascending order; at least one.
        divisor : int
            What the sum of the gradients is divided by.
        hyper_parameters : tuple of mappings
            Those of the step, by param group.
        """
        options = self._options(block, hyper_parameters)
        gradients = [self._gradients[trainer][block] for trainer in trainers]
        mean = average_in_order(gradients, divisor)
        if block in self._ranges:
            mean.clamp_(*self._ranges[block])
        self._updates[block].apply(mean, options)

    def average(
        self, block: int, trainers: Sequence[int], divisor: int, hyper_parameters: HyperParameters
    ) -> float:
        """Put a block's mean gradient aside, for `apply_clipped`, and return its sum of squares.

        Parameters
        ----------
        block, trainers, divisor, hyper_parameters
            As of `apply`; the gradients are not modified.
        """
        self._options(block, hyper_parameters)
        mean = self._means[block].copy_(self._gradients[trainers[0]][block])
        rest = [self._gradients[trainer][block] for trainer in trainers[1:]]
        return sum_of_squares(average_in_order([mean, *rest], divisor))

    def apply_clipped(self, block: int, coefficient: float, hyper_parameters: HyperParameters) -> None:
        """Step a block by its mean gradient times a factor; see `average`."""
        options = self._options(block, hyper_parameters)
        self._updates[block].apply(self._means[block].mul_(coefficient), options)

    def _options(self, block: int, hyper_parameters: HyperParameters) -> Mapping[str, Any]:
        group = self.blocks[block].group
        if group >= len(hyper_parameters):
            raise ConfigurationError(
                f"block {self.blocks[block].name} belongs to param group {group}, but the trainer's "
                f"optimizer has {len(hyper_parameters)} groups; build the optimizer alike in every role"
            )
        return hyper_parameters[group]

    def state(self) -> Iterator[tuple[int, str, Any]]:
        """Iterate over the optimizers' state: block, name of the entry, tensor or number."""
        for number in sorted(self._updates):
            for name, value in self._updates[number].state().items():
                yield number, name, value
