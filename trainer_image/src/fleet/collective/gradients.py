"""GradAllReduce: average the gradients of all trainers while the backward pass still runs.

torch's reducer does it, in buckets that leave as soon as they are full. It wants a gradient of every
parameter in every pass; what a pass did not reach is given as zeros when it ends, and with it the notes that
travel beside the gradients (`fleet.collective.notes`). A parameter that some trainers did not use counts
there as zeros; one that nobody used keeps no gradient, as in one process.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from fleet.collective.backward import BackwardPass
from fleet.collective.copies import Copies
from fleet.collective.notes import Notes
from fleet.collective.own_gradients import OwnGradients
from fleet.collective.reducer import BUCKET_BYTES, CommHook, Reducer
from fleet.collective.steps import Steps
from fleet.errors import ConfigurationError, FleetError
from fleet.process import progress

__all__ = ["Compression", "GradientAverager"]

Compression = Callable[[dist.ProcessGroup | None], CommHook]
"""Given the connections, returns what averages a bucket of gradients."""


@dataclass(frozen=True)
class _Layout:
    """Where gradients travel, for as long as the parameters stay where they are."""

    reducer: Reducer
    notes: Notes


@dataclass(frozen=True)
class _Ending:
    """A pass whose last gradients are being given: the parameters without one, and those frozen since."""

    absent: list[int]
    thawed: list[torch.Tensor]


class GradientAverager:
    """Averages the gradients of an optimizer's parameters in every backward pass; see `Synchronizer`.

    Parameters
    ----------
    copies : Copies
    backward : BackwardPass
        One for all optimizers.
    bucket_bytes : int
        How much travels at once.
    compression : callable, optional
        Given the connections, returns what averages a bucket; an all-reduce does otherwise.
    """

    def __init__(
        self,
        copies: Copies,
        backward: BackwardPass,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        compression: Compression | None = None,
    ) -> None:
        self.steps = Steps(copies.group)
        self._group = copies.group
        self._named = copies.trained
        self._backward = backward
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._channel: dist.ProcessGroup | None = None
        self._layout: _Layout | None = None
        self._arrived: set[int] = set()
        self._ending: _Ending | None = None
        self._own = OwnGradients(self._named)
        self._paused = False
        self._handles: list[Callable[[], None]] = []

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self._named[0][1].device

    def start(self) -> None:
        """See `Synchronizer`."""
        self._backward.add(self)
        self._channel = self._group.channel()
        self._group.use((parameter for _, parameter in self._named), self._channel)
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
        self._layout = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients accumulate here; see `Synchronizer`."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

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

    def settle(self, what: str) -> None:
        """Do nothing: the copies are equal after every step."""

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
        layout = self._laid_out()
        present = [parameter.grad is not None for _, parameter in self._named]
        rest, thawed = [], []
        for position, (_, parameter) in enumerate(self._named):
            if position not in self._arrived:
                if not parameter.requires_grad:  # frozen since the buckets were made
                    parameter.requires_grad_(True)
                    thawed.append(parameter)
                rest.append((parameter, torch.zeros_like(parameter)))
        self._ending = _Ending([position for position, has in enumerate(present) if not has], thawed)
        return [*rest, (layout.notes.leaf, layout.notes.gradient(present, self.steps.digest))]

    def collect(self) -> None:
        """Hand the averages back; see `Reached`."""
        layout, ending, self._ending = self._laid_out(), cast("_Ending", self._ending), None
        self._arrived.clear()
        for parameter in ending.thawed:
            parameter.requires_grad_(False)
        if not layout.notes.all_alike():
            self.steps.compare(f"steps (at the average of step {self.steps.number}'s gradients)")
        unused = layout.notes.nobodys(ending.absent)
        if not layout.reducer.ordered:  # which gives the gradients other places
            with self._group.waiting("the order of the gradients", device=self.device):
                layout.reducer.end()
        for position, (_, parameter) in enumerate(self._named):
            # A model that moves sets the data of its gradients, which must not be the reducer's own tensors.
            average = parameter.grad
            parameter.grad = None if position in unused or average is None else average.detach()
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._own.average(unused, captured=captured)
        if self._compression is None:  # which counts for itself
            progress.count("bytes_reduced", layout.reducer.num_bytes)
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
        if self._layout is None or not self._layout.reducer.fits():
            self._layout = None
            parameters = [parameter for _, parameter in self._named]
            self._group.use(parameters, self._channel)
            self._layout = self._lay_out(parameters)
        self._layout.reducer.begin()

    def _lay_out(self, parameters: Sequence[torch.Tensor]) -> _Layout:
        kinds = sorted({parameter.device.type for parameter in parameters})
        if len(kinds) > 1:
            raise ConfigurationError(
                f"the optimizer's parameters are on {' and on '.join(kinds)}; expected all on devices of one "
                "kind: give each kind an optimizer of its own, and each its fleet.distributed_optimizer"
            )
        hook = self._compression(self._channel) if self._compression is not None else None
        exactly = hook is not None
        notes = Notes(len(parameters), self._group.place.size, parameters[0].device, exactly=exactly)
        leaves = [notes.leaf, *parameters]
        reducer = Reducer(leaves, self._channel, bucket_bytes=self._bucket_bytes, hook=hook)
        return _Layout(reducer, notes)

    def _laid_out(self) -> _Layout:
        return cast("_Layout", self._layout)  # a gradient has come, with which it was made
