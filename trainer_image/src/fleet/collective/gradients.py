"""GradAllReduce: averages the gradients of all trainers while the backward pass is running.

torch's reducer averages them, in buckets that are sent as soon as they are full. The reducer needs a gradient
of every parameter in every pass. When autograd has finished, a second, small pass supplies zeros for the
parameters that were not reached, and the flags (`fleet.collective.reducer.Flags`). If only some trainers used
a parameter, the others contribute zeros to its average. A parameter that no trainer used keeps no gradient,
as in one process.

All optimizers share that second pass. The optimizer whose gradients are last in a pass may differ between
trainers, so every optimizer's last gradients must be sent before the trainer waits for any average. Otherwise
two trainers could wait for each other.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from fleet.checkpoint import GradientOrder
from fleet.collective.copies import Copies
from fleet.collective.devices import is_capturing
from fleet.collective.group import Group
from fleet.collective.heartbeats import WaitKind
from fleet.collective.reducer import BUCKET_BYTES, FLAGS, Compression, Reducer
from fleet.collective.steps import Steps
from fleet.collective.synchronizer import PassEnd, Synchronizer, refuse_reentrant
from fleet.errors import ConfigurationError, FleetError
from fleet.process import progress

if TYPE_CHECKING:
    import weakref

__all__ = ["AverageCheck", "BackwardPass", "GradientAverager"]


class BackwardPass:
    """The current backward pass, which completes the exchange of every optimizer whose parameters it reaches.

    Parameters
    ----------
    group : Group
        The trainers' group, which reports the trainers that delay the averages.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._averagers: list[GradientAverager] = []
        self._reached: list[GradientAverager] = []
        self._end: weakref.ref[PassEnd] | None = None

    def add(self, averager: "GradientAverager") -> None:
        """Add an optimizer's averager; all trainers must add averagers in the same order."""
        self._averagers.append(averager)

    def reach(self, averager: "GradientAverager") -> None:
        """Register an averager at its first gradient, to complete its exchange at the end of this pass.

        Raises
        ------
        ConfigurationError
            The gradient came from a nested pass, which would end too early.
        """
        if not self._reached:
            refuse_reentrant()
            self._end = PassEnd.queue(self._finish)
        self._reached.append(averager)

    def check_ended(self) -> None:
        """Check that the previous backward pass, if any, ended without an error.

        Raises
        ------
        FleetError
            An error ended the pass, and the script has caught the error.
        """
        # The engine drops its callbacks when a pass fails. After a pass without an error, `_finish` has
        # cleared `_end`.
        if self._end is not None and self._end() is None:
            step = self._reached[0].steps.number
            raise FleetError(
                f"the backward pass of step {step} was ended by an error, and the other trainers wait for "
                "its remaining gradients; expected the script to end with that error"
            )

    def _finish(self) -> None:
        """Pass the remaining gradients to the reducers, and assign the averages to the parameters."""
        # Trainers may have reached the optimizers in different orders, but `hand_back` makes calls of all
        # trainers, whose order must be the same.
        reached = sorted(self._reached, key=self._averagers.index)
        remaining = [pair for each in reached for pair in each.remaining_gradients()]
        what = f"the average of step {reached[0].steps.number}'s gradients"
        began = time.monotonic()
        with self._group.waiting(what, WaitKind.EXCHANGE, reached[0].device):
            # The reducers' hooks send these gradients, and wait for the averages at the end of this pass.
            torch.autograd.backward([leaf for leaf, _ in remaining], [given for _, given in remaining])
        progress.count("wait_seconds", time.monotonic() - began)
        self._end = None
        self._reached = []
        for each in reached:
            each.hand_back()


