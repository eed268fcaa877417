"""A built program as a PyTorch module with an optimizer, so that the runtime can train it.

`bind` creates both when the program is first run or transpiled. The module has a parameter for each parameter
of the program, under the same name, and its `forward` computes the program's variables.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleet.errors import ConfigurationError, TranspileError
from fleet.fluid.computation import Computation
from fleet.fluid.ir import Operator, OpRole
from fleet.fluid.operators.rows import is_distributed, padded
from fleet.fluid.program import Program
from fleet.fluid.scope import Scope
from fleet.fluid.training import Training
from fleet.nn.embedding import DistributedTable, take
from fleet.optim import SGD
from fleet.plan import DistributeTranspilerConfig
from fleet.plan.capture import capture_step
from fleet.plan.clipping import ClipGradByValue, GradClip, clip_gradients
from fleet.tables import Constant as TableConstant
from fleet.tables import FirstValues, Normal, Uniform
from fleet.tables.rules import PaddleSGD

__all__ = ["ProgramModule", "bind", "feed_of", "first_values", "share_state", "starts_of", "values_of"]

Fed = Mapping[str, tuple[Tensor, Sequence[Tensor]]]


class ProgramModule(nn.Module):
    """A module whose forward pass runs a built program's operators on named parameters.

    Parameters
    ----------
    program : Program
        A minimized program.
    scope : Scope
        Holds the values of its persistable variables; the module's parameters replace them there.
    tables : collection of str
        The parameters that are tables on parameter servers, whose rows are fetched at each look-up.
    copied : collection of str
        The parameters that are tables on parameter servers, of which each trainer has a copy.
    averaged : collection of str
        The parameters whose gradients are dense although their look-ups are ``is_sparse``.

    Attributes
    ----------
    retained : collection of str
        The variables whose gradients must be available after the next backward pass.
    fetched : collection of str
        The variables whose values are wanted from the next step.
    sparse_weights : list of Parameter
        The parameters in `copied`.
    startup : Program or None
        The program of its initial values.
    started : bool
        Whether the initial values have been computed.
    tables : mapping of str to DistributedTable
    plain : torch.optim.Optimizer or None
        The optimizer of the tables that the program's own optimizer does not step; see `Trained.plain`.
    untrained : sequence of Parameter
        The parameters that have gradients although no optimizer steps them.

    Notes
    -----
    Like the parameters that are not trained, such as batch_norm's moving statistics, the other variables that
    steps change are frozen parameters once they have values (`hold_state`): checkpoints contain both.
    """

    def __init__(
        self,
        program: Program,
        scope: Scope,
        tables: Collection[str] = (),
        copied: Collection[str] = (),
        averaged: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.scope = scope
        self.startup = program.startup_program
        self.started = False
        variables = program.global_block().all_parameters()
        plain = _plain_rates(program, scope) if tables else {}
        starts = starts_of(program.startup_program)
        self.tables = {
            each.name: _table(each, scope, plain.get(each.name), starts.get(each.name))
            for each in variables
            if each.name in tables
        }
        look_ups = {name: partial(_look_up, table) for name, table in self.tables.items()}
        scope.look_ups |= look_ups  # for the programs of tests
        dense = {name: partial(self._look_up_dense, name) for name in averaged}
        self.computation = Computation(program, {**look_ups, **dense})
        self.retained: Collection[str] = ()
        self.fetched: Collection[str] = ()
        self.plain: torch.optim.Optimizer | None = None
        self.untrained: Sequence[nn.Parameter] = ()
        self._rates: list[tuple[dict[str, Any], str, float]] = []
        self._counters: dict[str, float] = {}
        for variable in variables:
            if variable.name in self.tables:
                continue
            # Another program in this scope may have had a table of this name.
            scope.look_ups.pop(variable.name, None)
            known = scope.values.get(variable.name)
            if known is None:
                known = torch.zeros(variable.shape, dtype=getattr(torch, variable.dtype))
            if not isinstance(known, nn.Parameter):
                known = nn.Parameter(known.detach(), requires_grad=False)
            known.requires_grad_(known.is_floating_point() and variable.trainable)
            # Not register_parameter(), which refuses names with dots.
            self._parameters[variable.name] = scope.values[variable.name] = known
        self.sparse_weights = [self.named[name] for name in copied]

    @property
    def named(self) -> Mapping[str, nn.Parameter]:
        """The parameters by name."""
        return {name: each for name, each in self._parameters.items() if each is not None}

    @property
    def distributed_tables(self) -> tuple[DistributedTable, ...]:
        """The tables on parameter servers."""
        return tuple(self.tables.values())

    def forward(self, feed: Fed) -> dict[str, Any]:
        """Run the forward operators; return the variables that they compute.

        Parameters
        ----------
        feed : mapping of str to (Tensor, sequence of Tensor)
            The data by name, with the lengths of its sequences at each level.
        """
        if self.plain is not None:
            self.plain.zero_grad()
        for parameter in self.untrained:
            parameter.grad = None
        values = {name: value for name, (value, _) in feed.items()}
        lengths = {name: of for name, (_, of) in feed.items()}
        held = values_of(self.computation, self.scope)
        found = self.computation.run(held, values, lengths, self.retained, self.fetched)
        for name in self.computation.writes:
            self.scope.set(name, found[name].detach())
        for group, name, factor in self._rates:
            rate = found[name] if name in found else self.scope.values[name]
            group["lr"] = float(rate) * factor
        return found

    def hold_state(self) -> None:
        """Register the initialized variables that steps change as this module's state."""
        for name in self.computation.writes:
            if name not in self._parameters:
                value = self.scope.values[name].detach()
                self._parameters[name] = self.scope.values[name] = nn.Parameter(value, requires_grad=False)
        increments = _increments(self.computation.program.global_block().ops)
        self._counters = {name: each for name, each in increments.items() if name in self._parameters}

    def count_on(self, steps: int) -> None:
        """Advance the step counters, such as a schedule's, by a number of steps made without this module."""
        for name, increment in self._counters.items():
            value = self.scope.values[name]
            value.add_(steps * (increment if value.is_floating_point() else int(increment)))

    def _look_up_dense(self, name: str, ids: Tensor, padding_idx: int) -> Tensor:
        weight, ids = self.scope.values[name], ids.squeeze(-1)
        return padded(functional.embedding(ids, weight), ids, padding_idx, keeps=True)

    def set_rates(self, optimizer: torch.optim.Optimizer, rate: str, factors: Sequence[float]) -> None:
        """Make each forward pass set the learning rates of the optimizer's param groups.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
        rate : str
            The variable of the learning rate.
        factors : sequence of float
            The factor of each param group.
        """
        self._rates += [
            (group, rate, factor) for group, factor in zip(optimizer.param_groups, factors, strict=True)
        ]


