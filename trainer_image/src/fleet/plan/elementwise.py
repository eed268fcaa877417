"""Trials of an optimizer, which show whether servers can run its step, and whether they can do so on slices.

A server updates each parameter, or each slice of it, with a separate optimizer, which it builds from the
options of the param group. The trials therefore test three things: whether updating slices gives the same
result as updating the whole; whether updating parameters together gives the same result as updating each one
alone; and whether the rebuilt optimizer behaves like the user's.
"""

import inspect
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from fleet.plan.optimizers import KERNEL_FLAGS, HyperParameter, build_optimizer, read_hyper_parameters
from fleet.without_dynamo import step_directly

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Findings", "try_out"]

_SHAPES = ((6, 4), (6, 4), (5, 3))
"""The shapes of a trial's parameters. Muon requires two dimensions; some optimizers stack equal shapes."""
_STEPS = 4
"""The default number of steps in a trial, enough for moments and bias corrections to matter."""
_RUNS = ((0.01, 1e-3), (1.0, 1.0), (0.01, 1e3))
"""The runs of a trial: the learning rate and the size of the first gradients of each run.

Clipping takes effect only on large values. An optimizer that fails on large values has already been tried on
the small values, which come first. The user's own rate is not used: a schedule may begin at zero, where every
optimizer looks element-wise.
"""
_GROWTH = 6.0
"""Growth of gradients from step to step, so that the runs cover eight powers of ten."""
_RATES = (0.7, 0.1, 0.05, 0.01, 3e-3, 1e-3, 3e-4, 1e-4)
"""Learning rates, at least one of which gives another result as a float32 number than as a Python number."""

_Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of the trials of one param group.

    Attributes
    ----------
    elementwise : bool
        Whether updating two slices of a tensor is bitwise-identical to updating the whole tensor.
    refusal : str
        Why parameter servers cannot run this step, and what to do about it; empty if they can.
    tensors : mapping of str to str
        The options that are tensors, with their dtypes: a float32 learning rate can give other results than a
        Python number of the same value.
    """

    elementwise: bool
    refusal: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)


def try_out(
    optimizer: "Optimizer", index: int, trained: Mapping[int, int], dtypes: Collection[torch.dtype] = ()
) -> Findings:
    """Test on small tensors whether servers can run the step of one param group, and can do so on slices.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The user's optimizer, which is neither stepped nor changed.
    index : int
        The param group in question.
    trained : mapping of int to int
        The number of trained parameters, by param group. A single parameter cannot be coupled with another.
    dtypes : collection of torch.dtype
        The dtypes of the group's parameters; float32 is always tried.

    Returns
    -------
    Findings
        These include a refusal if the class cannot be built from the group's options, or cannot handle a
        dense gradient. The refusal does not matter if trainers run the optimizer themselves.

    Raises
    ------
    TranspileError
        As for `read_hyper_parameters`.
    """
    kind, group = type(optimizer), optimizer.param_groups[index]
    options = {
        # The trials run on the CPU, where the other kernels may not exist.
        name: False if name in KERNEL_FLAGS - {"foreach"} else value
        for name, value in read_hyper_parameters(optimizer, group).items()
    }
    key = tuple((name, None if _is_rate(name, value) else value) for name, value in options.items())
    with _script_untouched():
        try:
            findings = _try_out(
                kind,  # type: ignore[arg-type] # a class, whose objects mypy takes for unhashable
                key,
                _layout(trained),
                tuple(sorted({torch.float32, *dtypes}, key=str)),
            )
            tensors, of_numbers = _number_types(kind, group, options)
            refusal = findings.refusal or of_numbers or _of_arguments(optimizer, options)
        except Exception as error:  # noqa: BLE001 - a user-defined class may raise anything
            return Findings(False, _FAILS.format(name=kind.__name__, error=error))
    return Findings(findings.elementwise, refusal, tensors)


def _is_rate(name: str, value: object) -> bool:
    return name == "lr" and value is not None


def _layout(trained: Mapping[int, int]) -> tuple[int, ...]:
    """Return the number of parameters in each param group of the trial: at most three in total."""
    counts = [count for count in trained.values() if count]
    if sum(counts) < 2:
        return (1,)
    if len(counts) == 1:
        return (3,)
    return (1, 1, 1) if max(counts) == 1 else (2, 1)


@contextmanager
def _script_untouched() -> Iterator[None]:
    """Isolate a trial from the script's random state, default device and global optimizer hooks.

    Tensors are created on the CPU, regardless of the default device. The script's random numbers stay the
    same, and its global optimizer hooks are not called.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what a script may use
    hooks = [getattr(torch_optimizer, f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        # Without devices, because saving the state of a GPU's generator would create a CUDA context.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@lru_cache(maxsize=128)
def _try_out(
    kind: "type[Optimizer]",
    key: tuple[tuple[str, HyperParameter], ...],
    layout: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> Findings:
    """Run the trial for `try_out`, which caches the result for all learning rates."""
    elementwise = True
    for dtype in dtypes:
        for number, (rate, size) in enumerate(_RUNS):
            options = {name: rate if name == "lr" else value for name, value in key}
            try:
                found = _run(kind, options, layout, *_problem(sum(layout), size, dtype))
            except Exception:
                if number == 0:
                    raise
                continue  # a user-defined class may refuse large gradients or learning rates
            if found.refusal:
                return found
            elementwise = elementwise and found.elementwise
    return Findings(elementwise)


def _run(
    kind: "type[Optimizer]",
    options: _Options,
    layout: Sequence[int],
    starts: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Findings:
    name = kind.__name__
    together = _train(kind, options, layout, starts, gradients)
    apart = [
        _train(kind, options, (1,), [start], [given]) for start, given in zip(starts, gradients, strict=True)
    ]
    if not together.same(_joined(apart)):
        again = _train(kind, options, layout, starts, gradients)
        return Findings(False, (_COUPLES if together.same(again) else _DRAWS).format(name=name))
    served = _train(kind, options, (1,), starts[:1], gradients[:1], served=True)
    if not served.same(apart[0], groups=False):
        changed = ", ".join(apart[0].changed(options))
        return Findings(False, _CHANGES.format(name=name, options=changed))
    half = _SHAPES[0][0] // 2
    slices = [
        _train(kind, options, (1,), [starts[0][part]], [gradients[0][:, part]]).values[0]
        for part in (slice(half), slice(half, None))
    ]
    return Findings(_same(apart[0].values[0], torch.cat(slices)))


_FAILS = (
    "{name} cannot step a dense parameter on a parameter server: {error}; its constructor must take its "
    "options by the names it gives them in param_groups"
)
_DRAWS = (
    "{name} draws random numbers in its step. Each parameter server would draw numbers of its own, so a run "
    "could not be reproduced, or match a run in one process. Use an optimizer that draws none, and add the "
    "noise to the gradients between backward() and optimizer.step(); or use the mode geo, in which each "
    "trainer steps all parameters itself"
)
_COUPLES = (
    "{name} couples parameters: stepping several together gives another result than stepping each alone, as "
    "parameter servers do. To clip gradients by their global norm, set strategy.grad_clip = "
    "fleet.ClipGradByGlobalNorm(max_norm), and use an optimizer that does not clip. Other optimizers of "
    "this kind, such as Prodigy, train in a collective job (from fleet.collective import fleet), or in the "
    "mode geo, in which each trainer steps all parameters itself"
)
_CHANGES = (
    "{name} changes options of its param group in its step ({options}), and parameter servers take the "
    "options of each step from the trainer. Let the optimizer keep its counters in the state of each "
    "parameter; or use a collective job (from fleet.collective import fleet), or the mode geo, in which "
    "each trainer steps all parameters itself"
)


def _problem(
    count: int, size: float, dtype: torch.dtype, steps: int = _STEPS
) -> tuple[list[Tensor], list[Tensor]]:
    """Return initial values and the gradients of each step, which point in similar directions."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    shapes = _SHAPES[:count]
    starts = [normal(*shape).to(dtype) for shape in shapes]
    sizes = (size * _GROWTH ** torch.arange(_STEPS)).repeat(-(-steps // _STEPS)).view(-1, 1, 1)
    gradients = [((normal(*shape) + 0.5 * normal(steps, *shape)) * sizes).to(dtype) for shape in shapes]
    return starts, gradients


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of a trial: each parameter's value, state and group options."""

    values: list[Tensor]
    states: list[_Options]
    groups: list[_Options]

    def same(self, other: "_Outcome", *, groups: bool = True) -> bool:
        return (
            _same(self.values, other.values)
            and _same(self.states, other.states)
            and (not groups or _same(self.groups, other.groups))
        )

    def changed(self, options: _Options) -> list[str]:
        """Return the names of the given options that the steps changed in the first param group."""
        return [name for name, value in options.items() if not _same(self.groups[0][name], value)]


def _joined(apart: Sequence[_Outcome]) -> _Outcome:
    return _Outcome(
        [each.values[0] for each in apart],
        [each.states[0] for each in apart],
        [each.groups[0] for each in apart],
    )


def _train(
    kind: "type[Optimizer]",
    options: _Options,
    layout: Sequence[int],
    starts: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    served: bool = False,
) -> _Outcome:
    """Run a trial; if `served` is True, set the options again before each step, as a server does."""
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    groups, remaining = [], list(parameters)
    for count in layout:
        groups.append({"params": remaining[:count]})
        del remaining[:count]
    optimizer = build_optimizer(kind, groups if len(groups) > 1 else parameters, options)
    for number in range(len(gradients[0])):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient[number].clone()
        if served:
            optimizer.param_groups[0].update(options)
        step_directly(optimizer)
    of_parameter = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    return _Outcome(
        [parameter.detach() for parameter in parameters],
        [dict(optimizer.state.get(parameter, {})) for parameter in parameters],
        [
            {name: value for name, value in of_parameter[id(each)].items() if name != "params"}
            for each in parameters
        ],
    )


def _same(one: Any, other: Any) -> bool:
    """Return whether two results are equal: tensors bitwise except for NaN, and Python numbers by value.

    Tensors must also have the same shape and dtype. A callable equals only itself; other objects are equal
    if they are of one class.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        # 0.0 and -0.0 compare equal, but their signs differ.
        return alike and torch.allclose(one, other, 0.0, 0.0, equal_nan=True) and _signs_equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, int | float | str) and isinstance(other, int | float | str):
        return one == other or (one != one and other != other)
    if callable(one) or callable(other):
        return one is other
    return type(one) is type(other)


def _signs_equal(one: Tensor, other: Tensor) -> bool:
    parts = ((torch.view_as_real(each) if each.is_complex() else each) for each in (one, other))
    return torch.equal(*(each.signbit() & ~each.isnan() for each in parts))


def _number_types(kind: "type[Optimizer]", group: _Options, options: _Options) -> tuple[dict[str, str], str]:
    """Return the dtypes of tensor options, and an error message if a server would change an option's type."""
    tensors: dict[str, str] = {}
    for name in options:
        value = group[name]
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.dtype != torch.float64:  # others act like a number
                tensors[name] = str(value.dtype).removeprefix("torch.")
        elif _has_array(value) and not _computes_as_numbers(kind, name, value, options):
            # A scheduler may change the type of a NumPy number, so its type cannot be relied on.
            return {}, (
                f"{kind.__name__}'s option {name} is {_kind_of(value)}, which gives another result than a "
                f"plain number, and parameter servers receive plain numbers: {options[name]!r}; give {name} "
                "as Python's float"
            )
    return tensors, ""


def _computes_as_numbers(kind: "type[Optimizer]", name: str, value: object, options: _Options) -> bool:
    """Return whether steps are bitwise-identical after an option is converted to plain Python numbers."""
    for rate in _RATES:
        plain: dict[str, Any] = dict(options)
        if "foreach" in plain:  # torch refuses to combine foreach with tensor options
            plain["foreach"] = False
        if _is_rate("lr", plain.get("lr")):
            plain["lr"] = rate
        problem = _problem(1, 1.0, torch.float32, steps=2 * _STEPS)
        found = _train(kind, plain | {name: _like(value, plain[name])}, (1,), *problem)
        if not _same(found.values, _train(kind, plain, (1,), *problem).values):
            return False
    return True


def _has_array(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_array, value))
    return isinstance(value, Tensor | np.generic) and not isinstance(value, float)


def _like(value: Any, plain: Any) -> Any:
    """Convert plain numbers to the types of the corresponding values in `value`."""
    if isinstance(value, tuple | list):
        return tuple(map(_like, value, plain))
    if isinstance(value, Tensor):
        return torch.tensor(plain, dtype=value.dtype, device="cpu")
    # A trial's rates are not integers, and NumPy's integers give the same results as Python's.
    return type(value)(plain) if isinstance(value, np.floating) else plain


def _kind_of(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a tuple with {next(_kind_of(each) for each in value if _has_array(each))} in it"
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _of_arguments(optimizer: "Optimizer", options: _Options) -> str:
    """Return an error message if a constructor argument would not reach the servers, otherwise ""."""
    kind = type(optimizer)
    rebuilt = build_optimizer(kind, [torch.nn.Parameter(torch.zeros(_SHAPES[0]))], options)
    for name in list(inspect.signature(kind).parameters)[1:]:  # the first argument takes the parameters
        for attribute in (name, f"_{name}"):
            ours, theirs = vars(optimizer), vars(rebuilt)
            if name in options or attribute not in ours or attribute not in theirs:
                continue
            given, built = ours[attribute], theirs[attribute]
            if _same(given, built):
                continue
            return (
                f"{kind.__name__}'s argument {name} is {given!r}. Parameter servers rebuild the optimizer "
                "from the options of its param groups, which do not contain this argument, so theirs would "
                f"be {built!r}. Make it an option that the class reads from each param group: "
                f"super().__init__(params, {{..., {name!r}: {name}}})"
            )
    return ""
