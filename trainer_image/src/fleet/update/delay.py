"""Delay compensation: what a stale gradient would be at the present value, to first order."""

from torch import Tensor

__all__ = ["compensate_delay"]


def compensate_delay(gradient: Tensor, value: Tensor, sent: Tensor) -> Tensor:
    """Correct a gradient for the steps made since its trainer got the value.

    Parameters
    ----------
    gradient, value, sent : Tensor
        The gradient, the value now, and the value it was computed on; of one shape. None is modified.

    Returns
    -------
    Tensor
        ``gradient + gradient * gradient * (value - sent)``.

    Raises
    ------
    ValueError
        The shapes differ; the message gives all three.

    Notes
    -----
    DC-ASGD with lambda 1: Zheng et al. 2017, arXiv:1609.08326.
    """
    if not gradient.shape == value.shape == sent.shape:
        raise ValueError(
            f"a gradient of shape {list(gradient.shape)}, a value of {list(value.shape)} and the value sent "
            f"of {list(sent.shape)}; expected one shape"
        )
    # The original's order of operations: the drift times the gradient, times the gradient.
    return gradient + (value - sent) * gradient * gradient
