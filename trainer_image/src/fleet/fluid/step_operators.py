"""The operators of single-process training: a step, and its startup program.

The model's forward and backward passes are two opaque operators. They are followed by one operator per
trainable parameter that produces its gradient. The last created parameter comes first, which is about the
order in which autograd finishes. Then come the optimize operators, by parameter name as in Paddle:
clipping, coupled weight decay as `scale` and `sum`, and the optimizer. An optimize operator has
Paddle's type, slots and attribute names if Paddle has this optimizer. Otherwise it has the class name
in lower case and PyTorch's option names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from fleet.fluid.ir import Attribute, Block, OpRole, Variable
from fleet.plan.clipping import ClipGradByNorm, ClipGradByValue, GradClip
from fleet.plan.optimizers import HyperParameter
from fleet.plan.spec import LOSS, GroupSpec, ParameterSpec, TableSpec, TrainingSpec

__all__ = ["LOOK_UP_TYPE", "append_startup", "append_step"]

LOOK_UP_TYPE: Final = "lookup_table"


@dataclass(frozen=True)
class _Form:
    """The representation of a PyTorch optimizer in Paddle's programs.

    Attributes
    ----------
    state : mapping of slot to the state variable's suffix
        A state variable has the parameter's shape; only the running powers of beta have one element.
    attributes : mapping of PyTorch's option to Paddle's attributes
        Several attributes make up one tuple.
    """

    state: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_EPSILON = {"eps": ("epsilon",)}
_BETAS = {"betas": ("beta1", "beta2"), **_EPSILON}
_ADAM_STATE = {
    "Moment1": "moment1",
    "Moment2": "moment2",
    "Beta1Pow": "beta1_pow_acc",
    "Beta2Pow": "beta2_pow_acc",
}
_MOMENTUM = _Form({"Velocity": "velocity"}, {"momentum": ("mu",), "nesterov": ("use_nesterov",)})
_FORMS = {
    "torch.optim.adam.Adam": _Form(_ADAM_STATE, _BETAS),
    "torch.optim.adamw.AdamW": _Form(_ADAM_STATE, _BETAS),
    "torch.optim.adagrad.Adagrad": _Form({"Moment": "moment"}, _EPSILON),
    "torch.optim.adamax.Adamax": _Form(
        {"Moment": "moment", "InfNorm": "inf_norm", "Beta1Pow": "beta1_pow_acc"}, _BETAS
    ),
    "torch.optim.rmsprop.RMSprop": _Form(
        {"MeanSquare": "mean_square", "MeanGrad": "mean_grad", "Moment": "momentum"},
        {"alpha": ("decay",), **_EPSILON},
    ),
    "torch.optim.adadelta.Adadelta": _Form(
        {"AvgSquaredGrad": "_avg_squared_grad", "AvgSquaredUpdate": "_avg_squared_update"}, _EPSILON
    ),
    "fleet.optim.Momentum": _Form({"Velocity": "velocity"}, {"momentum": ("mu",)}),
    "fleet.optim.Adagrad": _Form({"Moment": "moment"}),
    "fleet.optim.Adam": _Form(_ADAM_STATE),
    "fleet.optim.RMSProp": _Form(
        {"Moment": "momentum", "MeanSquare": "mean_square", "MeanGrad": "mean_grad"}, {"rho": ("decay",)}
    ),
}
"""Forms of optimizers, by class path. A subclass has no form, because it may compute anything."""


def _form_of(group: GroupSpec) -> _Form:
    if group.optimizer == "torch.optim.sgd.SGD":
        return _MOMENTUM if group.kind == "momentum" else _Form()
    return _FORMS.get(group.optimizer, _Form())


def append_step(block: Block, spec: TrainingSpec) -> None:
    """Append a training step's operators to an empty block."""
    for name in spec.feeds:
        block.create_var(Variable(name, (-1,), "any", is_data=True))
    for parameter in spec.parameters:
        block.create_var(
            Variable(parameter.name, parameter.shape, parameter.dtype, persistable=True, is_parameter=True)
        )
    for table in spec.tables:
        _append_look_up(block, table)
    _append_forward_and_backward(block, spec)
    for table in spec.tables:
        _append_row_gradients(block, table)
    for parameter in reversed(spec.parameters):
        _append_gradient(block, parameter)
    for group in spec.groups:
        block.create_var(Variable(_learning_rate(group), (1,), persistable=True))
    for parameter in spec.by_name:
        _append_optimizer(block, parameter, spec.group(parameter.group), spec.clip)


def append_startup(block: Block, variables: Iterable[Variable]) -> None:
    """Append the operators that create a step's persistable variables to an empty block.

    Parameters start with the module's values, and optimizer state with the initial values of torch.optim.
    """
    for variable in variables:
        if not variable.persistable:
            continue
        block.create_var(variable)
        block.append_op(
            "init_parameter" if variable.is_parameter else "init_state",
            outputs={"Out": [variable.name]},
            attrs={"op_role": int(OpRole.FORWARD)},
        )


