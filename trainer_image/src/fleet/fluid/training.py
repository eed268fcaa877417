"""The record that `minimize` makes of a program's training, used to create the PyTorch objects."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.plan.clipping import GradClip

__all__ = ["Trained", "Training"]


@dataclass(frozen=True)
class Trained:
    """A trained parameter with its gradient and learning rate.

    Attributes
    ----------
    name, gradient : str
        Its variable, and the variable of its gradient before clipping and regularization.
    factor : float
        The factor of the learning rate.
    regularization : mapping of option to number
        The options of `fleet.optim` for its regularizer.
    state : mapping of str to str
        The variables of the optimizer's state, by the name of the state in `fleet.optim`.
    plain : bool
        Whether SGD without regularization updates it, regardless of the optimizer.
    """

    name: str
    gradient: str
    factor: float
    regularization: Mapping[str, float]
    state: Mapping[str, str]
    plain: bool = False


@dataclass(frozen=True)
class Training:
    """The loss, trained parameters, optimizer and clipping of a built program.

    Attributes
    ----------
    loss : str
        The variable that is minimized.
    rate : str
        The variable of the learning rate.
    parameters : tuple of Trained
        In order of creation.
    optimizer : object
        The optimizer of `fleet.fluid.optimizer` that minimizes the loss.
    clip : ClipGradByValue, ClipGradByNorm, ClipGradByGlobalNorm or None
        How gradients are clipped.
    """

    loss: str
    rate: str
    parameters: tuple[Trained, ...]
    optimizer: Any
    clip: GradClip | None
