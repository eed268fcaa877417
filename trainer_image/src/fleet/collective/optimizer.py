"""The return type of ``fleet.distributed_optimizer``: the script's own optimizer with ``no_sync()``."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from fleet.collective.copies import Copies
from fleet.collective.steps import hyper_parameters
from fleet.collective.synchronizer import Synchronizer
from fleet.errors import ConfigurationError
from fleet.plan.source import LeftOut
from fleet.process.finite import FiniteCheck

__all__ = ["Distributed", "distribute", "named_parameters"]


class Distributed:
    """A mix-in that adds fleet's methods to the class of the script's optimizer.

    Attributes
    ----------
    fleet_synchronizer : Synchronizer
    fleet_minimize : callable
        The implementation of ``minimize``. The `fleet` object sets it; an `Executor` does not, because it
        does not return the optimizer to the script.
    """

    fleet_synchronizer: Synchronizer
    fleet_minimize: Callable[..., None]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as an object of the script's optimizer class; a copy does not average gradients."""
        return object.__new__, (type(self).__bases__[1],), cast("Any", self).__getstate__()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally within the block; the next backward pass after it averages the sum."""
        with self.fleet_synchronizer.paused():
            yield

    def zero_grad(self, *given: Any, **options: Any) -> None:
        """Clear the gradients, as the script's optimizer does."""
        self.fleet_synchronizer.on_zero_grad()
        super().zero_grad(*given, **options)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 (as every optimizer's)
        """Raise an error, because the set of parameters is fixed once the trainers have agreed on it."""
        raise ConfigurationError(
            "add_param_group() after distributed_optimizer(): the trainers have agreed on a fixed set of "
            "parameters; add the group to the torch optimizer first"
        )

    def minimize(self, loss_fn: Callable[..., Any], *originals: object, **named: object) -> None:
        """Build ``fleet.main_program``, which describes the training step, for an `Executor` to run."""
        self.fleet_minimize(loss_fn, *originals, **named)


def distribute(
    optimizer: torch.optim.Optimizer,
    copies: Copies,
    synchronizer: Synchronizer,
    model: torch.nn.Module | None = None,
    *,
    finite: FiniteCheck,
) -> torch.optim.Optimizer:
    """Return an optimizer that shares all state with `optimizer` and adds the methods of `Distributed`.

    ``backward()`` has averaged the gradients when it returns, so nothing else has to change: state, parameter
    groups and hooks are the same objects in both. Each step first checks that all trainers have its gradients
    in common, and the next exchange compares it with the others' steps. If `finite` refuses a step, gradients
    are set to None: they are averages, so all trainers skip the step.
    """
    kind = type(optimizer)
    distributed: Any = object.__new__(type(kind.__name__, (Distributed, kind), {}))
    distributed.__dict__ = optimizer.__dict__
    distributed.fleet_synchronizer = synchronizer
    trained = [parameter for _, parameter in copies.named_parameters if parameter.requires_grad]
    left_out = LeftOut(optimizer, trained, model)
    whole = copies.whole

    def check_finite() -> None:
        every = ((name, parameter.grad) for name, parameter in (whole if finite.looks else ()))
        given = {name: gradient for name, gradient in every if gradient is not None}
        if any(each.is_cuda for each in given.values()) and torch.cuda.is_current_stream_capturing():
            return  # while a CUDA graph is captured, nothing can be read from the device
        if not finite.lets_step(given):
            for parameter in trained:
                parameter.grad = None

    def before_step(_: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        synchronizer.check_ended()
        left_out.check()
        synchronizer.check_averaged()
        if getattr(optimizer, "found_inf", None) is not None:
            synchronizer.check_scaled()  # a GradScaler's kernel may skip this step
            return None
        # torch's wrapper around step() passes the optimizer itself as the first positional argument.
        (itself, closure) = (*given, options.get("closure"))[:2]
        if closure is None:
            check_finite()
            return None

        def checked_closure() -> Any:
            loss = closure()
            check_finite()
            return loss

        return (itself, checked_closure), {}

    def after_step(*_: Any) -> None:
        synchronizer.check_averaged()  # again, because a closure computes its gradients inside step()
        synchronizer.on_step(hyper_parameters(optimizer))

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    return distributed  # type: ignore[no-any-return]


def named_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the optimizer's parameters by name.

    Names come from `model`, otherwise from an optimizer built on ``model.named_parameters()``; without either
    they are ``param_{group}_{position}``.
    """
    names: dict[int, str] = {}
    if model is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[tuple[str, torch.Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        given: Any = group.get("param_names")
        for position, parameter in enumerate(group["params"]):
            fallback = given[position] if given else f"param_{number}_{position}"
            found.append((names.get(id(parameter), fallback), parameter))
    if not any(parameter.requires_grad for _, parameter in found):
        raise ConfigurationError(
            "distributed_optimizer: no parameter of the optimizer needs a gradient; expected at least one"
        )
    return found
