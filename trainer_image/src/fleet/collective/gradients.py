"""GradAllReduce: average the gradients of all trainers while the backward pass still runs.

torch's reducer does it, in buckets that leave as soon as they are full. It wants a gradient of every
parameter in every pass; what a pass did not reach is given as zeros when it ends, and with it the notes that
travel beside the gradients (`fleet.collective.notes`). A parameter that some trainers did not use counts
there as zeros; one that nobody used keeps no gradient, as in one process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from fleet.collective.backward import BackwardPass
from fleet.collective.buckets import Buckets, Compression
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
        parameters = [parameter for _, parameter in self._named]
        self._buckets = Buckets(
            copies.group,
            parameters,
            bucket_bytes=bucket_bytes,
            compression=compression,
            remembers=remembers,
        )
        self._arrived: set[int] = set()
        self._ending: _Ending | None = None
        self._own = OwnGradients(self._named)
        self._once_unused: set[int] = set()
        self._handles: list[Callable[[], None]] = []

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self._named[0][1].device

    def start(self) -> None:
        """See `Synchronizer`."""
        self._backward.add(self)
        self._buckets.connect()
        for position, (_, parameter) in enumerate(self._named):
            hooks = (
                parameter.register_post_accumulate_grad_hook(self._came(position)),  # type: ignore[no-untyped-call]
                parameter.register_hook(self._came_to_nothing(position)),  # type: ignore[no-untyped-call]
            )
            self._handles += [hook.remove for hook in hooks]

    def close(self) -> None:
        """Remove the hooks; see `Synchronizer`."""
        for remove in self._handles:
            remove()
        self._handles.clear()
        self._buckets.let_go()

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

    def on_gradient(self, position: int, layout: torch.layout) -> None:
        """Take note of a parameter's gradient, before torch's reducer does.

        Raises
        ------
        ConfigurationError
            It is none that can be averaged.
        FleetError
            There was one in this pass already, or an error ended the pass before.
        """
        if self._paused:
            self._own.accumulate(position)
        elif self._ending is None:
            self._backward.check_ended()
            if not self._arrived:
                self._begin()
            name = self._named[position][0]
            if layout is not torch.strided:
                raise ConfigurationError(
                    f"the gradient of {name} is {layout}; expected a dense one: "
                    "build its torch.nn.Embedding with sparse=False"
                )
            if position in self._arrived:
                raise FleetError(
                    f"the gradient of {name} arrived twice in one backward pass (reentrant checkpointing "
                    "does that); expected once: pass use_reentrant=False to torch.utils.checkpoint"
                )
            self._arrived.add(position)

    def on_backward_end(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what this trainer has still to give; see `Reached`."""
        notes = self._buckets.notes
        present = [parameter.grad is not None for _, parameter in self._named]
        rest, thawed = [], []
        for position, (_, parameter) in enumerate(self._named):
            if position not in self._arrived:
                if not parameter.requires_grad:  # frozen since the buckets were made
                    parameter.requires_grad_(True)
                    thawed.append(parameter)
                rest.append((parameter, torch.zeros_like(parameter)))
        self._ending = _Ending([position for position, has in enumerate(present) if not has], thawed)
        return [*rest, (notes.leaf, notes.gradient(present, self.steps.digest ^ self._copies.digest))]

    def collect(self) -> None:
        """Hand the averages back; see `Reached`."""
        reducer, notes = self._buckets.reducer, self._buckets.notes
        ending, self._ending = cast("_Ending", self._ending), None
        self._arrived.clear()
        for parameter in ending.thawed:
            parameter.requires_grad_(False)
        if not notes.all_alike():
            self.steps.compare(f"steps (at the average of step {self.steps.number}'s gradients)")
            self._copies.compare_buffers()
        unused = notes.nobodys(ending.absent)
        if not reducer.ordered:  # which gives the gradients other places
            with self._group.waiting("the order of the gradients", device=self.device):
                reducer.end()
        elif not unused <= self._once_unused:  # their buckets would hold up all behind them until the end
            self._buckets.order_anew()
        self._once_unused |= unused
        for position, (_, parameter) in enumerate(self._named):
            # A model that moves sets the data of its gradients, which must not be the reducer's own tensors.
            average = parameter.grad
            parameter.grad = None if position in unused or average is None else average.detach()
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._own.average(unused, captured=captured)
        progress.count("bytes_reduced", self._buckets.num_bytes)
        self._copies.share_buffers()
        self.steps.number += 1

    def _came(self, position: int) -> Callable[[torch.Tensor], None]:
        def came(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            self.on_gradient(position, gradient.layout if gradient is not None else torch.strided)

        return came

    def _came_to_nothing(self, position: int) -> Callable[[torch.Tensor | None], None]:
        """Take note of a gradient that a function left undefined: for the reducer it has come, too."""

        def came(gradient: torch.Tensor | None) -> None:
            if gradient is None and self._arrived and self._ending is None:
                self.on_gradient(position, torch.strided)

        return came

    def _begin(self) -> None:
        """Begin an exchange, with the first gradient of a pass; a model may have moved since the last."""
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "backward(create_graph=True) gives gradients that have gradients of their own, which an "
                "average over trainers has not; expected torch.autograd.grad(..., create_graph=True) for "
                "what the loss is made of, and loss.backward()"
            )
        self._backward.reach(self)
        self._buckets.begin()