class _Loss:
    """Runs a built program's module on a feed, and returns the computed variables and the loss."""

    def __init__(self, loss: str) -> None:
        self._loss = loss

    def __call__(self, module: ProgramModule, **feed: Any) -> dict[str, Any]:
        found = module(feed)
        return {**found, "loss": found[self._loss]}


def _increments(ops: Iterable[Operator]) -> dict[str, float]:
    """Return the amount by which an operator increments each counter, keyed by the counter's name."""
    return {
        op.outputs["Out"][0]: float(op.attrs["step"])  # type: ignore[arg-type]
        for op in ops
        if op.type == "increment" and op.inputs["X"] == op.outputs["Out"]
    }


def starts_of(startup: Program | None) -> dict[str, Operator]:
    """Return a startup program's operators, keyed by the variable that each initializes."""
    ops = startup.global_block().ops if startup is not None else []
    return {name: op for op in ops for name in op.output_arg_names}


class _Schedule:
    """A table's learning rate as a function of the number of updates."""

    def __init__(self, program: Program, rate: str, factor: float, scope: Scope) -> None:
        schedule = program.shallow_copy()
        schedule.global_block().ops[:] = _schedule_of(program)
        self._computation = Computation(schedule)
        self._rate, self._factor, self._scope = rate, factor, scope
        starts: dict[str, Any] = starts_of(program.startup_program)
        self._counters = [
            (program.global_block().var(name), starts[name].attrs["value"], increment)
            for name, increment in _increments(_schedule_of(program)).items()
        ]
        self._known = 0, 0.0  # the last update and its rate, because an update asks twice

    def __call__(self, update: int) -> float:
        known, rate = self._known
        if update != known:
            counted = {
                counter.name: torch.tensor([first + (update - 1) * each], dtype=getattr(torch, counter.dtype))
                for counter, first, each in self._counters
            }
            values = values_of(self._computation, self._scope, counted)
            with torch.no_grad():
                found = self._computation.run(values, {}, {})
            rate = float(found[self._rate]) * self._factor
            self._known = update, rate
        return rate


