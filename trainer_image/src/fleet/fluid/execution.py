"""Runs built programs on this process's device, for `fleet.fluid.executor`.

A minimized program is bound to a PyTorch module and an optimizer, and runs like any other training step.
Other programs, such as startup programs and clones for tests, are computed here.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fleet.errors import ConfigurationError
from fleet.fluid.computation import Computation
from fleet.fluid.ir import ProgramData
from fleet.fluid.module import (
    Fed,
    ProgramModule,
    bind,
    feed_of,
    first_values,
    share_state,
    starts_of,
    values_of,
)
from fleet.fluid.operators import GRAD
from fleet.fluid.program import Program
from fleet.fluid.scope import Scope, global_scope
from fleet.plan.source import Source

if TYPE_CHECKING:
    from fleet.parameter_server.trainer.trainer import Trainer

__all__ = [
    "computation_of",
    "compute",
    "feed_of",
    "fetched_gradients",
    "initialize",
    "initialize_once",
    "is_built",
    "module_of",
    "prepare",
    "ready",
    "resume",
    "sequences_of",
    "share_optimizer_state",
    "wanted_gradients",
]


def is_built(program: Program) -> bool:
    """Return whether a program was built with layers, as opposed to captured from PyTorch."""
    return program.plan is None or program.training is not None or program.origin is not None


def compute(program: Program, fed: Fed, names: Sequence[str], device: torch.device | str) -> list[Tensor]:
    """Run a program without training, and return the fetched values.

    Parameters
    ----------
    program : Program
    fed : mapping of str to (Tensor, sequence of Tensor)
        The data on the device; see `feed_of`.
    names : sequence of str
        The variables to return, or gradients if the program has a backward pass.
    device : torch.device or str

    Raises
    ------
    ConfigurationError
        A variable has no value, data is missing, or a name is unknown.
    """
    computation, scope = computation_of(program), global_scope()
    held = values_of(computation, scope)
    gradients = wanted_gradients(names)
    if gradients:
        variables = program.global_block().vars
        for name in gradients & held.keys():
            if variables[name].is_parameter:
                held[name] = held[name].detach().requires_grad_()
    with torch.set_grad_enabled(bool(gradients)):
        found = computation.run(
            held, {name: value for name, (value, _) in fed.items()}, _lengths(fed), gradients, names
        )
        if gradients and computation.loss is not None:
            found[computation.loss].sum().backward()
    for name in computation.writes:
        scope.set(name, found[name].detach().to(device))
    return [fetched_value(name, found, scope) for name in names]


def sequences_of(name: str, computation: Computation, fed: Fed) -> list[list[int]]:
    """Return the lengths of a variable's sequences at each level; empty if its rows form none."""
    source = computation.source_of(name)
    if source is None:
        return []
    data, lost = source
    levels = fed[data][1]
    return [level.tolist() for level in levels[: len(levels) - lost]]


def fetched_value(name: str, found: Mapping[str, Any], scope: Scope) -> Tensor:
    """Return the value of a fetched variable or gradient.

    Raises
    ------
    ConfigurationError
        There is no such value.
    """
    base = name.removesuffix(GRAD)
    if name != base:
        source = found.get(name, found.get(base))
        if isinstance(source, Tensor) and source.grad is not None:
            return source.grad
    elif name in found:
        value: Tensor = found[name]
        return value
    elif name in scope.values:
        return scope.values[name]
    raise ConfigurationError(
        f"fetch_list names {name}, which this program does not compute; expected one of its variables, or a "
        f"variable's name with {GRAD}: the parts of a gradient that is a sum are not computed separately"
    )


def fetched_gradients(
    source: Source, names: Sequence[str], found: Mapping[str, Any], *, local: bool
) -> dict[str, Tensor]:
    """Return the gradients to be fetched from a step of a built program, after its backward pass.

    Parameters
    ----------
    source : Source
        Of any program. For a captured one, the result is empty: the executor fetches its gradients after
        the step.
    names : sequence of str
        The variables to be fetched.
    found : mapping of str to Tensor
        The values that the module has returned.
    local : bool
        Whether this process updates the parameters. In this case, and without clipping, a gradient includes
        the terms of regularizers, which Paddle's operators add to it in place.

    Returns
    -------
    dict of str to Tensor
        By the gradient's name.
    """
    module = source.module
    if not isinstance(module, ProgramModule):
        return {}
    program: Any = module.computation.program
    training, variables = program.training, program.global_block().vars
    terms = {each.gradient: each for each in training.parameters} if local and training.clip is None else {}
    gradients = {}
    for name in names:
        gradient = found[name].grad if name.endswith(GRAD) and name in found else None
        if gradient is None:
            continue
        gradients[name] = gradient.clone()
        if name in terms and variables[name].type != "SELECTED_ROWS":
            with torch.no_grad():
                weight, by = module.named[terms[name].name], terms[name].regularization
                gradients[name] += by.get("weight_decay", 0.0) * weight
                gradients[name] += by.get("l1_decay", 0.0) * torch.sign(weight)
    return gradients


