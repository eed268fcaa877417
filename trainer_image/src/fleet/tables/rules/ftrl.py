"""Follow the regularized leader, on the rows that have a gradient."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fleet.tables.rules.interface import Rows, Slot

__all__ = ["FTRL"]


class FTRL:
    """FTRL-Proximal: McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1.

    A weight whose ``linear`` is within `l1` is exactly 0.
    """

    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("linear"),
        Slot("squared", initial_option="initial_accumulator_value"),
    )

    def defaults(self) -> Mapping[str, float]:
        """Return the options: the paper's alpha is `lr`."""
        return {"lr": 0.05, "beta": 1.0, "l1": 0.0, "l2": 0.0, "initial_accumulator_value": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Step rows."""
        del step
        linear, squared = rows.state["linear"], rows.state["squared"]
        root = squared.sqrt()
        squared.addcmul_(rows.gradient, rows.gradient)
        new_root = squared.sqrt()
        pull = (new_root - root).div_(options["lr"])
        linear.add_(rows.gradient).addcmul_(pull, rows.value, value=-1.0)
        shrunk = linear - linear.clamp(-options["l1"], options["l1"])
        rows.value.copy_(
            shrunk.neg_().div_(new_root.add_(options["beta"]).div_(options["lr"]).add_(options["l2"]))
        )
        rows.value.masked_fill_(torch.eq(shrunk, 0.0), 0.0)