def _schedule_of(program: Program) -> list[Operator]:
    """Return the operators that compute the learning-rate schedule."""
    return [op for op in program.global_block().ops if op.attrs.get("op_role") == int(OpRole.SCHEDULE)]


def _plain_rates(program: Program, scope: Scope) -> "dict[str, float | _Schedule]":
    """Return the learning rates of tables that are updated by SGD regardless of the optimizer.

    Raises
    ------
    ConfigurationError
        A rate is a variable without a schedule, whose value servers do not know.
    """
    training = program.training
    found = {each.name: each.factor for each in training.parameters if each.plain} if training else {}
    if training is None or not found:
        return {}
    rate = training.optimizer.learning_rate
    if isinstance(rate, int | float):
        return {name: float(rate) * factor for name, factor in found.items()}
    if not _increments(_schedule_of(program)):
        raise ConfigurationError(
            f"table {next(iter(found))} has is_distributed=True, so servers step it by SGD as in the "
            f"original, and they do not know the learning rate, which is the variable {rate.name}; expected "
            "a number, a schedule such as layers.exponential_decay, is_sparse=True without is_distributed, "
            "or fluid.optimizer.SGD"
        )
    return {name: _Schedule(program, training.rate, factor, scope) for name, factor in found.items()}


def _table(
    variable: Any, scope: Scope, plain_rate: "float | _Schedule | None", start: Operator | None
) -> DistributedTable:
    """Return the table for a parameter, initialized as in the startup program."""
    ids, width = variable.shape
    name, own = variable.name, {} if plain_rate is None else {"lr": plain_rate}
    first = first_values(start)

    def values() -> tuple[Any, Any]:
        if first is not None and name not in scope.values:
            return np.arange(0), torch.empty(0, width)
        # From here on the servers hold the rows, so the scope gives up its copy.
        return np.arange(ids), scope.values.pop(name).cpu()

    return DistributedTable(
        name,
        width,
        ids,
        first_values=first or TableConstant(),
        rule=PaddleSGD() if own else None,
        options=own,
        warm_start=values,
    )


def first_values(start: Operator | None) -> FirstValues | None:
    """Return a function from an id to its initial row, so that rows can be created on demand.

    Parameters
    ----------
    start : Operator or None
        The operator of the startup program that initializes the table.

    Returns
    -------
    FirstValues or None
        None if the values depend on each other, as random numbers from one seed do. Otherwise the values are
        the same in every run.
    """
    if start is None or start.attrs.get("seed"):
        return None
    attrs: Any = start.attrs
    match start.type:
        case "fill_constant":
            return TableConstant(float(attrs["value"]))
        case "uniform_random" if not attrs.get("diag_num"):
            return Uniform(float(attrs["min"]), float(attrs["max"]))
        case "gaussian_random":
            return Normal(float(attrs["mean"]), float(attrs["std"]))
    return None


