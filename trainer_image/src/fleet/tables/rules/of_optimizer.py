"""Which row rule does what a torch.optim class does."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from fleet.errors import ConfigurationError
from fleet.tables.rules.adagrad import Adagrad
from fleet.tables.rules.adam import Adam
from fleet.tables.rules.interface import RowRule
from fleet.tables.rules.rmsprop import RMSprop
from fleet.tables.rules.sgd import SGD, Momentum

__all__ = ["options_of", "rule_of"]

_RULES: Final[Mapping[str, Callable[[], RowRule]]] = {
    "torch.optim.sgd.SGD": SGD,
    "torch.optim.adagrad.Adagrad": Adagrad,
    "torch.optim.adam.Adam": Adam,
    "torch.optim.sparse_adam.SparseAdam": Adam,
    "torch.optim.adamw.AdamW": Adam,
    "torch.optim.rmsprop.RMSprop": RMSprop,
}
_NOT_HERE: Final = ("dampening", "amsgrad", "maximize", "centered", "decoupled_weight_decay")
"""Options of these classes that no rule has; each must be off."""
_DECOUPLED: Final = "torch.optim.adamw.AdamW"
"""Without decay it is Adam; its decay is another than that of the rules."""
_INSTEAD: Final = "give the table a rule of its own: rule=fleet.tables.rules.…"


def rule_of(table: str, optimizer_class: type, group: Mapping[str, Any]) -> tuple[RowRule, dict[str, Any]]:
    """Return the rule that steps rows as a class of torch.optim would, and its options.

    Parameters
    ----------
    table : str
        For messages.
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
            f"SparseAdam or RMSprop of torch.optim, or {_INSTEAD}"
        )
    rule = Momentum() if path.endswith("SGD") and group.get("momentum") else _RULES[path]()
    on = [name for name in _NOT_HERE if group.get(name)]
    if path == _DECOUPLED:
        on = [name for name in ("weight_decay", *on) if group.get(name) and name != "decoupled_weight_decay"]
    if "momentum" not in rule.defaults() and group.get("momentum"):
        on.append("momentum")
    if on:
        found = ", ".join(f"{name}={group[name]}" for name in on)
        raise ConfigurationError(
            f"table {table}: rows cannot be stepped as {path} does it with {found}; expected that to be off, "
            f"or {_INSTEAD}"
        )
    return rule, options_of(rule, group)


def options_of(rule: RowRule, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a param group says of a rule's options."""
    return {name: group[name] for name in rule.defaults() if name in group}
