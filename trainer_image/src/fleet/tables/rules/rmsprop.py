"""RMSprop on the rows that have a gradient."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fleet.tables.rules.decay import decay
from fleet.tables.rules.interface import Rows, Slot

__all__ = ["RMSprop"]


class RMSprop:
    """``torch.optim.RMSprop`` without momentum, not centered."""

    slots: ClassVar[tuple[Slot, ...]] = (Slot("square_avg"),)

    def defaults(self) -> Mapping[str, float]:
        """Return the options of torch's class."""
        return {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Step rows."""
        del step
        decay(rows, options)
        average = rows.state["square_avg"]
        average.mul_(options["alpha"]).addcmul_(rows.gradient, rows.gradient, value=1.0 - options["alpha"])
        rows.value.addcdiv_(rows.gradient, average.sqrt().add_(options["eps"]), value=-options["lr"])
