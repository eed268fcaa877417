"""Synchronizers, which keep the trainers' copies of a model equal. The strategy selects the class.

`Alone` is for a job with one trainer, where there is nothing to average: it only counts backward passes.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, Final

import torch
from torch.utils.checkpoint import CheckpointFunction

from fleet.checkpoint import GradientOrder
from fleet.collective.copies import Copies
from fleet.collective.steps import Steps
from fleet.errors import ConfigurationError

__all__ = ["LEARNING_PASSES", "Alone", "PassEnd", "Synchronizer", "refuse_reentrant"]

LEARNING_PASSES: Final = 16
"""The number of consecutive passes that must reach a parameter before every pass is assumed to reach it."""
_REENTRANT: Final[CodeType] = CheckpointFunction.backward.__code__


class Synchronizer:
    """Keeps one optimizer's parameters equal on all trainers; subclasses define when and how.

    Parameters
    ----------
    steps : Steps
        The optimizer's steps, which the subclass counts.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.apart = False
        """True while the trainers' copies differ; all trainers have the same value."""
        self._paused = False
        """True while gradients accumulate without being averaged."""

    def start(self) -> None:
        """Connect, and add hooks to the parameters; every trainer must call this."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Accumulate gradients locally in the `with` block; the next backward pass averages the sums."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def order(self) -> GradientOrder | None:
        """The order in which gradients are sent, for a checkpoint; None until the next pass determines it."""
        return None

    def resume(self, order: GradientOrder) -> None:
        """Use the order stored in a checkpoint; every trainer must call this."""

    def check_ended(self) -> None:
        """Raise an error if the previous backward pass failed."""

    def check_averaged(self) -> None:
        """Raise an error if a step would use gradients that have not been averaged."""

    def check_scaled(self) -> None:
        """Raise an error if a GradScaler could make a fused kernel skip a step on this trainer only."""

    @property
    def step_of_gradients(self) -> int:
        """The number of the step that will use the current gradients."""
        return self.steps.number - 1

    def on_zero_grad(self) -> None:
        """Process the optimizer's ``zero_grad()`` before the gradients are cleared."""

    def on_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Process a step that the optimizer has run, given the hyper-parameters of the step."""

    def equalize(self, what: str) -> None:
        """Make the trainers' copies equal if they can differ between steps; every trainer must call this."""

    def close(self) -> None:
        """Remove the hooks from the parameters."""


class PassEnd:
    """A callback for the end of a backward pass.

    Parameters
    ----------
    finish : callable
        Called by the autograd engine when the pass ends without an error.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        """Run the callback."""
        self._finish()

    @classmethod
    def queue(cls, finish: Callable[[], None]) -> "weakref.ref[PassEnd]":
        """Queue a callback in the autograd engine; it is released when the pass ends or fails."""
        end = cls(finish)
        torch.autograd.Variable._execution_engine.queue_callback(end)  # noqa: SLF001
        return weakref.ref(end)


def refuse_reentrant() -> None:
    """Raise an error in a nested pass of torch.utils.checkpoint, as it would exchange all gradients again."""
    frame = sys._getframe()  # noqa: SLF001
    while (caller := frame.f_back) is not None:
        if caller.f_code is _REENTRANT:
            raise ConfigurationError(
                "the first gradient of a backward pass came from within a reentrant checkpoint, so each "
                "checkpoint would exchange the gradients of the whole model; expected one exchange per "
                "pass: pass use_reentrant=False to torch.utils.checkpoint"
            )
        frame = caller


class Alone(Synchronizer):
    """Counts the backward passes of a job with a single trainer, where nothing is averaged.

    A hook on every parameter may be too expensive for a model of many small ones. The first passes therefore
    find a parameter that every pass reaches. From then on only that parameter has a hook.

    Parameters
    ----------
    copies : Copies
    """

    def __init__(self, copies: Copies) -> None:
        super().__init__(Steps(copies.group))
        self._parameters = [parameter for _, parameter in copies.trained]
        self._handles: dict[int, Any] = {}
        self._always: set[int] = set()
        self._reached: set[int] = set()
        self._passes = 0
        self._since_step = 0
        self._end: weakref.ref[PassEnd] | None = None

    def start(self) -> None:
        """Add a hook to every parameter; see `Synchronizer`."""
        self._passes, self._reached = 0, set()
        self._always = set(range(len(self._parameters)))
        for position, parameter in enumerate(self._parameters):
            if position not in self._handles:
                hook = parameter.register_post_accumulate_grad_hook(self._hook(position))  # type: ignore[no-untyped-call]
                self._handles[position] = hook

    def close(self) -> None:
        """Remove the hooks; see `Synchronizer`."""
        self._keep_hooks(set())

    def on_step(self, groups: Sequence[Mapping[str, Any]]) -> None:  # noqa: ARG002 (nothing to compare with)
        """Count a pass that did not reach the hooked parameter; see `Synchronizer`."""
        if not self._parameters:  # all are sharded
            self.steps.number += 1
        elif not self._since_step and len(self._handles) == 1 < len(self._parameters):
            (hooked,) = self._handles
            if any(each.grad is not None for each in self._parameters):
                # A pass that did not reach the hooked parameter was not counted: count it now, and learn
                # again.
                self.steps.number += self._parameters[hooked].grad is None
                self.start()
        self._since_step = 0

    def _hook(self, position: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            if self._paused:
                return
            if self._end is None or self._end() is None:
                refuse_reentrant()
                self._reached.clear()
                self._end = PassEnd.queue(self._finish)
            self._reached.add(position)

        return on_gradient

    def _finish(self) -> None:
        self.steps.number += 1
        self._since_step += 1
        self._passes += 1
        self._always &= self._reached
        if self._passes == LEARNING_PASSES and self._always:
            self._keep_hooks({max(self._always)})

    def _keep_hooks(self, positions: set[int]) -> None:
        for position in self._handles.keys() - positions:
            self._handles.pop(position).remove()