class AverageCheck:
    """Checks that steps use only averaged gradients; local gradients would make the copies diverge.

    Parameters
    ----------
    named : sequence of (str, Tensor)
        The parameters.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._named = named
        self._all = frozenset(range(len(named)))
        self._own = set(self._all)
        """The parameters whose gradients may be local to this trainer."""
        self._addresses: dict[int, int] = {}
        """The memory address of each parameter's latest average."""
        self._accumulated = False
        self._captured = False

    def accumulate(self, position: int) -> None:
        """Record that a parameter accumulated a local gradient, which a later pass will average."""
        self._accumulated = True
        gradient = self._named[position][1].grad
        # Autograd has added to the average in place, so its address no longer shows that it is an average.
        if gradient is not None and gradient.data_ptr() == self._addresses.get(position):
            del self._addresses[position]
            self._own.add(position)

    def average(
        self, averages: Sequence[torch.Tensor], unused: Collection[int] = (), *, captured: bool
    ) -> None:
        """Record the averages of all parameters except the unused ones.

        After a captured pass nothing can be checked, because replays of the graph compute new averages
        without running Python.
        """
        self._captured |= captured
        self._accumulated = False
        self._addresses = dict(enumerate(map(torch.Tensor.data_ptr, averages)))
        for position in unused:
            del self._addresses[position]
        self._own.intersection_update(unused)

    def step(self) -> bool:
        """Record a step; return whether it may have changed a parameter."""
        if self._own == self._all and all(each.grad is None for _, each in self._named):
            return False
        self._own = set(self._all)
        return True

    def check(self) -> None:
        """Check that the gradients of the next step are the same on all trainers.

        The averages of the previous step may be reused, and zeros are the same on every trainer.

        Raises
        ------
        ConfigurationError
            A gradient was not averaged; the message names it, and explains how to average it.
        """
        if self._captured:
            return
        for position in sorted(self._own):
            name, parameter = self._named[position]
            gradient = parameter.grad
            if gradient is None:
                continue
            is_dense = gradient.layout is torch.strided
            if is_dense and (gradient.data_ptr() == self._addresses.get(position) or not gradient.any()):
                continue
            found = (
                f"the gradient of {name} is local to this trainer, and a step on it would make this copy of "
                "the model differ"
            )
            if self._accumulated:
                raise ConfigurationError(
                    f"{found}: the last backward passes that reached it were in no_sync(); expected the last "
                    "pass before optimizer.step() to be outside of it"
                )
            raise ConfigurationError(
                f"{found}: only backward() averages gradients over the trainers, and this one does not come "
                "from it; expected loss.backward(), or, for gradients that the script has computed itself, "
                "torch.autograd.backward(parameters, gradients)"
            )


@dataclass(frozen=True)
class _Ending:
    """The state of a pass that is ending: parameters without a gradient, and temporarily unfrozen ones."""

    absent: list[int]
    thawed: list[torch.Tensor]


