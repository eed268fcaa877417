"""GradAllReduce: average the gradients of all trainers while the backward pass still runs.

torch's reducer does it, in buckets that leave as soon as they are full. It wants a gradient of every
parameter in every pass; what a pass did not reach is given as zeros when it ends, and with it the notes that
travel beside the gradients (`fleet.collective.notes`). A parameter that some trainers did not use counts
there as zeros; one that nobody used keeps no gradient, as in one process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from fleet.checkpoint import GradientOrder
from fleet.collective.backward import BackwardPass
from fleet.collective.buckets import NOTES, Buckets, Compression
from fleet.collective.copies import Copies
from fleet.collective.own_gradients import OwnGradients
from fleet.collective.reducer import BUCKET_BYTES
from fleet.collective.steps import Steps
from fleet.collective.synchronizer import Synchronizer
from fleet.errors import ConfigurationError, FleetError
from fleet.process import progress

__all__ = ["GradientAverager"]


@dataclass(frozen=True)
class _Ending:
    """A pass whose last gradients are being given: the parameters without one, and those frozen since."""

    absent: list[int]
    thawed: list[torch.Tensor]


class GradientAverager(Synchronizer):
    """Averages the gradients of an optimizer's parameters in every backward pass; see `Synchronizer`.

    Parameters
    ----------
    copies : Copies
    backward : BackwardPass
        One for all optimizers.
    bucket_bytes, compression, remembers
        As of `Buckets`.
    """

    def __init__(
        self,
        copies: Copies,
        backward: BackwardPass,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        compression: Compression | None = None,
        remembers: bool = False,
    ) -> None:
        super().__init__(Steps(copies.group))
        self._copies = copies
        self._group = copies.group
        self._named = copies.trained
        self._backward = backward
        self._parameters = [parameter for _, parameter in self._named]
        self._buckets = Buckets(
            copies.group,
            self._parameters,
            bucket_bytes=bucket_bytes,
            compression=compression,
            remembers=remembers,
        )
        self._arrived: dict[int, None] = {}
        """The parameters whose gradients are there, in their order."""
        self._unseen = set(range(len(self._parameters)))
        """The parameters of which there was no gradient in any pass."""
        self._ending: _Ending | None = None
        self._own = OwnGradients(self._named)
        self._hooks: list[Any] = []

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self._named[0][1].device

    def start(self) -> None:
        """See `Synchronizer`."""
        self._backward.add(self)
        self._buckets.connect()
        for position, parameter in enumerate(self._parameters):
            hook = parameter.register_post_accumulate_grad_hook(partial(self.on_gradient, position))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def close(self) -> None:
        """Remove the hooks; see `Synchronizer`."""
        while self._hooks:
            self._hooks.pop().remove()
        self._buckets.let_go()

    @property
    def order(self) -> GradientOrder | None:
        """See `Synchronizer`."""
        order, unused = self._buckets.order, self._buckets.once_unused
        if order is None:
            return None
        names = [None if position == NOTES else self._named[position][0] for position in order]
        return GradientOrder(tuple(names), tuple(self._named[position][0] for position in unused))

    def resume(self, order: GradientOrder) -> None:
        """See `Synchronizer`."""
        positions: dict[str | None, int] = {name: position for position, (name, _) in enumerate(self._named)}
        positions[None] = NOTES
        if sorted(positions, key=str) != sorted(order.names, key=str):  # other parameters are frozen here
            return
        self._ending = _Ending([], [])
        self._buckets.resume(
            [positions[name] for name in order.names], [positions[name] for name in order.once_unused]
        )
        self._ending = None
        self._arrived.clear()

    def check_ended(self) -> None:
        """See `Synchronizer`."""
        self._backward.check_ended()

    def check_averaged(self) -> None:
        """See `Synchronizer`."""
        if self._group.place.size > 1:
            self._own.check()

    def on_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note a step; the next exchange tells it. See `Synchronizer`."""
        if not self._named:  # all are sharded, and there is no exchange that counts
            self.steps.number += 1
        if self._own.step():
            self.steps.note(groups)

    def on_gradient(self, position: int, parameter: torch.Tensor) -> None:
        """Take note of a parameter's gradient before torch's reducer does, and of one that is left undefined.

        Raises
        ------
        ConfigurationError
            It is none that can be averaged.
        FleetError
            There was one in this pass already, or an error ended the pass before.
        """
        if self._paused:
            self._own.accumulate(position)
            return
        if self._ending is None:  # else it is one of those that are given
            if not self._arrived or position in self._arrived:
                self._begin(position)
            if position in self._unseen:  # only then: to look at a gradient takes longer than all of this
                self._check_layout(position, parameter.grad)
                self._unseen.discard(position)
        self._arrived[position] = None

    def on_backward_end(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what this trainer has still to give; see `Reached`."""
        notes = self._buckets.notes
        absent = [position for position, each in enumerate(self._parameters) if each.grad is None]
        missing = [each for position, each in enumerate(self._parameters) if position not in self._arrived]
        thawed = [each for each in missing if not each.requires_grad]  # frozen since the buckets were made
        for parameter in thawed:
            parameter.requires_grad_(True)
        self._ending = _Ending(absent, thawed)
        if self._buckets.order is None:  # the notes are in it, too
            notes.leaf.register_post_accumulate_grad_hook(lambda _: self._arrived.setdefault(NOTES))  # type: ignore[no-untyped-call]
        zeros = [(each, torch.zeros_like(each)) for each in missing]
        return [*zeros, (notes.leaf, notes.gradient(absent, self.steps.digest ^ self._copies.digest))]

    def collect(self) -> None:
        """Hand the averages back; see `Reached`."""
        notes = self._buckets.notes
        ending, self._ending = cast("_Ending", self._ending), None
        for parameter in ending.thawed:
            parameter.requires_grad_(False)
        if not notes.all_alike():
            self.steps.compare(f"steps (at the average of step {self.steps.number}'s gradients)")
            self._copies.compare_buffers()
        unused = notes.nobodys(ending.absent)
        self._buckets.end(self._arrived, unused)
        self._arrived.clear()
        averages = self._buckets.averages()
        for parameter, average in zip(self._parameters, averages, strict=True):
            parameter.grad = average
        for position in unused:
            self._parameters[position].grad = None
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._own.average(averages, unused, captured=captured)
        progress.count("bytes_reduced", self._buckets.num_bytes)
        self._copies.share_buffers()
        self.steps.number += 1

    def _begin(self, position: int) -> None:
        """Begin an exchange, with the first gradient of a pass; a model may have moved since the last."""
        self._backward.check_ended()
        if position in self._arrived:
            raise FleetError(
                f"the gradient of {self._named[position][0]} arrived twice in one backward pass (reentrant "
                "checkpointing does that); expected once: pass use_reentrant=False to torch.utils.checkpoint"
            )
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "backward(create_graph=True) gives gradients that have gradients of their own, which an "
                "average over trainers has not; expected torch.autograd.grad(..., create_graph=True) for "
                "what the loss is made of, and loss.backward()"
            )
        self._backward.reach(self)
        self._buckets.begin()

    def _check_layout(self, position: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"the gradient of {self._named[position][0]} is {gradient.layout}; expected a dense one: "
                "build its torch.nn.Embedding with sparse=False"
            )