def _look_up(table: DistributedTable, ids: Tensor, padding_idx: int) -> Tensor:
    ids = ids.squeeze(-1)
    return padded(take(*table.look_up(ids)), ids, padding_idx, keeps=True)


def bind(
    program: Program,
    scope: Scope,
    config: DistributeTranspilerConfig | None = None,
    *,
    averages: bool = True,
) -> None:
    """Create the PyTorch module, optimizer and plan for a minimized program; later calls do nothing.

    Parameters
    ----------
    program : Program
    scope : Scope
    config : DistributeTranspilerConfig, optional
        The configuration of the job; None if the program trains in this process alone.
    averages : bool
        Whether gradients are averaged over the trainers, and then clipped by norms. Otherwise each trainer
        clips its own gradients.

    Raises
    ------
    ConfigurationError
        The program was not minimized.
    TranspileError
        A part of it cannot be trained.
    """
    if program.source is not None:
        return
    training = program.training
    if training is None:
        raise ConfigurationError(
            "the program has no optimizer; call minimize() of an optimizer of fluid.optimizer with its loss"
        )
    variables = program.global_block().vars
    sparse = [each.name for each in training.parameters if variables[each.gradient].type == "SELECTED_ROWS"]
    served = config is not None and config.mode == "pserver"
    tables, copied = [], []
    if config is not None and served:
        root, fetches = program.global_block(), config.remote_prefetch
        tables = [name for name in sparse if fetches or is_distributed(root, name)]
        copied = [name for name in sparse if name not in tables]
    averaged = [name for name in sparse if config is not None and not served]
    if averaged and training.optimizer.options.get("lazy_mode"):
        raise TranspileError(
            "Adam has lazy_mode=True, and collective training averages whole gradients of is_sparse tables, "
            "which do not say which rows were looked up; expected lazy_mode=False, or parameter servers"
        )
    module = ProgramModule(program, scope, tables, copied, averaged)
    optimizer = _optimizer(training, module)
    trained = {each.name for each in training.parameters}
    module.untrained = [
        each for name, each in module.named.items() if each.requires_grad and name not in trained
    ]
    feeds, clip = module.computation.feeds, training.clip
    if isinstance(clip, ClipGradByValue):
        clip = None  # the optimizer clips by value
    if clip is not None and served and sparse:
        raise TranspileError(
            f"{type(training.clip).__name__} needs the norm of the gradient of {sparse[0]}, whose rows are "
            "on several servers; expected fluid.clip.GradientClipByValue, or layers.embedding without "
            "is_sparse"
        )
    if clip is not None and not averages:
        parameters = [parameter for parameter in module.named.values() if parameter.requires_grad]
        optimizer.register_step_pre_hook(partial(_clip_own, clip, parameters))
        clip = None
    spec, program.source = capture_step(module, _Loss(training.loss), optimizer, clip, feeds)
    program.plan = replace(spec, tables=tuple(replace(each, placed=True) for each in spec.tables))


def _clip_own(clip: GradClip, parameters: Sequence[nn.Parameter], *_: object) -> None:
    clip_gradients(clip, parameters)


