"""The record that `minimize` keeps of a program's training, used to create its PyTorch objects."""

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
        Whether it is stepped by SGD without regularization, whatever the optimizer.
    """

    name: str
    gradient: str
    factor: float
    regularization: Mapping[str, float]
    state: Mapping[str, str]
    plain: bool = False


@dataclass(frozen=True)
class Training:
    """The record of a built program's training.

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
