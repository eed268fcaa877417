"""Row rules: the optimizers of tables. A custom rule implements `RowRule`.

`kernels/table_rows.c` updates rows by SGD in a single loop, whereas torch passes over all rows once for each
operation. The loop is used only if `compiled_step` finds its results bitwise equal to the rule's.
"""

import ctypes
import inspect
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from fleet import optim
from fleet.errors import ConfigurationError
from fleet.tables.kernels import RowAddresses, library

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Momentum",
    "PaddleAdagrad",
    "PaddleAdam",
    "PaddleMomentum",
    "PaddleRMSProp",
    "PaddleSGD",
    "RMSprop",
    "RowRule",
    "Rows",
    "RowwiseAdagrad",
    "Slot",
    "compiled_step",
    "options_of",
    "rule_of",
    "steps_every_row",
]


@dataclass(frozen=True)
class Slot:
    """A named part of a row's optimizer state.

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
    """Copies of the rows to update; the table writes them back after the update.

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
    """An optimizer of rows. A row's result must depend only on that row and the options."""

    slots: ClassVar[tuple[Slot, ...]]

    def defaults(self) -> Mapping[str, float]:
        """Return the options with their default values."""

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Update rows in place.

        Parameters
        ----------
        rows : Rows
        options : mapping
            The options of this step; it has every name of `defaults`.
        step : int
            Number of updates of the table, including this one.
        """


class SGD:
    """The rule of ``torch.optim.SGD`` without momentum; rows without a gradient do not decay."""

    slots: ClassVar[tuple[Slot, ...]] = ()

    def defaults(self) -> Mapping[str, float]:
        """Return the default options of the torch.optim class."""
        return {"lr": 0.001, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Update rows in place; see `RowRule.step`."""
        del step
        _decay(rows, options)
        rows.value.add_(rows.gradient, alpha=-options["lr"])


class Momentum:
    """The rule of ``torch.optim.SGD`` with momentum; rows without a gradient keep their momentum."""

    slots: ClassVar[tuple[Slot, ...]] = (Slot("momentum_buffer"),)

    def defaults(self) -> Mapping[str, float]:
        """Return the default options of the torch.optim class."""
        return {"lr": 0.001, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Update rows in place; see `RowRule.step`."""
        del step
        _decay(rows, options)
        buffer = rows.state["momentum_buffer"]
        buffer.mul_(options["momentum"]).add_(rows.gradient)
        ahead = rows.gradient.add_(buffer, alpha=options["momentum"]) if options["nesterov"] else buffer
        rows.value.add_(ahead, alpha=-options["lr"])


class Adagrad:
    """The rule of ``torch.optim.Adagrad``, with one sum of squares for each element."""

    slots: ClassVar[tuple[Slot, ...]] = (Slot("sum", initial_option="initial_accumulator_value"),)

    def defaults(self) -> Mapping[str, float]:
        """Return the default options of the torch.optim class."""
        return {
            "lr": 0.01,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
        }

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Update rows in place; see `RowRule.step`."""
        _decay(rows, options)
        total = self._accumulate(rows)
        rate = options["lr"] / (1.0 + (step - 1) * options["lr_decay"])
        rows.value.addcdiv_(rows.gradient, total.sqrt().add_(options["eps"]), value=-float(rate))

    def _accumulate(self, rows: Rows) -> Tensor:
        return rows.state["sum"].addcmul_(rows.gradient, rows.gradient)


class RowwiseAdagrad(Adagrad):
    """Adagrad with one sum per row, which accumulates mean squared gradients, as in FBGEMM."""

    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("sum", per_element=False, initial_option="initial_accumulator_value"),
    )

    def _accumulate(self, rows: Rows) -> Tensor:
        return rows.state["sum"].add_(rows.gradient.square().mean(dim=1, keepdim=True))


