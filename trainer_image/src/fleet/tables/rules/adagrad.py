"""Adagrad on the rows that have a gradient."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fleet.tables.rules.decay import decay
from fleet.tables.rules.interface import Rows, Slot

__all__ = ["Adagrad", "RowwiseAdagrad"]


class Adagrad:
    """``torch.optim.Adagrad``, with a sum of squares for each element."""

    slots: ClassVar[tuple[Slot, ...]] = (Slot("sum", initial_option="initial_accumulator_value"),)

    def defaults(self) -> Mapping[str, float]:
        """Return the options of torch's class."""
        return {
            "lr": 0.01,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
        }

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Step rows."""
        decay(rows, options)
        total = rows.state["sum"]
        total.addcmul_(rows.gradient, rows.gradient)
        rows.value.addcdiv_(rows.gradient, total.sqrt().add_(options["eps"]), value=-_rate(options, step))


class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum for a row: of its gradients' mean squares, as FBGEMM has it."""

    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("sum", per_element=False, initial_option="initial_accumulator_value"),
    )

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Step rows."""
        decay(rows, options)
        total = rows.state["sum"]
        total.add_(rows.gradient.square().mean(dim=1, keepdim=True))
        rows.value.addcdiv_(rows.gradient, total.sqrt().add_(options["eps"]), value=-_rate(options, step))


def _rate(options: Mapping[str, Any], step: int) -> float:
    return float(options["lr"] / (1.0 + (step - 1) * options["lr_decay"]))