class GradientAverager(Synchronizer):
    """Averages the gradients of an optimizer's parameters in every backward pass; see `Synchronizer`.

    Parameters
    ----------
    copies : Copies
    backward : BackwardPass
        One for all optimizers.
    bucket_bytes, compression, stateful
        See `Reducer`.
    """

    def __init__(
        self,
        copies: Copies,
        backward: BackwardPass,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        compression: Compression | None = None,
        stateful: bool = False,
    ) -> None:
        super().__init__(Steps(copies.group))
        self._copies = copies
        self._group = copies.group
        self._named = copies.trained
        self._backward = backward
        self._parameters = [parameter for _, parameter in self._named]
        self._reducer = Reducer(
            copies.group,
            self._parameters,
            bucket_bytes=bucket_bytes,
            compression=compression,
            stateful=stateful,
        )
        self._arrived: dict[int, None] = {}
        """The parameters whose gradients have arrived in this pass, in order of arrival."""
        self._unseen = set(range(len(self._parameters)))
        """The parameters that have had no gradient in any pass."""
        self._ending: _Ending | None = None
        self._check = AverageCheck(self._named)
        self._hooks: list[Any] = []

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return self._parameters[0].device

    def start(self) -> None:
        """Connect, and add hooks to the parameters; see `Synchronizer`."""
        self._backward.add(self)
        self._reducer.connect()
        # torch calls this hook inside AccumulateGrad and the reducer's hook after it, so `_begin` can still
        # prepare the reducer for the gradient that called it.
        for position, parameter in enumerate(self._parameters):
            hook = parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, position))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def close(self) -> None:
        """Remove the hooks; see `Synchronizer`."""
        while self._hooks:
            self._hooks.pop().remove()
        self._reducer.release()

    @property
    def order(self) -> GradientOrder | None:
        """The order in which gradients are sent, with None in place of the flags; see `Synchronizer`."""
        order, unused = self._reducer.order, self._reducer.once_unused
        if order is None:
            return None
        names = [None if position == FLAGS else self._named[position][0] for position in order]
        return GradientOrder(tuple(names), tuple(self._named[position][0] for position in unused))

    def resume(self, order: GradientOrder) -> None:
        """Use the order stored in a checkpoint; see `Synchronizer`."""
        positions: dict[str | None, int] = {name: position for position, (name, _) in enumerate(self._named)}
        positions[None] = FLAGS
        if sorted(positions, key=str) != sorted(order.names, key=str):  # other parameters are frozen here
            return
        self._ending = _Ending([], [])  # the zeros given to the reducer are not gradients of the script
        self._reducer.resume(
            [positions[name] for name in order.names], [positions[name] for name in order.once_unused]
        )
        self._ending = None
        self._arrived.clear()

    def check_ended(self) -> None:
        """Raise an error if the previous backward pass failed; see `Synchronizer`."""
        self._backward.check_ended()

    def check_averaged(self) -> None:
        """Raise an error if a step would use local gradients; see `Synchronizer`."""
        if self._group.world.size > 1:
            self._check.check()

    def on_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Record a step; its digest is sent with the next exchange. See `Synchronizer`."""
        if not self._named:  # all are sharded, so no exchange counts the steps
            self.steps.number += 1
        if self._check.step():
            self.steps.record(groups)

    def _on_gradient(self, position: int, parameter: torch.Tensor) -> None:
        """Record the arrival of a parameter's gradient, which torch's reducer has not received yet.

        The gradient may be undefined.

        Raises
        ------
        ConfigurationError
            The gradient cannot be averaged.
        FleetError
            This pass already had a gradient of the parameter, or an error ended the previous pass.
        """
        if self._paused:
            self._check.accumulate(position)
            return
        if self._ending is None:  # otherwise it is one of the remaining gradients
            if not self._arrived or position in self._arrived:
                self._begin(position)
            if (
                position in self._unseen
            ):  # read once: creating a gradient's Python object takes longer than the rest of this hook
                gradient = parameter.grad
                if gradient is not None and gradient.layout is not torch.strided:
                    raise ConfigurationError(
                        f"the gradient of {self._named[position][0]} is {gradient.layout}; expected a dense "
                        "one: build its torch.nn.Embedding with sparse=False"
                    )
                self._unseen.discard(position)
        self._arrived[position] = None

    def _begin(self, position: int) -> None:
        """Begin an exchange at the first gradient of a pass."""
        self._backward.check_ended()
        if position in self._arrived:
            raise FleetError(
                f"the gradient of {self._named[position][0]} arrived twice in one backward pass (reentrant "
                "checkpointing does that); expected once: pass use_reentrant=False to torch.utils.checkpoint"
            )
        # The engine enables grad mode during a pass only for create_graph=True.
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "backward(create_graph=True) gives differentiable gradients, and an average over trainers "
                "is not differentiable; expected torch.autograd.grad(..., create_graph=True) to compute "
                "parts of the loss, and then loss.backward()"
            )
        self._backward.reach(self)
        self._reducer.begin()

    def remaining_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the flags and the parameters that the pass did not reach, with gradients for the reducer."""
        flags = self._reducer.flags
        absent = [position for position, each in enumerate(self._parameters) if each.grad is None]
        missing = [each for position, each in enumerate(self._parameters) if position not in self._arrived]
        thawed = [each for each in missing if not each.requires_grad]  # frozen since the buckets were made
        for parameter in thawed:
            parameter.requires_grad_(True)
        self._ending = _Ending(absent, thawed)
        if self._reducer.order is None:  # this pass determines the order, including that of the flags
            flags.leaf.register_post_accumulate_grad_hook(lambda _: self._arrived.setdefault(FLAGS))  # type: ignore[no-untyped-call]
        # A missing parameter may have a gradient from passes in no_sync(). Adding zeros sends that sum
        # unchanged.
        zeros = [(each, torch.zeros_like(each)) for each in missing]
        # One number carries both digests. They are XORed, because the flags have room for one number and only
        # a difference matters.
        return [*zeros, (flags.leaf, flags.gradient(absent, self.steps.digest ^ self._copies.digest))]

    def hand_back(self) -> None:
        """Replace the parameters' gradients with their averages."""
        flags = self._reducer.flags
        ending, self._ending = cast("_Ending", self._ending), None
        for parameter in ending.thawed:
            parameter.requires_grad_(False)
        if not flags.are_equal():
            self.steps.compare(f"steps (at the average of step {self.steps.number}'s gradients)")
            self._copies.compare_buffers()
        unused = flags.unused(ending.absent)
        self._reducer.end(self._arrived, unused)
        self._arrived.clear()
        averages = self._reducer.averages()
        for parameter, average in zip(self._parameters, averages, strict=True):
            parameter.grad = average
        for position in unused:
            self._parameters[position].grad = None
        self._check.average(averages, unused, captured=is_capturing(self.device))
        progress.count("bytes_reduced", self._reducer.num_bytes)
        # Here and not before the forward pass: all trainers meet here anyway, and an additional forward pass
        # on one trainer keeps no other waiting.
        self._copies.share_buffers()
        self.steps.number += 1