def _append_look_up(block: Block, table: TableSpec) -> None:
    """Append the operator that looks up a table's rows, which precedes the model's operators."""
    rows = f"{table.name}@ROWS"
    for name in (table.name, rows, f"{table.name}@GRAD"):
        block.create_var(Variable(name, (table.num_embeddings, table.dimension)))
    attrs: Mapping[str, Attribute] = {
        "is_sparse": True,
        "is_distributed": not table.own,
        "table": table.fact,
        "op_role": int(OpRole.FORWARD),
    }
    block.append_op(LOOK_UP_TYPE, {"W": [table.name]}, {"Out": [rows]}, attrs)


def _append_row_gradients(block: Block, table: TableSpec) -> None:
    """Append the operator that computes the gradients of a table's rows."""
    grad = f"{table.name}@GRAD"
    attrs: Mapping[str, Attribute] = {
        "is_distributed": not table.own,
        "table": table.name,
        "op_role": int(OpRole.BACKWARD),
        "op_role_var": [table.name, grad],
    }
    block.append_op("lookup_table_grad", {"X": [f"{LOSS}@GRAD"]}, {"W@GRAD": [grad]}, attrs)


def _append_forward_and_backward(block: Block, spec: TrainingSpec) -> None:
    block.create_var(Variable(LOSS, (1,)))
    block.create_var(Variable(f"{LOSS}@GRAD", (1,)))
    inputs = {"X": spec.feeds, "Param": [parameter.name for parameter in spec.parameters]}
    block.append_op("forward", inputs, {"Loss": [LOSS]}, {"op_role": int(OpRole.FORWARD)})
    block.append_op(
        "backward",
        {**inputs, "Loss": [LOSS]},
        {"Out": [f"{LOSS}@GRAD"]},
        {"op_role": int(OpRole.BACKWARD)},
    )


def _append_gradient(block: Block, parameter: ParameterSpec) -> None:
    block.create_var(Variable(parameter.grad, parameter.shape, parameter.dtype))
    block.append_op(
        "accumulate_grad",
        {"Param": [parameter.name], "X": [f"{LOSS}@GRAD"]},
        {"Grad": [parameter.grad]},
        {"op_role": int(OpRole.BACKWARD), "op_role_var": [parameter.name, parameter.grad]},
    )


def _append_optimizer(
    block: Block, parameter: ParameterSpec, group: GroupSpec, clip: GradClip | None
) -> None:
    name, grad, form = parameter.name, parameter.grad, _form_of(group)
    role: dict[str, Attribute] = {"op_role": int(OpRole.OPTIMIZE), "op_role_var": [name, grad]}
    if clip is not None:
        kind, attrs = _clipping(clip)
        block.append_op(kind, {"X": [grad]}, {"Out": [grad]}, {**attrs, **role})
    decay = group.options.get("weight_decay") if group.coupled else None
    if decay:
        decayed = f"{name}@DECAY"
        block.create_var(Variable(decayed, parameter.shape, parameter.dtype))
        scale: dict[str, Attribute] = {"scale": float(decay)}  # type: ignore[arg-type]
        block.append_op("scale", {"X": [name]}, {"Out": [decayed]}, {**scale, **role})
        block.append_op("sum", {"X": [grad, decayed]}, {"Out": [grad]}, role)
    state = {slot: f"{name}_{suffix}_0" for slot, suffix in form.state.items()}
    for slot, variable in state.items():
        shape = (1,) if slot.endswith("Pow") else parameter.shape
        block.create_var(Variable(variable, shape, parameter.dtype, persistable=True))
    inputs = {"Param": [name], "Grad": [grad], "LearningRate": [_learning_rate(group)]}
    inputs |= {slot: [variable] for slot, variable in state.items()}
    outputs = {"ParamOut": [name]} | {f"{slot}Out": [variable] for slot, variable in state.items()}
    block.append_op(group.kind, inputs, outputs, {**_options(group, form), **role})


def _clipping(clip: GradClip) -> tuple[str, dict[str, Attribute]]:
    """Return the clipping operator's type and its attributes, with Paddle's names."""
    if isinstance(clip, ClipGradByValue):
        return "clip", {"min": clip.low, "max": clip.max}
    kind = "clip_by_norm" if isinstance(clip, ClipGradByNorm) else "clip_by_global_norm"
    return kind, {"max_norm": clip.clip_norm}


def _options(group: GroupSpec, form: _Form) -> dict[str, Attribute]:
    """Return a param group's options as attributes, with Paddle's names where they exist."""
    attrs: dict[str, Attribute] = {"hyper_parameters": list(group.options)}
    for name, value in group.options.items():
        names = form.attributes.get(name, (name,))
        if name == "weight_decay" and group.coupled:
            continue  # separate operators show it
        if isinstance(value, tuple) and len(names) == len(value) > 1:
            attrs.update(zip(names, value, strict=True))
        else:
            attrs[names[0]] = _lists(value)
    attrs |= {"optimizer": group.optimizer, "param_group": group.index, "elementwise": group.elementwise}
    if group.refusal:
        attrs["not_on_servers"] = group.refusal
    if group.tensors:
        attrs["tensors"] = [f"{name}:{dtype}" for name, dtype in group.tensors.items()]
    return attrs


def _lists(value: HyperParameter) -> Attribute:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _learning_rate(group: GroupSpec) -> str:
    return f"learning_rate_{group.index}"
