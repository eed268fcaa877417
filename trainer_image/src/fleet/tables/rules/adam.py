"""Adam on the rows that have a gradient."""

from collections.abc import Mapping
from typing import Any, ClassVar

from fleet.tables.rules.decay import decay
from fleet.tables.rules.interface import Rows, Slot

__all__ = ["Adam"]


class Adam:
    """``torch.optim.SparseAdam``: lazy, a row without a gradient keeps its moments as they are."""

    slots: ClassVar[tuple[Slot, ...]] = (Slot("exp_avg"), Slot("exp_avg_sq"))

    def defaults(self) -> Mapping[str, Any]:
        """Return the options of torch's class, and weight decay."""
        return {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Step rows."""
        decay(rows, options)
        first, second = options["betas"]
        mean, square = rows.state["exp_avg"], rows.state["exp_avg_sq"]
        mean.add_((rows.gradient - mean).mul_(1.0 - first))
        square.add_(rows.gradient.square_().sub_(square).mul_(1.0 - second))
        rate = options["lr"] * (1.0 - second**step) ** 0.5 / (1.0 - first**step)
        rows.value.addcdiv_(mean, square.sqrt().add_(options["eps"]), value=-rate)