class Adam:
    """The rule of ``torch.optim.SparseAdam``, with weight decay.

    Rows without a gradient keep their moments.
    """

    slots: ClassVar[tuple[Slot, ...]] = (Slot("exp_avg"), Slot("exp_avg_sq"))

    def defaults(self) -> Mapping[str, Any]:
        """Return the default options of the torch.optim class, and weight decay."""
        return {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Update rows in place; see `RowRule.step`."""
        _decay(rows, options)
        first, second = options["betas"]
        mean, square = rows.state["exp_avg"], rows.state["exp_avg_sq"]
        mean.add_((rows.gradient - mean).mul_(1.0 - first))
        square.add_(rows.gradient.square_().sub_(square).mul_(1.0 - second))
        rate = options["lr"] * (1.0 - second**step) ** 0.5 / (1.0 - first**step)
        rows.value.addcdiv_(mean, square.sqrt().add_(options["eps"]), value=-rate)


class RMSprop:
    """The rule of ``torch.optim.RMSprop`` without momentum or centering."""

    slots: ClassVar[tuple[Slot, ...]] = (Slot("square_avg"),)

    def defaults(self) -> Mapping[str, float]:
        """Return the default options of the torch.optim class."""
        return {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Update rows in place; see `RowRule.step`."""
        del step
        _decay(rows, options)
        average = rows.state["square_avg"]
        average.mul_(options["alpha"]).addcmul_(rows.gradient, rows.gradient, value=1.0 - options["alpha"])
        rows.value.addcdiv_(rows.gradient, average.sqrt().add_(options["eps"]), value=-options["lr"])


class FTRL:
    """The FTRL-Proximal rule of McMahan et al., "Ad click prediction", KDD 2013, algorithm 1.

    A weight whose ``linear`` is within `l1` is exactly 0.
    """

    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("linear"),
        Slot("squared", initial_option="initial_accumulator_value"),
    )

    def defaults(self) -> Mapping[str, float]:
        """Return the default options; `lr` is the paper's alpha."""
        return {"lr": 0.05, "beta": 1.0, "l1": 0.0, "l2": 0.0, "initial_accumulator_value": 0.0}

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Update rows in place; see `RowRule.step`."""
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
        # The negation has made -0 of 0.
        rows.value.masked_fill_(torch.eq(shrunk, 0.0), 0.0)


class _PaddleRule:
    """The base class of the rules for `fleet.optim`, with Paddle's formulas, clipping and regularization.

    With a regularizer, every row decays in each update, even without a gradient.
    """

    optimizer: ClassVar[type[optim.Optimizer]]
    slots: ClassVar[tuple[Slot, ...]] = ()

    def defaults(self) -> Mapping[str, Any]:
        """Return the default options of the `fleet.optim` class."""
        parameters = inspect.signature(self.optimizer).parameters
        return {name: each.default for name, each in parameters.items() if name != "params"}

    def every_row(self, options: Mapping[str, Any]) -> bool:
        """Return whether an update changes the values or the state of rows without a gradient."""
        return self.optimizer.dense(options)

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Update rows in place; see `RowRule.step`."""
        del step
        gradient = optim.regularized(optim.clipped(rows.gradient, options), rows.value, options)
        self.optimizer.update(rows.value, gradient, rows.state, options)


class PaddleSGD(_PaddleRule):
    """The rule of `fleet.optim.SGD`, with Paddle's formula."""

    optimizer: ClassVar[type[optim.Optimizer]] = optim.SGD


class PaddleMomentum(_PaddleRule):
    """The rule of `fleet.optim.Momentum`; an update changes every row, as in Paddle's dense table."""

    optimizer: ClassVar[type[optim.Optimizer]] = optim.Momentum
    slots: ClassVar[tuple[Slot, ...]] = (Slot("velocity"),)


class PaddleAdagrad(_PaddleRule):
    """The rule of `fleet.optim.Adagrad`, with Paddle's formula."""

    optimizer: ClassVar[type[optim.Optimizer]] = optim.Adagrad
    slots: ClassVar[tuple[Slot, ...]] = (Slot("moment", initial_option="initial_accumulator_value"),)


class PaddleAdam(_PaddleRule):
    """The rule of `fleet.optim.Adam`; an update changes every row unless ``lazy_mode`` is set."""

    optimizer: ClassVar[type[optim.Optimizer]] = optim.Adam
    slots: ClassVar[tuple[Slot, ...]] = (Slot("moment1"), Slot("moment2"))

    def step(self, rows: Rows, options: Mapping[str, Any], step: int) -> None:
        """Update rows in place; see `RowRule.step`."""
        powers = (optim.float32(options[name]) ** step for name in ("beta1", "beta2"))
        super().step(rows, {**options, "rate": optim.adam_rate(options["lr"], *powers)}, step)


class PaddleRMSProp(_PaddleRule):
    """The rule of `fleet.optim.RMSProp`; an update changes at least the state of every row."""

    optimizer: ClassVar[type[optim.Optimizer]] = optim.RMSProp
    slots: ClassVar[tuple[Slot, ...]] = (Slot("momentum"), Slot("mean_square"), Slot("mean_grad"))


def steps_every_row(rule: RowRule, options: Mapping[str, Any]) -> bool:
    """Return whether an update changes all rows; a row without a gradient then gets a zero gradient.

    Parameters
    ----------
    rule : RowRule
        A rule whose updates may change every row has a method `every_row`, which takes the options.
    options : mapping
        The options of the update.
    """
    every_row: Callable[[Mapping[str, Any]], bool] | None = getattr(rule, "every_row", None)
    return every_row is not None and every_row(options)


