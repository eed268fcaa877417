"""A trainer that steps its parameters itself: nothing is watched, nothing can be changed too late."""

import contextlib
from collections.abc import Iterator

from torch.optim import Optimizer

from fleet.parameter_server.modes import TrainerMode
from fleet.parameter_server.trainer.scaling import Scaling

__all__ = ["LocalSteps"]


class LocalSteps:
    """Stands where a `GradientFlow` does, for modes in which the user's own optimizer steps.

    Parameters
    ----------
    optimizer : Optimizer
        The user's.
    mode : TrainerMode
        What happens after each step.
    """

    def __init__(self, optimizer: Optimizer, mode: TrainerMode) -> None:
        self._optimizer = optimizer
        self._mode = mode

    def attach(self) -> None:
        """Do nothing: the backward pass is the trainer's own business."""

    def detach(self) -> None:
        """Do nothing."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let backward passes accumulate, as they do anyway."""
        yield

    def step(self, scaling: Scaling | None = None) -> None:
        """Step by the gradients that are there, and exchange what has changed when it is time to.

        Parameters
        ----------
        scaling : Scaling, optional
            As of `GradientFlow.step`.
        """
        if scaling is not None:
            groups = self._optimizer.param_groups
            scaling.undo([each.grad for group in groups for each in group["params"] if each.grad is not None])
        if scaling is None or not scaling.found_inf:
            self._optimizer.step()
        self._mode.finish(())

    def check_nothing_in_flight(self, what: str) -> None:
        """Do nothing: nothing ever is."""
