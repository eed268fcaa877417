"""The operators of built programs, and their computation with PyTorch."""

from fleet.fluid.operators import arithmetic, images, losses, metrics, parameters, rows
from fleet.fluid.operators.kinds import GRAD, Gradient, Kind, kind_of, kinds

__all__ = [
    "GRAD",
    "Gradient",
    "Kind",
    "arithmetic",
    "images",
    "kind_of",
    "kinds",
    "losses",
    "metrics",
    "parameters",
    "rows",
]
