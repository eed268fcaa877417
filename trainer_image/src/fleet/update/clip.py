"""Clipping of a gradient that lies in blocks on several servers: the arithmetic, in a fixed order.

A norm over blocks is the root of the sum of their sums of squares. Those are computed and added in double
precision, so that neither the cut of a parameter nor its dtype shows in the norm.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

__all__ = ["clip_coefficient", "sum_of_squares", "total_of"]

_EPSILON: Final = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to the norm before it divides by it."""


def sum_of_squares(gradient: Tensor) -> float:
    """Return the sum of a gradient's squared elements; nan and inf pass through."""
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
    return float(norm * norm)


def total_of(sums: Mapping[int, float]) -> float:
    """Add sums of squares in ascending order of their blocks, whatever order they came in."""
    return sum((sums[block] for block in sorted(sums)), start=0.0)


def clip_coefficient(sum_of_squares: float, max_norm: float) -> float:
    """Return the factor that brings a norm down to `max_norm`: at most 1, and nan for a norm of nan.

    Parameters
    ----------
    sum_of_squares : float
        The square of the norm.
    max_norm : float

    Returns
    -------
    float
        What `torch.nn.utils.clip_grad_norm_` multiplies gradients by.
    """
    coefficient = max_norm / (float(sum_of_squares) ** 0.5 + _EPSILON)
    return 1.0 if coefficient > 1.0 else coefficient
