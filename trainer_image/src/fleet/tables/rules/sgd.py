"""Stochastic gradient descent on the rows that have a gradient, with momentum where it is asked for."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fleet.tables.rules.decay import decay
from fleet.tables.rules.interface import Rows, Slot

__all__ = ["SGD", "Momentum"]


class SGD:
    """``torch.optim.SGD`` without momentum; weights of rows without a gradient do not decay."""

    slots: ClassVar[tuple[Slot, ...]] = ()

    def defaults(self) -> Mapping[str, float]:
        """Return the options of torch's class."""
        return {"lr": 0.001, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Step rows."""
        del step
        decay(rows, options)
        rows.value.add_(rows.gradient, alpha=-options["lr"])


class Momentum:
    """``torch.optim.SGD`` with momentum, which a row without a gradient keeps as it is."""

    slots: ClassVar[tuple[Slot, ...]] = (Slot("momentum_buffer"),)

    def defaults(self) -> Mapping[str, float]:
        """Return the options of torch's class."""
        return {"lr": 0.001, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Step rows."""
        del step
        decay(rows, options)
        buffer = rows.state["momentum_buffer"]
        buffer.mul_(options["momentum"]).add_(rows.gradient)
        ahead = rows.gradient.add_(buffer, alpha=options["momentum"]) if options["nesterov"] else buffer
        rows.value.add_(ahead, alpha=-options["lr"])
