"""What keeps the trainers' copies of a model one; a job's strategy chooses it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleet.checkpoint import GradientOrder
from fleet.collective.steps import Steps

__all__ = ["Synchronizer"]


class Synchronizer:
    """One optimizer's; an heir does what it does when gradients come, when a pass ends, or after a step.

    Parameters
    ----------
    steps : Steps
        Counted by the heir.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.apart = False
        """Whether the copies differ now; all trainers know it alike."""
        self._paused = False
        """Whether gradients accumulate, and are not averaged yet."""

    def start(self) -> None:
        """Be told of gradients, if they matter; every trainer calls this."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let gradients of the block accumulate here, to be averaged with those of the next backward."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def order(self) -> GradientOrder | None:
        """The order in which gradients travel, for a checkpoint; None if the next pass decides it."""
        return None

    def resume(self, order: GradientOrder) -> None:
        """Have gradients travel in the order of a checkpoint; every trainer calls this."""

    def check_ended(self) -> None:
        """Raise if an error ended the backward pass before."""

    def check_averaged(self) -> None:
        """Raise if a step would be made on gradients that must be averaged, and are not."""

    def check_scaled(self) -> None:
        """Raise if a step by a kernel that a GradScaler tells to leave it out would not be everybody's."""

    @property
    def step_of_gradients(self) -> int:
        """Which step the gradients that are there are for; every pass counts, where passes average."""
        return self.steps.number - 1

    def on_zero_grad(self) -> None:
        """Note that the optimizer is about to clear the gradients."""

    def on_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note that the optimizer has stepped, with these hyper-parameters."""

    def settle(self, what: str) -> None:
        """Make the copies equal, where they are not after each step; every trainer calls this."""

    def close(self) -> None:
        """Leave the parameters as any others."""