def _decay(rows: Rows, options: Mapping[str, Any]) -> None:
    """Add weight decay to the gradient, as torch's optimizers do."""
    if weight_decay := options["weight_decay"]:
        rows.gradient.add_(rows.value, alpha=weight_decay)


def compiled_step(rule: type) -> str | None:
    """Return the name of a compiled loop whose results are bitwise identical to a rule's, or None.

    Parameters
    ----------
    rule : type
        A class with the members of `RowRule`.

    Returns
    -------
    str or None
        None if there is no such loop. Rules with a square root have none: torch's depends on its libraries.
    """
    return _loop_of_sgd() if rule is SGD and library() is not None else None


@cache
def _loop_of_sgd() -> str | None:
    names = ["fleet_step_rows"]
    # "DEFAULT": torch has found no fused instruction on this x86 processor, or must use none.
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        names.append("fleet_step_rows_fused")
    return next((name for name in names if _steps_alike(getattr(library(), name))), None)


def _steps_alike(step_rows: Callable[..., int]) -> bool:
    """Test with thousands of rounding operations whether a loop and `SGD` give bitwise identical results."""
    num_rows, dimension, step = 64, 37, 3  # vectors of any width have a remainder
    value, gradient = torch.randn(2, num_rows, dimension, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(num_rows)
    direct, numbers = ids.int(), torch.empty_like(ids)
    words = torch.cat([value, torch.zeros(num_rows, 1)], dim=1)
    rows = RowAddresses(direct=direct.data_ptr(), words=words.data_ptr(), size=num_rows, width=dimension + 1)
    options = {"lr": 0.7, "weight_decay": 0.3}
    step_rows(
        ctypes.addressof(rows),
        ids.data_ptr(),
        num_rows,
        numbers.data_ptr(),
        gradient.data_ptr(),
        None,
        dimension,
        *options.values(),
        step,
    )
    SGD().step(Rows(value, gradient, {}), options, step)
    return torch.equal(words[:, :dimension].contiguous().view(torch.int32), value.view(torch.int32))


_RULES: Final[Mapping[str, Callable[[], RowRule]]] = {
    "torch.optim.sgd.SGD": SGD,
    "torch.optim.adagrad.Adagrad": Adagrad,
    "torch.optim.adam.Adam": Adam,
    "torch.optim.sparse_adam.SparseAdam": Adam,
    "torch.optim.adamw.AdamW": Adam,
    "torch.optim.rmsprop.RMSprop": RMSprop,
    "fleet.optim.SGD": PaddleSGD,
    "fleet.optim.Momentum": PaddleMomentum,
    "fleet.optim.Adagrad": PaddleAdagrad,
    "fleet.optim.Adam": PaddleAdam,
    "fleet.optim.RMSProp": PaddleRMSProp,
}
_UNSUPPORTED: Final = ("dampening", "amsgrad", "maximize", "centered", "decoupled_weight_decay")
"""Options of torch's classes that the rules do not support; each must be off."""
_DECOUPLED: Final = "torch.optim.adamw.AdamW"
"""The path of AdamW. With no weight decay it equals Adam; no rule implements its weight decay."""
_REMEDY: Final = "give the table its own rule: rule=fleet.tables.rules.…"


def rule_of(table: str, optimizer_class: type, group: Mapping[str, Any]) -> tuple[RowRule, dict[str, Any]]:
    """Return the row rule that corresponds to a torch.optim class, with its options.

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
        No rule computes the same updates as the class with these options.
    """
    path = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    if path not in _RULES:
        raise ConfigurationError(
            f"table {table}: rows cannot be stepped as {path} does; expected SGD, Adagrad, Adam, SparseAdam "
            f"or RMSprop of torch.optim, a class of fleet.optim, or {_REMEDY}"
        )
    rule = Momentum() if path.endswith("SGD") and group.get("momentum") else _RULES[path]()
    on = [name for name in _UNSUPPORTED if group.get(name) and name not in rule.defaults()]
    if path == _DECOUPLED:
        on = [name for name in ("weight_decay", *on) if group.get(name) and name != "decoupled_weight_decay"]
    if "momentum" not in rule.defaults() and group.get("momentum"):
        on.append("momentum")
    if on:
        found = ", ".join(f"{name}={group[name]}" for name in on)
        raise ConfigurationError(
            f"table {table}: rows cannot be stepped as {path} does with {found}; expected that option to be "
            f"off, or {_REMEDY}"
        )
    return rule, options_of(rule, group)


def options_of(rule: RowRule, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a rule, as set in a param group."""
    return {name: group[name] for name in rule.defaults() if name in group}
