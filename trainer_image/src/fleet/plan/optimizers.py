"""Optimizers as data: their classes by path, and the options of their param groups as plain values."""

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fleet.errors import TranspileError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = [
    "KERNEL_FLAGS",
    "HyperParameter",
    "build_optimizer",
    "class_path",
    "has_coupled_decay",
    "kind_of",
    "optimizer_class_at",
    "read_hyper_parameters",
]

HyperParameter = bool | int | float | str | tuple[float | None, ...] | None

KERNEL_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that select a kernel and do not change the mathematics; they depend on the device."""

_COUPLED = frozenset(
    {
        *(
            f"torch.optim.{path}"
            for path in (
                "sgd.SGD",
                "adam.Adam",
                "adagrad.Adagrad",
                "adamax.Adamax",
                "adadelta.Adadelta",
                "asgd.ASGD",
                "nadam.NAdam",
                "radam.RAdam",
                "rmsprop.RMSprop",
            )
        ),
        *(f"fleet.optim.{name}" for name in ("SGD", "Momentum", "Adagrad", "Adam", "RMSProp")),
    }
)


def class_path(optimizer_class: type) -> str:
    """Return the importable name of a class, such as ``torch.optim.sgd.SGD``."""
    return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"


def kind_of(path: str, options: Mapping[str, HyperParameter]) -> str:
    """Return Paddle's name for an optimizer, given its class path and a param group's options.

    If Paddle has none, return the class name in lower case.
    """
    if path == "torch.optim.sgd.SGD":
        return "momentum" if options.get("momentum") else "sgd"
    return path.rpartition(".")[2].lower()


def has_coupled_decay(path: str, options: Mapping[str, HyperParameter]) -> bool:
    """Return whether any weight decay is added to the gradient before the optimizer uses it."""
    return path in _COUPLED and not options.get("decoupled_weight_decay", False)


def optimizer_class_at(path: str, optimizer: "Optimizer | None") -> "type[Optimizer]":
    """Return the class at a path: the given optimizer's class, or one in PyTorch or `fleet.optim`.

    A plan may have been read from text, and text must not choose what is imported.

    Raises
    ------
    TranspileError
        The path names another class.
    """
    if optimizer is not None and class_path(type(optimizer)) == path:
        return type(optimizer)
    module, _, name = path.rpartition(".")
    if module.startswith("torch.optim.") or module == "fleet.optim":
        import torch  # programs need no torch

        import fleet.optim

        found = getattr(torch.optim if module.startswith("torch.") else fleet.optim, name, None)
        if isinstance(found, type) and class_path(found) == path:
            return found
    raise TranspileError(
        f"a param group is stepped by {path}, a class that neither the program nor PyTorch nor fleet.optim "
        "has; give the program the source of a program that was captured with this class: program.source = "
        "captured.source"
    )


def read_hyper_parameters(optimizer: "Optimizer", group: Mapping[str, Any]) -> dict[str, HyperParameter]:
    """Return a param group's options as plain values.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its defaults determine which entries of the group are options; entries that a scheduler has added are
        not.
    group : mapping
        One of the optimizer's param groups.

    Returns
    -------
    dict of option to plain value

    Raises
    ------
    TranspileError
        An option is neither a number, a string, a flag, None, a tensor of one element nor a tuple of these.
    """
    return {name: _plain(optimizer, name, group[name]) for name in optimizer.defaults}


def _plain(optimizer: "Optimizer", name: str, value: object) -> HyperParameter:
    if isinstance(value, tuple | list):
        return tuple(_plain(optimizer, name, item) for item in value)  # type: ignore[misc]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if getattr(value, "ndim", None) == 0:  # a tensor or a NumPy number
        number: HyperParameter = value.item()  # type: ignore[attr-defined]
        return number
    raise TranspileError(
        f"{type(optimizer).__name__}'s option {name} is a {type(value).__name__}; parameter servers rebuild "
        "the optimizer, so each option must be a number, a string, a flag, None or a tuple of these"
    )


def build_optimizer(
    optimizer_class: "type[Optimizer]",
    parameters: "Iterable[Tensor] | Iterable[dict[str, Any]]",
    options: Mapping[str, Any],
) -> "Optimizer":
    """Build an optimizer from the user's class and the options of a param group.

    Parameters
    ----------
    optimizer_class : type
        The user's class.
    parameters : iterable of tensors, or of param groups
        Leaf tensors, or param groups that contain only their parameters.
    options : mapping of option to value
        The options of the user's param group. Those that the constructor does not accept, because the class
        sets them itself, are added to the group afterwards.

    Returns
    -------
    torch.optim.Optimizer
    """
    accepted = inspect.signature(optimizer_class).parameters
    taken: dict[str, Any] = {name: value for name, value in options.items() if name in accepted}
    given: list[Any] = list(parameters)
    optimizer = optimizer_class(given, **taken)
    for group in optimizer.param_groups:
        group.update(options)
    return optimizer