def wanted_gradients(names: Sequence[str]) -> set[str]:
    """Return the variables whose gradients are fetched."""
    return {name.removesuffix(GRAD) for name in names if name.endswith(GRAD)}


def _lengths(fed: Fed) -> dict[str, Sequence[Tensor]]:
    return {name: lengths for name, (_, lengths) in fed.items()}


def computation_of(program: ProgramData) -> Computation:
    """Return a program's computation; cached until its operators or table locations change."""
    variables, known = program.global_block().vars, program.computation
    look_ups = {name: each for name, each in global_scope().look_ups.items() if name in variables}
    made_of = [op for block in program.blocks for op in block.ops], look_ups
    if known is None or known[0] != made_of:
        known = program.computation = made_of, Computation(program, look_ups)
    found: Computation = known[1]
    return found


def initialize(source: Source, device: torch.device | str, *, tables: bool = False) -> None:
    """Compute the initial values of a built program's variables, as part of a job.

    Parameters
    ----------
    source : Source
        Of any program; a captured one already has its initial values.
    device : torch.device or str
    tables : bool
        Whether a parameter server, which initializes the rows of tables, runs in this process.
    """
    module = source.module
    if not isinstance(module, ProgramModule):
        return
    module.to(device)
    module.started = True
    if module.startup is None:
        return
    startup = module.startup.shallow_copy()
    starts = starts_of(startup)
    away = {name for name in module.tables if not tables or first_values(starts.get(name)) is not None}
    block = startup.global_block()
    block.ops[:] = [op for op in block.ops if not set(op.output_arg_names) & away]
    computation = Computation(startup)
    with torch.no_grad():
        found = computation.run(values_of(computation, module.scope), {}, {})
    for name in computation.writes:
        module.scope.set(name, found[name].to(device))
    module.hold_state()


def resume(source: Source, trainer: "Trainer", *, joined: bool = False) -> None:
    """Advance a built program to its trainer's step, after the trainer has joined or loaded a checkpoint.

    Parameters
    ----------
    source : Source
        Of any program; for a captured one, nothing is done.
    trainer : Trainer
    joined : bool
        Whether the trainer has just joined. If training has begun, the trainer then restores the values of
        the newest checkpoint.
    """
    if isinstance(source.module, ProgramModule):
        if joined and trainer.current_step:
            trainer.checkpoints.restore_saved_values()
        source.module.count_on(trainer.current_step - trainer.checkpoints.restored_step)


def initialize_once(source: Source, device: torch.device | str, *, tables: bool = False) -> None:
    """Compute the initial values as `initialize` does, unless they have already been computed."""
    if isinstance(source.module, ProgramModule) and not source.module.started:
        initialize(source, device, tables=tables)


def prepare(program: Program, device: torch.device | str) -> Source:
    """Return the PyTorch objects that train a minimized program in this process.

    Raises
    ------
    ConfigurationError
        The startup program has not run, or the program was bound in another scope.
    """
    new = program.source is None
    if new:
        bind(program, global_scope())
    source = program.source
    assert source is not None  # noqa: S101 - it was bound
    module = module_of(source)
    if new:
        values_of(module.computation, module.scope)
        module.to(device)
        assert program.training is not None  # noqa: S101 - as above
        share_state(program.training, module, source.optimizer)
    return source


def ready(source: Source, feed: Mapping[str, Any], names: Sequence[str], device: Any) -> dict[str, Any]:
    """Make the module retain the gradients to be fetched, and return the arguments of a step."""
    module = module_of(source)
    module.retained, module.fetched = wanted_gradients(names), names
    return dict(feed_of(module.computation, feed, device))


def module_of(source: Source) -> ProgramModule:
    """Return the module of a built program, whose variables are in the current scope."""
    module = source.module
    assert isinstance(module, ProgramModule)  # noqa: S101 - of a built program
    if module.scope is not global_scope():
        raise ConfigurationError(
            "this program trains variables of another scope; run a training program in the scope in which it "
            "first ran or was transpiled"
        )
    return module


def share_optimizer_state(program: Program, source: Source) -> None:
    """Use the scope's variables as the optimizer's state, if this process updates the parameters."""
    training = program.training or (program.origin.training if program.origin is not None else None)
    if training is not None:
        share_state(training, module_of(source), source.optimizer)