def _optimizer(training: Training, module: ProgramModule) -> torch.optim.Optimizer:
    """Return the optimizer, with one param group per combination of rate factor and regularizer."""
    given, clip = training.optimizer.learning_rate, training.clip
    first = float(given) if isinstance(given, int | float) else 1.0  # until a schedule is first computed
    groups: dict[tuple[float, tuple[tuple[str, float], ...]], list[nn.Parameter]] = {}
    for each in (each for each in training.parameters if not each.plain):
        key = each.factor, tuple(sorted(each.regularization.items()))
        table = module.tables.get(each.name)
        parameter = module.named[each.name] if table is None else table.placeholder
        groups.setdefault(key, []).append(parameter)
    optimizer: torch.optim.Optimizer = training.optimizer.torch_class(
        [
            {"params": parameters, "lr": first * factor, **dict(regularization)}
            for (factor, regularization), parameters in groups.items()
        ],
        lr=first,
        clip_value=(clip.low, clip.max) if isinstance(clip, ClipGradByValue) else None,
        **training.optimizer.options,
    )
    module.set_rates(optimizer, training.rate, [factor for factor, _ in groups])
    plain = [each for each in training.parameters if each.plain and each.name in module.named]
    if plain:
        module.plain = steps = SGD([{"params": [module.named[each.name]], "lr": first} for each in plain])
        module.set_rates(steps, training.rate, [each.factor for each in plain])
        optimizer.register_step_post_hook(lambda *_: steps.step())
    return optimizer


def share_state(training: Training, module: ProgramModule, optimizer: torch.optim.Optimizer) -> None:
    """Use the scope's variables as the optimizer's state, so that saving, loading and resetting include them.

    If a checkpoint has been loaded, the variables are first set to the optimizer's values.

    Raises
    ------
    ConfigurationError
        The startup program has not run.
    """
    for each in training.parameters:
        state = optimizer.state[module.named[each.name]]
        for name, variable in each.state.items():
            if variable not in module.scope.values:
                raise _not_started(variable)
            if name in state:
                module.scope.set(variable, state[name])
            state[name] = module.scope.values[variable]


def values_of(
    computation: Computation, scope: Scope, given: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the persistable variables that a computation reads; values in `given` take precedence.

    Raises
    ------
    ConfigurationError
        One of them has no value.
    """
    try:
        held = {**scope.values, **given} if given else scope.values
        return {name: held[name] for name in computation.reads}
    except KeyError as error:
        raise _not_started(str(error.args[0])) from None


def _not_started(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"variable {name} has no value; run the startup program first, "
        "executor.run(fluid.default_startup_program()), or load one with fluid.io"
    )


def feed_of(computation: Computation, feed: Mapping[str, Any], device: torch.device | str) -> Fed:
    """Convert a feed to tensors on a device, each with the lengths of its sequences.

    Raises
    ------
    ConfigurationError
        Data that the program reads is missing, the feed has other names, or an array does not fit.
    """
    variables = computation.program.global_block().vars
    missing = [name for name in computation.feeds if name not in feed]
    foreign = [name for name in feed if name not in variables or not variables[name].is_data]
    if missing or foreign:
        raise ConfigurationError(
            f"feed has {', '.join(sorted(feed)) or 'nothing'}; "
            f"expected the data of the program: {', '.join(computation.feeds) or 'nothing'}"
        )
    return {
        name: _fed(variables[name], feed[name], device, checked=name not in computation.reshaped)
        for name in computation.feeds
    }


def _fed(
    variable: Any, value: Any, device: torch.device | str, *, checked: bool
) -> tuple[Tensor, list[Tensor]]:
    lengths: Any = getattr(value, "recursive_sequence_lengths", list)()
    dtype = getattr(torch, variable.dtype)
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    if tensor.dtype != dtype:
        if tensor.is_floating_point() and not dtype.is_floating_point:
            raise ConfigurationError(
                f"{variable.name} is fed {tensor.dtype}; expected {dtype}, as declared by layers.data"
            )
        tensor = tensor.to(dtype)
    expected = variable.shape
    fits = len(tensor.shape) == len(expected) and all(
        size in (-1, found) for size, found in zip(expected, tensor.shape, strict=True)
    )
    if checked and not fits:
        raise ConfigurationError(
            f"{variable.name} is fed the shape {list(tensor.shape)}; expected {list(expected)}, where -1 is "
            "any size"
        )
    if variable.lod_level and not lengths:
        lengths = [[1] * len(tensor)] * variable.lod_level  # each row is a sequence
    return tensor.to(device), [torch.tensor(level, dtype=torch.int64) for level in lengths]
