"""The backward pass that runs, and its end, which is one for all optimizers that its gradients reach.

Which of two optimizers a pass ends with may differ between trainers. So the last gradients of all of them
leave before any average is awaited: else two trainers could wait for each other.
"""

import sys
import time
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Final, Protocol

import torch
from torch.utils.checkpoint import CheckpointFunction

from fleet.collective.group import Group
from fleet.collective.standing import Way
from fleet.collective.steps import Steps
from fleet.errors import ConfigurationError, FleetError
from fleet.process import progress

__all__ = ["BackwardPass", "Reached", "queue_end", "refuse_reentrant"]

_REENTRANT: Final[CodeType] = CheckpointFunction.backward.__code__


class Reached(Protocol):
    """Whom gradients of a pass reach.

    Attributes
    ----------
    steps : Steps
    """

    steps: Steps

    @property
    def device(self) -> torch.device:
        """Where its gradients are."""

    def on_backward_end(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the leaves whose gradients are still to come, each with the gradient to be added."""

    def collect(self) -> None:
        """Hand the averages back; they are there."""


class BackwardPass:
    """One at a time.

    Parameters
    ----------
    group : Group
        Names who keeps the averages waiting.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._everybody: list[Reached] = []
        self._reached: list[Reached] = []
        self._end: weakref.ref[_End] | None = None

    def add(self, whom: Reached) -> None:
        """Take note of one more; all trainers add theirs in the same order."""
        self._everybody.append(whom)

    def reach(self, whom: Reached) -> None:
        """Have the pass end for another one, whose first gradient is there.

        Raises
        ------
        ConfigurationError
            The gradient came from a pass within the pass, which would end too early.
        """
        if not self._reached:
            refuse_reentrant()
            self._end = queue_end(self._finish)
        self._reached.append(whom)

    def check_ended(self) -> None:
        """Check that the backward pass before, if there was one, came to its end.

        Raises
        ------
        FleetError
            An error ended it, which the script has caught.
        """
        if self._end is not None and self._end() is None:
            step = self._reached[0].steps.number
            raise FleetError(
                f"the backward pass of step {step} was ended by an error, and the other trainers wait for "
                "the gradients that it had still to give; expected the script to end with that error, too"
            )

    def _finish(self) -> None:
        """Send what did not fill up, await the averages, and hand them back."""
        reached = sorted(self._reached, key=self._everybody.index)
        rest = [pair for each in reached for pair in each.on_backward_end()]
        what = f"the average of step {reached[0].steps.number}'s gradients"
        # What is left leaves by the hooks of this pass, and is awaited at its end.
        began = time.monotonic()
        with self._group.waiting(what, Way.EXCHANGE, reached[0].device):
            torch.autograd.backward([leaf for leaf, _ in rest], [gradient for _, gradient in rest])
        progress.count("wait_seconds", time.monotonic() - began)
        self._end = None
        self._reached = []
        for each in reached:
            each.collect()


class _End:
    """What the autograd engine calls at the end of a backward pass; it forgets it if an error comes first."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        """End the pass."""
        self._finish()


def queue_end(finish: Callable[[], None]) -> "weakref.ref[_End]":
    """Let the engine call `finish` at the end of this backward pass, and keep the only reference to it."""
    end = _End(finish)
    torch.autograd.Variable._execution_engine.queue_callback(end)  # noqa: SLF001
    return weakref.ref(end)


def refuse_reentrant() -> None:
    """Refuse a pass that torch.utils.checkpoint runs within the pass: each would exchange all gradients."""
    frame = sys._getframe()  # noqa: SLF001
    while (caller := frame.f_back) is not None:
        if caller.f_code is _REENTRANT:
            raise ConfigurationError(
                "the first gradient of a backward pass came from within a reentrant checkpoint, so that each "
                "checkpoint would exchange the gradients of the whole model; expected one exchange a pass: "
                "pass use_reentrant=False to torch.utils.checkpoint"
            )
        frame = caller
