"""What keeps the trainers' copies of a model one; a job's strategy chooses it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fleet.collective.steps import Steps

__all__ = ["Synchronizer"]


class Synchronizer(Protocol):
    """One optimizer's; it does what it does when gradients come, when a backward pass ends, or after a step.

    Attributes
    ----------
    steps : Steps
        Counted by this object.
    """

    steps: Steps

    def start(self) -> None:
        """Be told of gradients, if they matter; every trainer calls this."""

    def paused(self) -> AbstractContextManager[None]:
        """Let gradients of the block accumulate here, to be averaged with those of the next backward."""

    def check_ended(self) -> None:
        """Raise if an error ended the backward pass before."""

    def check_averaged(self) -> None:
        """Raise if a step would be made on gradients that must be averaged, and are not."""

    def on_step(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Note that the optimizer has stepped, with these hyper-parameters."""

    def settle(self, what: str) -> None:
        """Make the copies equal, where they are not after each step; every trainer calls this."""

    def close(self) -> None:
        """Leave the parameters as any others."""
