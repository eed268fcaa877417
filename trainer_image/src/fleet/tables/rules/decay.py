"""Weight decay as torch's optimizers have it: added to the gradient, of rows that have one."""

from collections.abc import Mapping
from typing import Any

from fleet.tables.rules.interface import Rows

__all__ = ["decay"]


def decay(rows: Rows, options: Mapping[str, Any]) -> None:
    """Add the decay of the weights to the gradient."""
    if weight_decay := options["weight_decay"]:
        rows.gradient.add_(rows.value, alpha=weight_decay)
