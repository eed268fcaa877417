"""How PyTorch's optimizers appear as optimize operators, and how they are read back from them.

An optimize operator has the original's type, slots and attribute names where the original knows the
optimizer, else the class's name in lower case and PyTorch's own option names. Either way the attributes
carry every option of the param group: what `hyper_parameters_of` reads back is what was captured.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fleet.fluid.ir import Attribute, Operator
from fleet.plan.optimizers import HyperParameter, class_path

__all__ = ["OptimizerForm", "attributes_of", "form_of", "hyper_parameters_of"]

_EPSILON = {"eps": ("epsilon",)}
_BETAS = {"betas": ("beta1", "beta2"), **_EPSILON}


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


def form_of(optimizer_class: type, options: Mapping[str, HyperParameter]) -> OptimizerForm:
    """Return the form of an optimizer whose param group has these options.

    Only the classes themselves have the original's forms: a subclass may compute anything.
    """
    return _form_at(class_path(optimizer_class), bool(options.get("momentum")))


def _form_at(path: str, has_momentum: bool) -> OptimizerForm:
    if path == "torch.optim.sgd.SGD":
        return _MOMENTUM if has_momentum else _SGD
    return _FORMS.get(path) or OptimizerForm(path.rpartition(".")[2].lower())


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
