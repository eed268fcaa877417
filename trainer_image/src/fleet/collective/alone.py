"""A job's only trainer has nobody to average with: its backward passes are counted, and that is all.

A hook on each parameter would cost a model of many small ones more than a step may. So the first passes tell
which parameters every pass reaches, and from then on a hook on one of these tells of a pass.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from fleet.collective.backward import queue_end, refuse_reentrant
from fleet.collective.copies import Copies
from fleet.collective.steps import Steps
from fleet.collective.synchronizer import Synchronizer

if TYPE_CHECKING:
    import weakref

__all__ = ["LEARNING_PASSES", "Alone"]

LEARNING_PASSES: Final = 16
"""After so many a parameter that all have reached is taken for one that every pass reaches."""


class Alone(Synchronizer):
    """Counts backward passes as an average of gradients would; see `Synchronizer`."""

    def __init__(self, copies: Copies) -> None:
        super().__init__(Steps(copies.group))
        self._parameters = [parameter for _, parameter in copies.trained]
        self._handles: dict[int, Any] = {}
        self._always: set[int] = set()
        self._reached: set[int] = set()
        self._passes = 0
        self._since_step = 0
        self._end: weakref.ref[Any] | None = None

    def start(self) -> None:
        """See `Synchronizer`."""
        self._passes, self._reached = 0, set()
        self._always = set(range(len(self._parameters)))
        for position, parameter in enumerate(self._parameters):
            if position not in self._handles:
                hook = parameter.register_post_accumulate_grad_hook(self._came(position))  # type: ignore[no-untyped-call]
                self._handles[position] = hook

    def close(self) -> None:
        """Remove the hooks; see `Synchronizer`."""
        self._keep(set())

    def on_step(self, groups: Sequence[Mapping[str, Any]]) -> None:  # noqa: ARG002 (nobody compares them)
        """Notice a pass that has not reached the one parameter with a hook. See `Synchronizer`."""
        if not self._parameters:  # all are sharded
            self.steps.number += 1
        elif not self._since_step and len(self._handles) == 1 < len(self._parameters):
            (told,) = self._handles
            if any(each.grad is not None for each in self._parameters):
                self.steps.number += self._parameters[told].grad is None
                self.start()
        self._since_step = 0

    def _came(self, position: int) -> Any:
        def came(_: torch.Tensor) -> None:
            if self._paused:
                return
            if self._end is None or self._end() is None:
                refuse_reentrant()
                self._reached.clear()
                self._end = queue_end(self._finish)
            self._reached.add(position)

        return came

    def _finish(self) -> None:
        self.steps.number += 1
        self._since_step += 1
        self._passes += 1
        self._always &= self._reached
        if self._passes == LEARNING_PASSES and self._always:
            self._keep({max(self._always)})

    def _keep(self, positions: set[int]) -> None:
        for position in self._handles.keys() - positions:
            self._handles.pop(position).remove()
