"""Datasets, each provided as readers."""

from typing import TYPE_CHECKING

from fleet.fluid.names import missing
from fleet.fluid.paddle.dataset import uci_housing as uci_housing

__all__ = ["uci_housing"]

if not TYPE_CHECKING:
    __getattr__ = missing("paddle.dataset")
