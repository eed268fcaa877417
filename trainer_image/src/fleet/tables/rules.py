"""Row rules: the optimizers of tables. A user-defined rule is a class with the members of `RowRule`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from fleet.errors import ConfigurationError

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Momentum",
    "RMSprop",
    "RowRule",
    "Rows",
    "RowwiseAdagrad",
    "Slot",
    "options_of",
    "rule_of",
]


@dataclass(frozen=True)
class Slot:
    """One part of the optimizer state of a row.

    Attributes
    ----------
    name : str
    per_element : bool
        True: as wide as the row. False: one number per row.
    initial_option : str, optional
        The option that holds the initial value; without it, the initial value is 0.
    """

    name: str
    per_element: bool = True
    initial_option: str | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one update: copies, which the table writes back.

    Attributes
    ----------
    value : float32[n, dimension]
    gradient : float32[n, dimension]
        The rule may overwrite it.
    state : mapping of name to float32[n, dimension] or float32[n, 1]
        By slot.
    """

    value: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class RowRule(Protocol):
    """Steps the rows of one update. A row's result must depend only on that row and the options."""

    slots: ClassVar[tuple[Slot, ...]]

    def defaults(self) -> Mapping[str, float]:
        """Return the options with their default values."""

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Step rows in place.

        Parameters
        ----------
        rows : Rows
        options : mapping
            The options of this step; it has every name of `defaults`.
        step : int
            Number of updates of the table, including this one.
        """


class SGD:
    """``torch.optim.SGD`` without momentum; rows without a gradient do not decay."""

    slots: ClassVar[tuple[Slot, ...]] = ()

    def defaults(self) -> Mapping[str, float]:
        """Return the options of torch's class."""
        return {"lr": 0.001, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """See `RowRule`."""
        del step
        _decay(rows, options)
        rows.value.add_(rows.gradient, alpha=-options["lr"])


class Momentum:
    """``torch.optim.SGD`` with momentum; rows without a gradient keep their momentum."""

    slots: ClassVar[tuple[Slot, ...]] = (Slot("momentum_buffer"),)

    def defaults(self) -> Mapping[str, float]:
        """Return the options of torch's class."""
        return {"lr": 0.001, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """See `RowRule`."""
        del step
        _decay(rows, options)
        buffer = rows.state["momentum_buffer"]
        buffer.mul_(options["momentum"]).add_(rows.gradient)
        ahead = rows.gradient.add_(buffer, alpha=options["momentum"]) if options["nesterov"] else buffer
        rows.value.add_(ahead, alpha=-options["lr"])


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
        """See `RowRule`."""
        _decay(rows, options)
        total = self._accumulate(rows)
        rate = options["lr"] / (1.0 + (step - 1) * options["lr_decay"])
        rows.value.addcdiv_(rows.gradient, total.sqrt().add_(options["eps"]), value=-float(rate))

    def _accumulate(self, rows: Rows) -> Tensor:
        return rows.state["sum"].addcmul_(rows.gradient, rows.gradient)


class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum per row, of the mean squares of its gradients, as in FBGEMM."""

    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("sum", per_element=False, initial_option="initial_accumulator_value"),
    )

    def _accumulate(self, rows: Rows) -> Tensor:
        return rows.state["sum"].add_(rows.gradient.square().mean(dim=1, keepdim=True))


class Adam:
    """``torch.optim.SparseAdam`` with weight decay; rows without a gradient keep their moments."""

    slots: ClassVar[tuple[Slot, ...]] = (Slot("exp_avg"), Slot("exp_avg_sq"))

    def defaults(self) -> Mapping[str, Any]:
        """Return the options of torch's class, and weight decay."""
        return {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """See `RowRule`."""
        _decay(rows, options)
        first, second = options["betas"]
        mean, square = rows.state["exp_avg"], rows.state["exp_avg_sq"]
        mean.add_((rows.gradient - mean).mul_(1.0 - first))
        square.add_(rows.gradient.square_().sub_(square).mul_(1.0 - second))
        rate = options["lr"] * (1.0 - second**step) ** 0.5 / (1.0 - first**step)
        rows.value.addcdiv_(mean, square.sqrt().add_(options["eps"]), value=-rate)


class RMSprop:
    """``torch.optim.RMSprop`` without momentum, not centered."""

    slots: ClassVar[tuple[Slot, ...]] = (Slot("square_avg"),)

    def defaults(self) -> Mapping[str, float]:
        """Return the options of torch's class."""
        return {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """See `RowRule`."""
        del step
        _decay(rows, options)
        average = rows.state["square_avg"]
        average.mul_(options["alpha"]).addcmul_(rows.gradient, rows.gradient, value=1.0 - options["alpha"])
        rows.value.addcdiv_(rows.gradient, average.sqrt().add_(options["eps"]), value=-options["lr"])


class FTRL:
    """FTRL-Proximal: McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1.

    A weight whose ``linear`` is within `l1` is exactly 0.
    """

    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("linear"),
        Slot("squared", initial_option="initial_accumulator_value"),
    )

    def defaults(self) -> Mapping[str, float]:
        """Return the options; `lr` is the paper's alpha."""
        return {"lr": 0.05, "beta": 1.0, "l1": 0.0, "l2": 0.0, "initial_accumulator_value": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """See `RowRule`."""
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


def _decay(rows: Rows, options: Mapping[str, Any]) -> None:
    """Add weight decay to the gradient, as torch's optimizers do."""
    if weight_decay := options["weight_decay"]:
        rows.gradient.add_(rows.value, alpha=weight_decay)


_RULES: Final[Mapping[str, Callable[[], RowRule]]] = {
    "torch.optim.sgd.SGD": SGD,
    "torch.optim.adagrad.Adagrad": Adagrad,
    "torch.optim.adam.Adam": Adam,
    "torch.optim.sparse_adam.SparseAdam": Adam,
    "torch.optim.adamw.AdamW": Adam,
    "torch.optim.rmsprop.RMSprop": RMSprop,
}
_UNSUPPORTED: Final = ("dampening", "amsgrad", "maximize", "centered", "decoupled_weight_decay")
"""Options of torch's classes that no rule has; each must be off."""
_DECOUPLED: Final = "torch.optim.adamw.AdamW"
"""Without decay it is Adam; its decay differs from that of the rules."""
_REMEDY: Final = "give the table a rule of its own: rule=fleet.tables.rules.…"


def rule_of(table: str, optimizer_class: type, group: Mapping[str, Any]) -> tuple[RowRule, dict[str, Any]]:
    """Return the rule that steps rows as a torch.optim class does, and its options.

    Parameters
    ----------
    table : str
        The table's name, for messages.
    optimizer_class : type
    group : mapping
        The options of the param group that holds the table.

    Raises
    ------
    ConfigurationError
        No rule does what the class does with these options.
    """
    path = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    if path not in _RULES:
        raise ConfigurationError(
            f"table {table}: rows cannot be stepped as {path} does it; expected SGD, Adagrad, Adam, "
            f"SparseAdam or RMSprop of torch.optim, or {_REMEDY}"
        )
    rule = Momentum() if path.endswith("SGD") and group.get("momentum") else _RULES[path]()
    on = [name for name in _UNSUPPORTED if group.get(name)]
    if path == _DECOUPLED:
        on = [name for name in ("weight_decay", *on) if group.get(name) and name != "decoupled_weight_decay"]
    if "momentum" not in rule.defaults() and group.get("momentum"):
        on.append("momentum")
    if on:
        found = ", ".join(f"{name}={group[name]}" for name in on)
        raise ConfigurationError(
            f"table {table}: rows cannot be stepped as {path} does it with {found}; expected that to be off, "
            f"or {_REMEDY}"
        )
    return rule, options_of(rule, group)


def options_of(rule: RowRule, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a rule that a param group sets."""
    return {name: group[name] for name in rule.defaults() if name in group}
