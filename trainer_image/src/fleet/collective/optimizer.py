"""What ``fleet.distributed_optimizer`` returns: the script's own optimizer, with ``no_sync()``."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from fleet.collective.copies import Copies
from fleet.collective.history import hyper_parameters
from fleet.collective.synchronizer import Synchronizer
from fleet.errors import ConfigurationError
from fleet.plan.source import LeftOut
from fleet.process.finite import FiniteCheck

__all__ = ["distribute", "named_parameters"]


class _Distributed:
    """Mixed into the class of the script's optimizer."""

    fleet_synchronizer: Synchronizer
    fleet_minimize: Callable[..., None]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as an optimizer of the script's class: a copy is this trainer's own."""
        return object.__new__, (type(self).__bases__[1],), cast("Any", self).__getstate__()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients here only; the next backward outside the block averages their sum."""
        with self.fleet_synchronizer.paused():
            yield

    def zero_grad(self, *given: Any, **options: Any) -> None:
        """Clear the gradients, as the script's optimizer does."""
        self.fleet_synchronizer.on_zero_grad()
        super().zero_grad(*given, **options)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 (as every optimizer's)
        """Refuse parameters that the other trainers know nothing of."""
        raise ConfigurationError(
            "add_param_group() after distributed_optimizer(): the trainers have agreed on a fixed set of "
            "parameters; add the group to the torch optimizer first"
        )

    def minimize(self, loss_fn: Callable[..., Any], *originals: object, **named: object) -> None:
        """Describe the training step as a program, for an `Executor` to run: ``fleet.main_program``."""
        self.fleet_minimize(loss_fn, *originals, **named)


def distribute(
    optimizer: torch.optim.Optimizer,
    copies: Copies,
    synchronizer: Synchronizer,
    minimize: Callable[..., None],
    model: torch.nn.Module | None = None,
    *,
    finite: FiniteCheck,
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class that shares everything with `optimizer`, and has more methods.

    The gradients are averaged when ``backward()`` returns, so there is nothing else to change: state,
    parameter groups and hooks are the same objects, seen from both. Each step first makes sure that it
    changes nothing that is not exchanged, and is told to the other trainers by the next exchange. Where
    `finite` lets no step be made, there are no gradients any more: the averages are everybody's, so all
    trainers leave it out.
    """
    kind = type(optimizer)
    both: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {}))
    both.__dict__ = optimizer.__dict__
    both.fleet_synchronizer = synchronizer
    both.fleet_minimize = minimize
    trained = [parameter for _, parameter in copies.named_parameters if parameter.requires_grad]
    left_out = LeftOut(optimizer, trained, model)
    whole = copies.whole

    def look() -> None:
        every = ((name, parameter.grad) for name, parameter in (whole if finite.looks else ()))
        given = {name: gradient for name, gradient in every if gradient is not None}
        if any(each.is_cuda for each in given.values()) and torch.cuda.is_current_stream_capturing():
            return  # nothing may be read back
        if not finite.lets_step(given):
            for parameter in trained:
                parameter.grad = None

    def check(_: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        synchronizer.check_ended()
        left_out.check()
        synchronizer.check_averaged()
        if getattr(optimizer, "found_inf", None) is not None:
            synchronizer.check_scaled()  # a GradScaler has looked, and the kernel leaves the step out
            return None
        (itself, closure) = (*given, options.get("closure"))[:2]
        if closure is None:
            look()
            return None
        return (itself, _looking(closure, look)), {}

    def note(*_: Any) -> None:
        synchronizer.check_averaged()  # of a closure, which runs inside of step()
        synchronizer.on_step(hyper_parameters(optimizer))

    optimizer.register_step_pre_hook(check)
    optimizer.register_step_post_hook(note)
    return both  # type: ignore[no-any-return]


def _looking(closure: Callable[[], Any], look: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure after which its gradients are looked at."""

    def closure_and_look() -> Any:
        loss = closure()
        look()
        return loss

    return closure_and_look


def named_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters that the optimizer steps, by name.

    Names come from `model`, else from an optimizer built on ``model.named_parameters()``, else they are
    ``param_{group}_{position}``.
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
