"""Capture: a PyTorch training step as a Program, read off the objects without running any of them.

The model's forward and backward are two opaque operators. After them each trainable parameter gets its
gradient, last created first, which is about the order in which autograd finishes them; then come the
optimize operators, by parameter name as in the original, with coupled weight decay as `scale` and `sum`
before each.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy

from fleet.errors import TranspileError
from fleet.fluid.clip import clip_attributes, clip_type
from fleet.fluid.ir import Attribute, Block, OpRole, ProgramData, Variable
from fleet.fluid.optimizers import OptimizerForm, attributes_of, form_of
from fleet.fluid.tables import append_look_ups, append_row_gradients
from fleet.plan.clipping import GradClip, check_grad_clip
from fleet.plan.elementwise import try_out
from fleet.plan.optimizers import HyperParameter, class_path, has_coupled_decay, read_hyper_parameters
from fleet.plan.source import Source, parameter_names
from fleet.plan.tables import find_tables, placeholders_of

__all__ = ["LOSS", "capture", "from_optimizer"]

LOSS = "loss"

Built = TypeVar("Built", bound=ProgramData)


@dataclass(frozen=True)
class _Group:
    """A param group as the operators of its parameters show it."""

    index: int
    options: Mapping[str, HyperParameter]
    form: OptimizerForm
    decay: float
    """Coupled weight decay, which operators of its own carry; 0 where there is none."""
    attrs: Mapping[str, Attribute]

    @property
    def learning_rate(self) -> str:
        return f"learning_rate_{self.index}"


def capture(
    make: Callable[[], Built],
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    grad_clip: GradClip | None = None,
) -> Built:
    """Build the program of a step with the empty ones that `make` returns; see `Program.capture`."""
    if not isinstance(model, torch.nn.Module):
        raise TranspileError(f"capture needs a torch.nn.Module as its model, found {_kind(model)}")
    feeds = _feeds(loss_fn)
    return _build(make, optimizer, model, loss_fn, feeds, grad_clip)


def from_optimizer(
    make: Callable[[], Built],
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    grad_clip: GradClip | None = None,
    trained: Collection[torch.nn.Parameter] | None = None,
) -> Built:
    """Build the program of a loop's step, as `capture`; see `Program.from_optimizer`.

    `trained` are the parameters that trainers step without servers, whatever takes a gradient at the moment.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TranspileError(f"model must be a torch.nn.Module or None, found {_kind(model)}")
    return _build(make, optimizer, model, None, (), grad_clip, trained)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _feeds(loss_fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that `loss_fn` takes after the model."""
    if not callable(loss_fn) or isinstance(loss_fn, torch.nn.Module):
        raise TranspileError(
            f"loss_fn must be a function called as loss_fn(model, **feed), found {_kind(loss_fn)}: a program "
            "computes its loss anew in each step, so give it the function that does, as in "
            "def cost(model, x, y): return mse_loss(model(x), y), and then minimize(cost)"
        )
    parameters = list(inspect.signature(loss_fn).parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise TranspileError("loss_fn's first argument must be the model: loss_fn(model, **feed)")
    for parameter in parameters[1:]:
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise TranspileError(
                f"loss_fn's argument {parameter} has no name of its own to feed; "
                "name each input, as in loss_fn(model, x, y)"
            )
    return tuple(parameter.name for parameter in parameters[1:])


def _build(
    make: Callable[[], Built],
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    loss_fn: Callable[..., Any] | None,
    feeds: tuple[str, ...],
    grad_clip: GradClip | None,
    trained: Collection[torch.nn.Parameter] | None = None,
) -> Built:
    _check_optimizer(optimizer)
    if grad_clip is not None:
        check_grad_clip("grad_clip", grad_clip)
    if model is not None:
        _refuse_sparse_modules(model)
    tables = find_tables(optimizer, model, served=trained is None)
    names, named = parameter_names(optimizer, model)
    _refuse_shared_memory(names)
    group_of = _trainable(optimizer, names, placeholders_of(tables), trained)
    groups = [_group(optimizer, index, group_of) for index in range(len(optimizer.param_groups))]

    # Creation order is the model's where one is known, else the optimizer's.
    ordered = list(model.parameters()) if model is not None else list(group_of)
    parameters = {names[parameter]: parameter for parameter in ordered if parameter in group_of}

    for name in feeds:
        if name in parameters or name == LOSS:
            other = "one of the model's parameters" if name in parameters else "the result"
            raise TranspileError(f"loss_fn's argument {name} has the name of {other}; rename it")
    if LOSS in parameters:
        raise TranspileError(f"a parameter is named {LOSS!r}, as the result of the step is; rename it")

    program, startup = make(), make()
    block = program.global_block()
    for name in feeds:
        block.create_var(Variable(name, (-1,), "any", is_data=True))
    for name, parameter in parameters.items():
        block.create_var(_parameter(name, parameter))
    append_look_ups(block, tables)
    _forward_and_backward(block, feeds)
    append_row_gradients(block, tables, f"{LOSS}@GRAD")
    for name in reversed(parameters):
        _accumulate(block, name)
    for index in sorted({group_of[parameter] for parameter in parameters.values()}):
        block.create_var(Variable(groups[index].learning_rate, (1,), persistable=True))
    for name in sorted(parameters):
        _optimize(block, name, groups[group_of[parameters[name]]], grad_clip)
    _start_up(startup.global_block(), program)

    program.startup_program = startup
    program.source = startup.source = Source(optimizer, parameters, model, loss_fn, named, tables)
    return program


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TranspileError(
            f"no optimizer: expected an instance of a torch.optim class, found {_kind(optimizer)}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TranspileError(
            "LBFGS evaluates the model several times within one step, which parameter servers cannot; "
            "use a first-order optimizer such as SGD or Adam"
        )


def _refuse_sparse_modules(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "is_distributed", False) is True and not hasattr(module, "distributed_tables"):
            raise TranspileError(
                f"module {name or type(module).__name__} has is_distributed=True; "
                "tables on the parameter servers are fleet.nn.DistributedEmbedding; use that, or "
                "is_distributed=False"
            )
        own = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if getattr(module, "sparse", False) is True and not own:
            raise TranspileError(
                f"module {name or type(module).__name__} has sparse=True; "
                "sparse gradients are those of torch.nn.Embedding and EmbeddingBag: use one, or sparse=False"
            )


def _refuse_shared_memory(names: Mapping[torch.nn.Parameter, str]) -> None:
    """Refuse two Parameters over the same elements: one server would step what another one holds too."""
    spans = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.numel() * parameter.element_size(), name)
        for parameter, name in names.items()
        if not is_lazy(parameter) and parameter.numel() and parameter.is_contiguous()
    )
    for (_, end, one), (begin, _, other) in pairwise(spans):
        if 0 < begin < end:
            raise TranspileError(
                f"parameters {one} and {other} share memory, but are two Parameters; to tie them, make them "
                "one, as in head.weight = embedding.weight"
            )


def _trainable(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    placeholders: frozenset[int],
    trained: Collection[torch.nn.Parameter] | None,
) -> dict[torch.nn.Parameter, int]:
    """Return the param group's index of each parameter that is trained; `placeholders` stand for tables."""
    group_of: dict[torch.nn.Parameter, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) in placeholders:
                continue
            if is_lazy(parameter):
                raise TranspileError(
                    f"parameter {position} of the optimizer's param group {index} has no shape yet; "
                    "run the lazy module once on a batch before it is captured"
                )
            if parameter not in names:
                raise TranspileError(
                    f"parameter {position} of the optimizer's param group {index}, of shape "
                    f"{list(parameter.shape)}, is not one of the model's; give the model that owns it"
                )
            if parameter.requires_grad if trained is None else parameter in trained:
                group_of[parameter] = index
    if not group_of and not placeholders:
        raise TranspileError(
            "the optimizer holds no parameter with requires_grad=True: there is nothing to train"
        )
    return group_of


def _group(
    optimizer: torch.optim.Optimizer, index: int, group_of: Mapping[torch.nn.Parameter, int]
) -> _Group:
    optimizer_class = type(optimizer)
    options = read_hyper_parameters(optimizer, optimizer.param_groups[index])
    form = form_of(optimizer_class, options)
    coupled = has_coupled_decay(optimizer_class, options)
    attrs = attributes_of(form, options, without={"weight_decay"} if coupled else ())
    dtypes = {parameter.dtype for parameter, group in group_of.items() if group == index}
    found = try_out(optimizer, index, Counter(group_of.values()), dtypes)
    attrs |= {
        "optimizer": class_path(optimizer_class),
        "param_group": index,
        "elementwise": found.elementwise,
    }
    if found.refusal:
        attrs["not_on_servers"] = found.refusal
    if found.tensors:
        attrs["tensors"] = [f"{name}:{dtype}" for name, dtype in found.tensors.items()]
    decay = options.get("weight_decay", 0.0) if coupled else 0.0
    return _Group(index, options, form, float(decay), attrs)  # type: ignore[arg-type]


def _parameter(name: str, parameter: torch.nn.Parameter) -> Variable:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Variable(name, tuple(parameter.shape), dtype, persistable=True, is_parameter=True)


def _forward_and_backward(block: Block, feeds: tuple[str, ...]) -> None:
    parameters = [variable.name for variable in block.all_parameters()]
    block.create_var(Variable(LOSS, (1,)))
    block.create_var(Variable(f"{LOSS}@GRAD", (1,)))
    inputs = {"X": feeds, "Param": parameters}
    block.append_op("forward", inputs, {"Loss": [LOSS]}, {"op_role": int(OpRole.FORWARD)})
    block.append_op(
        "backward", {**inputs, "Loss": [LOSS]}, {"Out": [f"{LOSS}@GRAD"]}, {"op_role": int(OpRole.BACKWARD)}
    )


def _accumulate(block: Block, name: str) -> None:
    parameter = block.var(name)
    block.create_var(Variable(f"{name}@GRAD", parameter.shape, parameter.dtype))
    block.append_op(
        "accumulate_grad",
        {"Param": [name], "X": [f"{LOSS}@GRAD"]},
        {"Grad": [f"{name}@GRAD"]},
        {"op_role": int(OpRole.BACKWARD), "op_role_var": [name, f"{name}@GRAD"]},
    )


def _optimize(block: Block, name: str, group: _Group, grad_clip: GradClip | None) -> None:
    parameter, grad = block.var(name), f"{name}@GRAD"
    role: dict[str, Attribute] = {"op_role": int(OpRole.OPTIMIZE), "op_role_var": [name, grad]}
    if grad_clip is not None:
        attrs = {**clip_attributes(grad_clip), **role}
        block.append_op(clip_type(grad_clip), {"X": [grad]}, {"Out": [grad]}, attrs)
    if group.decay:
        decay = f"{name}@DECAY"
        block.create_var(Variable(decay, parameter.shape, parameter.dtype))
        block.append_op("scale", {"X": [name]}, {"Out": [decay]}, {"scale": group.decay, **role})
        block.append_op("sum", {"X": [grad, decay]}, {"Out": [grad]}, role)
    state = {slot: f"{name}_{suffix}_0" for slot, suffix in group.form.state.items()}
    for slot, variable in state.items():
        shape = (1,) if slot.endswith("Pow") else parameter.shape
        block.create_var(Variable(variable, shape, parameter.dtype, persistable=True))
    inputs = {"Param": [name], "Grad": [grad], "LearningRate": [group.learning_rate]}
    inputs |= {slot: [variable] for slot, variable in state.items()}
    outputs = {"ParamOut": [name]} | {f"{slot}Out": [variable] for slot, variable in state.items()}
    block.append_op(group.form.type, inputs, outputs, {**group.attrs, **role})


def _start_up(block: Block, program: ProgramData) -> None:
    """Fill the startup program: each persistable variable of `program` is created once.

    Parameters start as the module has them; optimizer state starts as torch.optim starts it.
    """
    for variable in program.list_vars():
        if not variable.persistable:
            continue
        block.create_var(variable)
        block.append_op(
            "init_parameter" if variable.is_parameter else "init_state",
            outputs={"Out": [variable.name]},
            attrs={"op_role": int(OpRole.FORWARD)},
        )
