"""How PyTorch's optimizers appear as optimize operators, and how they are read back from them.

An optimize operator has the original's type, slots and attribute names where the original knows the
optimizer, else the class's name in lower case and PyTorch's own option names. Either way the attributes
carry every option of the param group: what `hyper_parameters_of` reads back is what was captured.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fleet.errors import TranspileError
from fleet.program.ir import Attribute, Operator

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = [
    "KERNEL_FLAGS",
    "HyperParameter",
    "OptimizerForm",
    "attributes_of",
    "build_optimizer",
    "class_path",
    "form_of",
    "has_coupled_decay",
    "hyper_parameters_of",
    "read_hyper_parameters",
]

HyperParameter = bool | int | float | str | tuple[float | None, ...] | None

KERNEL_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that choose how a step is computed, not what: they follow the device."""

_EPSILON = {"eps": ("epsilon",)}
_BETAS = {"betas": ("beta1", "beta2"), **_EPSILON}
_COUPLED = frozenset(
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
)


@dataclass(frozen=True)
class OptimizerForm:
    """The operator that stands for an optimizer.

    Attributes
    ----------
    type : str
        The operator's type.
    state : mapping of slot to the state variable's suffix
        A state has the parameter's shape, except that the running powers of beta have one element.
    attributes : mapping of PyTorch's option to the original's attributes
        Several attributes make up one tuple.
    """

    type: str
    state: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_ADAM_STATE = {
    "Moment1": "moment1",
    "Moment2": "moment2",
    "Beta1Pow": "beta1_pow_acc",
    "Beta2Pow": "beta2_pow_acc",
}
_SGD = OptimizerForm("sgd")
_MOMENTUM = OptimizerForm(
    "momentum", {"Velocity": "velocity"}, {"momentum": ("mu",), "nesterov": ("use_nesterov",)}
)
_FORMS = {
    "torch.optim.adam.Adam": OptimizerForm("adam", _ADAM_STATE, _BETAS),
    "torch.optim.adamw.AdamW": OptimizerForm("adamw", _ADAM_STATE, _BETAS),
    "torch.optim.adagrad.Adagrad": OptimizerForm("adagrad", {"Moment": "moment"}, _EPSILON),
    "torch.optim.adamax.Adamax": OptimizerForm(
        "adamax", {"Moment": "moment", "InfNorm": "inf_norm", "Beta1Pow": "beta1_pow_acc"}, _BETAS
    ),
    "torch.optim.rmsprop.RMSprop": OptimizerForm(
        "rmsprop",
        {"MeanSquare": "mean_square", "MeanGrad": "mean_grad", "Moment": "momentum"},
        {"alpha": ("decay",), **_EPSILON},
    ),
    "torch.optim.adadelta.Adadelta": OptimizerForm(
        "adadelta",
        {"AvgSquaredGrad": "_avg_squared_grad", "AvgSquaredUpdate": "_avg_squared_update"},
        _EPSILON,
    ),
}


def class_path(optimizer_class: type) -> str:
    """Return the importable name of a class: ``torch.optim.sgd.SGD``."""
    return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"


def form_of(optimizer_class: type, options: Mapping[str, HyperParameter]) -> OptimizerForm:
    """Return the form of an optimizer whose param group has these options.

    Only the classes themselves have the original's forms: a subclass may compute anything.
    """
    return _form_at(class_path(optimizer_class), bool(options.get("momentum")))


def _form_at(path: str, has_momentum: bool) -> OptimizerForm:
    if path == "torch.optim.sgd.SGD":
        return _MOMENTUM if has_momentum else _SGD
    return _FORMS.get(path) or OptimizerForm(path.rpartition(".")[2].lower())


def has_coupled_decay(optimizer_class: type, options: Mapping[str, HyperParameter]) -> bool:
    """Whether weight decay, if any, is added to the gradient before anything else happens to it."""
    return class_path(optimizer_class) in _COUPLED and not options.get("decoupled_weight_decay", False)


def read_hyper_parameters(optimizer: "Optimizer", group: Mapping[str, Any]) -> dict[str, HyperParameter]:
    """Return a param group's options as plain values.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Its defaults say which entries of the group are options; a scheduler's own entries are not.
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
    if getattr(value, "ndim", None) == 0:  # a tensor, or one of numpy's numbers
        number: HyperParameter = value.item()  # type: ignore[attr-defined]
        return number
    raise TranspileError(
        f"{type(optimizer).__name__}'s option {name} is a {type(value).__name__}; parameter servers build "
        "the optimizer anew, so each option must be a number, a string, a flag, None or a tuple of these"
    )


def attributes_of(
    form: OptimizerForm, options: Mapping[str, HyperParameter], *, without: Iterable[str] = ()
) -> dict[str, Attribute]:
    """Return the options as an operator's attributes, under the original's names where it has them.

    Parameters
    ----------
    form : OptimizerForm
    options : mapping of PyTorch's option to value
    without : iterable of str
        Options that other operators carry.

    Returns
    -------
    dict
        The attributes, and under ``hyper_parameters`` the names of all options, for reading them back.
    """
    left_out = frozenset(without)
    attrs: dict[str, Attribute] = {"hyper_parameters": list(options)}
    for name, value in options.items():
        names = form.attributes.get(name, (name,))
        if name in left_out:
            continue
        if isinstance(value, tuple) and len(names) == len(value) > 1:
            attrs.update(zip(names, value, strict=True))
        else:
            attrs[names[0]] = _lists(value)
    return attrs


def _lists(value: HyperParameter) -> Attribute:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _tuples(value: Attribute) -> HyperParameter:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value  # type: ignore[arg-type,return-value]


def hyper_parameters_of(op: Operator) -> dict[str, HyperParameter]:
    """Return the options that an optimize operator carries, by PyTorch's names.

    Parameters
    ----------
    op : Operator
        An optimize operator.

    Returns
    -------
    dict of option to value
        Without the options that other operators carry.
    """
    renames = _form_at(op.attr("optimizer"), op.type == "momentum").attributes
    options: dict[str, HyperParameter] = {}
    for name in op.attr("hyper_parameters"):
        names = renames.get(name, (name,))
        if not all(op.has_attr(part) for part in names):
            continue
        values = [op.attr(part) for part in names]
        options[name] = _tuples(values if len(values) > 1 else values[0])
    return options


def build_optimizer(
    optimizer_class: "type[Optimizer]",
    parameters: "Iterable[Tensor] | Iterable[dict[str, Any]]",
    options: Mapping[str, Any],
) -> "Optimizer":
    """Build an optimizer as the user built theirs.

    Parameters
    ----------
    optimizer_class : type
        The user's class.
    parameters : iterable of tensors, or of param groups
        Leaf tensors; param groups name theirs and nothing else.
    options : mapping of option to value
        The user's param group. Those that the constructor does not take, because the class sets them
        itself, are put into the group afterwards.

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
