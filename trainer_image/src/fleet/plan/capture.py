"""Capture of a training specification from a script's PyTorch objects, without running them."""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from fleet.errors import TranspileError
from fleet.plan.clipping import GradClip, check_grad_clip, in_floats
from fleet.plan.elementwise import try_out
from fleet.plan.optimizers import class_path, read_hyper_parameters
from fleet.plan.source import Source, parameter_names
from fleet.plan.spec import LOSS, GroupSpec, ParameterSpec, TrainingSpec
from fleet.plan.tables import find_tables, placeholders_of, table_spec

__all__ = ["capture_loop", "capture_step"]


def capture_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    grad_clip: GradClip | None = None,
    feeds: tuple[str, ...] | None = None,
) -> tuple[TrainingSpec, Source]:
    """Capture a training step for an executor to run; see `fleet.fluid.Program.capture`.

    Parameters
    ----------
    model : torch.nn.Module
    loss_fn : callable
    optimizer : torch.optim.Optimizer
    grad_clip : ClipGradByValue, ClipGradByNorm or ClipGradByGlobalNorm, optional
    feeds : tuple of str, optional
        The names of the loss function's arguments after the model; by default those in its signature.

    Raises
    ------
    TranspileError
        The step cannot be captured; the message gives the cause.
    """
    if not isinstance(model, torch.nn.Module):
        raise TranspileError(f"capture needs a torch.nn.Module as its model, found {_kind(model)}")
    named = _feeds(loss_fn) if feeds is None else feeds
    return _capture(optimizer, model, loss_fn, named, grad_clip, None)


def capture_loop(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    grad_clip: GradClip | None = None,
    trained: Collection[torch.nn.Parameter] | None = None,
) -> tuple[TrainingSpec, Source]:
    """Capture the training step of a loop that calls ``optimizer.step()`` itself.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    model : torch.nn.Module, optional
        Provides the names of the parameters, and the order of their creation.
    grad_clip : ClipGradByValue, ClipGradByNorm or ClipGradByGlobalNorm, optional
    trained : collection of Parameter, optional
        The parameters that trainers update without servers, whether or not they require a gradient at the
        moment.

    Raises
    ------
    TranspileError
        The step cannot be captured; the message gives the cause.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TranspileError(f"model must be a torch.nn.Module or None, found {_kind(model)}")
    return _capture(optimizer, model, None, (), grad_clip, trained)


def _capture(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    loss_fn: Callable[..., Any] | None,
    feeds: tuple[str, ...],
    grad_clip: GradClip | None,
    trained: Collection[torch.nn.Parameter] | None,
) -> tuple[TrainingSpec, Source]:
    _check_optimizer(optimizer)
    if grad_clip is not None:
        check_grad_clip("grad_clip", grad_clip)
    if model is not None:
        _refuse_sparse_modules(model)
    tables = find_tables(optimizer, model, served=trained is None)
    names, named = parameter_names(optimizer, model)
    _refuse_shared_memory(names)
    group_of = _trainable(optimizer, names, placeholders_of(tables), trained)
    groups = tuple(_group(optimizer, index, group_of) for index in range(len(optimizer.param_groups)))

    # Creation order is the order in the model if it is known, else in the optimizer.
    ordered = list(model.parameters()) if model is not None else list(group_of)
    parameters = {names[parameter]: parameter for parameter in ordered if parameter in group_of}
    _check_names(feeds, parameters, {table.name for table in tables})
    used = set(group_of.values())
    spec = TrainingSpec(
        parameters=tuple(
            ParameterSpec(name, tuple(each.shape), str(each.dtype).removeprefix("torch."), group_of[each])
            for name, each in parameters.items()
        ),
        groups=tuple(group for group in groups if group.index in used),
        tables=tuple(map(table_spec, tables)),
        clip=in_floats(grad_clip) if grad_clip is not None and parameters else None,
        feeds=feeds,
    )
    return spec, Source(optimizer, parameters, model, loss_fn, named, tables)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _feeds(loss_fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments of `loss_fn` that follow the model."""
    if not callable(loss_fn) or isinstance(loss_fn, torch.nn.Module):
        raise TranspileError(
            f"loss_fn must be a function called as loss_fn(model, **feed), found {_kind(loss_fn)}: a program "
            "computes its loss in each step, so pass the function that computes it, as in def cost(model, "
            "x, y): return mse_loss(model(x), y), and then minimize(cost)"
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


def _check_names(feeds: tuple[str, ...], parameters: Collection[str], tables: Collection[str]) -> None:
    """Raise an error if two feeds, parameters or tables share a name."""
    for name in feeds:
        if name in parameters or name == LOSS:
            other = "one of the model's parameters" if name in parameters else "the result"
            raise TranspileError(f"loss_fn's argument {name} has the name of {other}; rename it")
    if LOSS in parameters:
        raise TranspileError(f"a parameter is named {LOSS!r}, as the result of the step is; rename it")
    for name in sorted(tables):
        if name in parameters or name in feeds:
            raise TranspileError(f"a table and a parameter or an input are named {name!r}; rename one")


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TranspileError(
            f"no optimizer: expected an instance of a torch.optim class, found {_kind(optimizer)}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TranspileError(
            "LBFGS evaluates the model several times within one step, which parameter servers do not "
            "support; use a first-order optimizer such as SGD or Adam"
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
    """Raise an error if Parameters share memory, because two servers would update the same elements."""
    spans = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.numel() * parameter.element_size(), name)
        for parameter, name in names.items()
        if not is_lazy(parameter) and parameter.numel() and parameter.is_contiguous()
    )
    # The spans are sorted by address: if any two overlap, so do two neighbours.
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
    """Return the param group of each trained parameter, skipping the placeholders of tables."""
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
) -> GroupSpec:
    options = read_hyper_parameters(optimizer, optimizer.param_groups[index])
    dtypes = {parameter.dtype for parameter, group in group_of.items() if group == index}
    found = try_out(optimizer, index, Counter(group_of.values()), dtypes)
    path = class_path(type(optimizer))
    return GroupSpec(index, path, options, found.elementwise, found.refusal, found.tensors)
