"""Whether the weights that a training ends with are numbers at all."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from fleet.process import progress

__all__ = ["COUNTER", "tell_of_weights"]

COUNTER = "non_finite_parameters"
"""The counter, in the progress and the last words, of parameters that hold NaN or infinity at the end."""

_NAMED = 3
_log = logging.getLogger(__name__)


def tell_of_weights(parameters: Mapping[str, Tensor], step: int | None) -> None:
    """Warn, and count, if parameters hold NaN or infinity as their training ends.

    Parameters
    ----------
    parameters : mapping of name to Tensor
        With the values that the training has come to.
    step : int, optional
        How many steps it has made.
    """
    lost = [name for name, value in parameters.items() if not bool(torch.isfinite(value).all())]
    if not lost:
        return
    progress.count(COUNTER, len(lost))
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    _log.warning(
        "the training ends%s with NaN or infinity in %d of %d parameters: %s%s; what is saved of them is of"
        " no use. The loss shows where it went wrong: lower the learning rate, clip gradients"
        " (strategy.grad_clip), or look at the data",
        "" if step is None else f" after step {step}",
        len(lost),
        len(parameters),
        ", ".join(lost[:_NAMED]),
        more,
    )
