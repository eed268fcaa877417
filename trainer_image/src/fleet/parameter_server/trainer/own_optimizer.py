"""Support for the user's own optimizer: a guard that rejects its ``step()``, and gradient scalers.

If an optimizer declares support for scaling, ``torch.amp.GradScaler`` sets two attributes on the optimizer,
calls ``step()`` even if the scaler has found a gradient that is not finite, and then removes the attributes.
Without that call, the parameter servers would wait for a trainer that has skipped its step.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.errors import FleetError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Scaling", "StepGuard", "update_scaler"]


class StepGuard:
    """Rejects calls to ``step()`` on the optimizer passed to ``fleet.distributed_optimizer``.

    The guard is a hook. The optimizer that fleet returns shares the hooks, so both optimizers call the guard.

    Parameters
    ----------
    optimizer : Optimizer
        The user's optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._handle: RemovableHandle | None = None
        self._allowed = False

    def attach(self) -> None:
        """Start rejecting calls of ``step()``."""
        if self._handle is None:
            self._handle = self._optimizer.register_step_pre_hook(self._refuse)

    def detach(self) -> None:
        """Accept calls of ``step()`` again."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def replace(self, step: Callable[[], object]) -> None:
        """Run a step in place of the optimizer's own, between its pre-step and post-step hooks."""
        with self.allowed():
            # torch's own wrapper of step(), so that hooks and profiler marks are those of any optimizer.
            Optimizer.profile_hook_step(lambda _: step())(self._optimizer)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Accept calls of ``step()`` within the block."""
        before, self._allowed = self._allowed, True
        try:
            yield
        finally:
            self._allowed = before

    def _refuse(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer is not self._optimizer or self._allowed:
            return
        name = type(optimizer).__name__
        raise FleetError(
            f"step() was called on the {name} that was passed to fleet.distributed_optimizer(); it would "
            "train this process alone. Step the optimizer that the function returns: optimizer = "
            "fleet.distributed_optimizer(optimizer)"
        )


@dataclass(frozen=True, slots=True)
class Scaling:
    """The attributes that a gradient scaler sets on an optimizer.

    Attributes
    ----------
    scale : Tensor or None
        The factor in the gradients; None if ``scaler.unscale_(optimizer)`` has already removed it.
    found_inf : bool
        Whether a gradient is infinite or NaN.
    """

    scale: Tensor | None
    found_inf: bool

    @classmethod
    def of(cls, optimizer: Optimizer) -> "Scaling | None":
        """Return the attributes that a scaler has set on an optimizer, or None if there are none."""
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return None
        return cls(getattr(optimizer, "grad_scale", None), bool(found))

    @torch.no_grad()
    def undo(self, gradients: Iterable[Tensor]) -> None:
        """Unscale gradients exactly as the scaler would."""
        if self.scale is None or self.found_inf:
            return
        factor = self.scale.double().reciprocal().float()
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))


def update_scaler(optimizer: Optimizer) -> None:
    """Report a non-finite gradient, of this or another trainer, to the scaler that called this step.

    The scale then changes as it would in a single process, and stays equal on all trainers. An optimizer has
    no reference to the scaler, so this function searches the call stack for the scaler.
    """
    frame = sys._getframe().f_back  # noqa: SLF001 - the only way to the callers
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler):
            for found in caller._found_inf_per_device(optimizer).values():  # noqa: SLF001 - no public name
                found.fill_(1.0)
            return
        frame = frame.f_back
